"""The exports of a run: beside its checkpoints, and the final one in the root of output_dir."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint import export_dtype, export_hf
from shardyard.checkpoint.exported import note_export
from shardyard.checkpoint.side_files import write_side_files
from shardyard.config import Config
from shardyard.data.templates.exported import template_for_export
from shardyard.models import BuiltModel

logger = logging.getLogger("shardyard.train")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        if is_main:
            note_export(output_dir, step)
