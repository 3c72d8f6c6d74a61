"""Which checkpoint's weights stand in the root of a run's output_dir. Nothing here needs torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shardyard.checkpoint.manifest import MANIFEST
from shardyard.durable import write_durably
from shardyard.errors import UserError

_EXPORTED = "exported"
"""In the folder of checkpoints: the checkpoint, by its name and content."""


def note_export(output_dir: Path, step: int) -> None:
    """Say that the weights of the checkpoint of ``step``, where there is one, have been exported."""
    checkpoints = output_dir / "checkpoints"
    if exactly := _named_exactly(checkpoints, step):
        write_durably(checkpoints / _EXPORTED, exactly)


def is_exported(output_dir: Path, step: int) -> bool:
    """Whether the weights of the checkpoint of ``step`` stand in the root of ``output_dir``."""
    checkpoints = output_dir / "checkpoints"
    try:
        told = (checkpoints / _EXPORTED).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return told == _named_exactly(checkpoints, step) and _opens(output_dir)


def _opens(folder: Path) -> bool:
    """Whether a reader finds all its files, each as long as its header says, and config.json."""
    from safetensors import SafetensorError

    from shardyard.checkpoint.hf_files import facts_of_folder
    from shardyard.checkpoint.placing import has_weights

    if not has_weights(folder):
        return False
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
