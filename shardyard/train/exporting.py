"""The exports of a run: beside its checkpoints, and the final one in the root of output_dir."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shardyard.checkpoint import export_dtype, export_hf
from shardyard.checkpoint.hf_files import facts_of_folder
from shardyard.checkpoint.manifest import MANIFEST
from shardyard.checkpoint.placing import has_weights
from shardyard.checkpoint.side_files import write_side_files
from shardyard.config import Config
from shardyard.data.templates.exported import template_for_export
from shardyard.durable import write_durably
from shardyard.errors import UserError
from shardyard.models import BuiltModel

logger = logging.getLogger("shardyard.train")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXPORTED = "exported"
"""In the folder of checkpoints: which checkpoint's weights stand in the root of output_dir."""


def named_template(config: Config) -> str | None:
    """The template that renders a run's conversations; None for documents, and for the tokenizer's own."""
    return config.data.template if config.data.data_manager_type == "lf" else None


@dataclass(frozen=True)
class Exporter:
    """Writes the model of a run in Hugging Face format."""

    config: Config
    built: BuiltModel
    tokenizer: Any

    @property
    def source_dir(self) -> Path | None:
        """The model that the run began with; None for new weights."""
        return None if self.config.model.train_from_scratch else self.built.source

    @property
    def save_dtype(self) -> torch.dtype | None:
        return _DTYPES.get(self.config.training.export_dtype or "")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of most exported tensors; the source's files are opened for it once."""
        return export_dtype(self.built.model, self.source_dir, self.save_dtype)

    @cached_property
    def chat_template(self) -> str | None:
        data = self.config.data
        return template_for_export(
            self.tokenizer, named_template(self.config), enable_thinking=data.enable_thinking,
            default_system=data.default_system, tool_format=data.tool_format,
        )  # fmt: skip

    def write_assets(self, folder: Path) -> None:
        """What makes a model of weights: config, tokenizer, template, generation config; on one rank."""
        write_side_files(
            self.built.model, folder, self.source_dir, self.tokenizer, self.dtype, self.chat_template
        )

    def into(self, folder: Path) -> None:
        """Export to ``folder``; every rank calls it.

        Raises:
            UserError: it cannot be written, or what was written differs from the model.
        """
        report = export_hf(
            self.built.model,
            out_dir=folder,
            source_dir=self.source_dir,
            tokenizer=self.tokenizer,
            save_dtype=self.save_dtype,
            chat_template=self.chat_template,
        )
        logger.info("Huggingface checkpoint saved at %s successfully! (%s)", folder, report)

    def finish(self, step: int, *, is_main: bool) -> None:
        """The final export, and word of it for a later start of the same run."""
        output_dir = Path(self.config.training.output_dir)
        self.into(output_dir)
        checkpoints = output_dir / "checkpoints"
        if is_main and (exactly := _named_exactly(checkpoints, step)):
            write_durably(checkpoints / _EXPORTED, exactly)


def is_exported(output_dir: Path, step: int) -> bool:
    """Whether the weights of the checkpoint of ``step`` stand in the root of ``output_dir``."""
    checkpoints = output_dir / "checkpoints"
    try:
        told = (checkpoints / _EXPORTED).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return told == _named_exactly(checkpoints, step) and has_weights(output_dir) and _opens(output_dir)


def _opens(folder: Path) -> bool:
    """Whether each weight file is as long as its header says, and config.json is there."""
    try:
        return bool(facts_of_folder(folder)) and (folder / "config.json").is_file()
    except (OSError, SafetensorError, UserError):
        return False


def _named_exactly(checkpoints: Path, step: int) -> str | None:
    """A checkpoint by its name and content, as a run that went back saves others under the same names; None
    where there is none.
    """
    name = f"global_step_{step}"
    try:
        content = hashlib.sha256((checkpoints / name / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None
    return f"{name} {content}\n"
