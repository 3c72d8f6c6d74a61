"""What ``--model PATH`` names: a run, one of its checkpoints, or a folder of weights in any form.

Nothing here needs torch.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from shardyard.checkpoint.exported import is_exported
from shardyard.checkpoint.folder import BEST, complete, named, pointed, step_of
from shardyard.checkpoint.manifest import fault_of
from shardyard.errors import UserError, first_line

logger = logging.getLogger("shardyard.infer")

RESOLVED_CONFIG = "resolved_config.yaml"
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Parallel = Literal["auto", "none", "tp", "fsdp"]


@dataclass(frozen=True)
class Choice:
    """What the user named on the command line or in the YAML."""

    model: str
    """A run's output_dir, a checkpoint, a Hugging Face, DCP or Megatron-core folder, or a hub id."""
    tokenizer: str | None = None
    config: str | None = None
    """The folder of config.json, where the weights' folder has none."""
    checkpoint: str = "latest"
    """Of a run: ``latest``, ``best`` or a step."""
    dtype: Dtype = "auto"
    """auto: that of the run or of config.json on an accelerator, fp32 on a CPU."""
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    template: str | None = None
    """A name or file as in ``data.template``, instead of the model's own chat template."""
    enable_thinking: bool | None = None
    parallel: Parallel = "auto"
    """How more ranks share the model; auto: tp where the family has a plan for it, else fsdp."""


@dataclass(frozen=True)
class Found:
    """The folder to read, and what is known of it."""

    weights: str
    name: str
    """For people, and for clients of a service: never a path."""
    run: dict[str, Any] | None = None
    """The resolved config of the run that it comes from, by section."""
    run_dir: Path | None = None
    step: int | None = None

    @property
    def lasting_name(self) -> str:
        """``name`` without the step: the same after the run has gone on."""
        return self.name if self.run_dir is None else self.run_dir.name


def find(choice: Choice) -> Found:
    """Which folder ``choice.model`` names.

    Of a run: its export, if that is of the checkpoint that is meant, else the checkpoint.

    Raises:
        UserError: there is no such folder or checkpoint, or one that is not complete.
    """
    folder = Path(choice.model).expanduser()
    if not folder.is_dir():
        if folder.exists() or choice.model.startswith((".", "/", "~")) or choice.model.count("/") != 1:
            raise UserError(
                f"--model: no folder {choice.model}. Name a run's output_dir, a model folder or a hub id "
                "such as org/name"
            )
        _of_a_run_only(choice)
        return Found(choice.model, choice.model)
    folder = folder.resolve()
    if folder.name == "checkpoints" and named(folder):
        folder = folder.parent
    if named(folder / "checkpoints"):
        return _of_run(folder, choice)
    if step_of(folder) is not None and folder.parent.name == "checkpoints":
        _of_a_run_only(choice)
        return _checkpoint(folder.parent.parent, folder)
    _of_a_run_only(choice)
    run_dir = folder if (folder / RESOLVED_CONFIG).is_file() else None
    return Found(str(folder), folder.name, _config_of(run_dir), run_dir)


def _of_a_run_only(choice: Choice) -> None:
    if choice.checkpoint != "latest":
        raise UserError(
            f"--checkpoint {choice.checkpoint}: {choice.model} is not the output_dir of a run with "
            "checkpoints"
        )


def _of_run(run_dir: Path, choice: Choice) -> Found:
    checkpoints = run_dir / "checkpoints"
    wanted = choice.checkpoint
    if wanted == "latest":
        found = complete(checkpoints)
        if not found:
            raise UserError(
                f"--model: none of the checkpoints in {checkpoints} is complete (`shardyard checkpoint "
                f"verify {run_dir}` tells more)"
            )
        path = found[-1]
    elif wanted == BEST:
        path = pointed(checkpoints, BEST)
        if path is None:
            raise UserError(
                f"--checkpoint best: {checkpoints} names no best checkpoint (training.keep_best_checkpoint "
                "keeps one)"
            )
    else:
        path = _of_step(checkpoints, wanted)
    return _checkpoint(run_dir, path)


def _of_step(checkpoints: Path, wanted: str) -> Path:
    steps = {step: path for path in named(checkpoints) if (step := step_of(path)) is not None}
    if not (wanted.isascii() and wanted.isdigit()) or int(wanted[:20]) not in steps:
        raise UserError(
            f"--checkpoint {wanted}: {checkpoints} has the steps {', '.join(map(str, steps))}; or say latest "
            "or best"
        )
    return steps[int(wanted)]


def _checkpoint(run_dir: Path, path: Path) -> Found:
    if (path / "manifest.json").is_file() and (fault := fault_of(path)):
        raise UserError(f"--model: {path} is not complete: {fault}")
    step, run = step_of(path), _config_of(run_dir)
    assert step is not None
    weights = path / "hf" if (path / "hf" / "config.json").is_file() else path
    # with load_best_model_at_end the export is that of another step
    of_best = run is not None and run.get("training", {}).get("load_best_model_at_end")
    if is_exported(run_dir, step) and not of_best:
        weights = run_dir
    logger.info("%s: step %d, read from %s", run_dir.name, step, _shown(weights))
    return Found(str(weights), f"{run_dir.name}-step{step}", run, run_dir, step)


def _shown(path: Path) -> str:
    """``path`` as the user would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _config_of(run_dir: Path | None) -> dict[str, Any] | None:
    """The resolved config of a run, by section; None, with a word of it, where its file is missing.

    Raises:
        UserError: a file that cannot be read. Prompts are rendered by it: without it answers would be others.
    """
    if run_dir is None:
        return None
    file = run_dir / RESOLVED_CONFIG
    try:
        told = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        logger.warning(
            "%s is missing: prompts are rendered without the run's data and inference settings, "
            "so answers may not be as trained", _shown(file),
        )  # fmt: skip
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"--model: {file} cannot be read: {first_line(error)}") from error
    if not isinstance(told, dict) or not all(isinstance(part, dict) for part in told.values()):
        raise UserError(f"--model: {file} holds no sections of a run's settings; restore it or move it away")
    return told


def cache_folder() -> Path:
    """Where conversions of Megatron-core folders are kept: XDG_CACHE_HOME or ~/.cache, then shardyard."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardyard" / "converted"
