"""A run folder belongs to one run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from shardyard.checkpoint.placing import remove_export_leftovers
from shardyard.errors import UserError

# What a run leaves behind, any of which shows that the folder is taken.
_TRACES = ("checkpoints", "metrics.jsonl", "resolved_config.yaml", "config.json", "model.safetensors")


def check_output_dir(
    output_dir: Path, *, resuming: bool, overwrite: bool, inputs: Sequence[Path] = ()
) -> bool:
    """Whether the folder holds another run that would be moved aside; nothing is written.

    ``inputs`` are what this run reads (its model, tokenizer, data): never moved, nor overwritten by the
    export.

    Raises:
        UserError: the folder holds a run and neither option is set, or is an input, or cannot be written.
    """
    output_dir = Path(os.path.realpath(output_dir))
    if any(output_dir.samefile(path) for path in inputs if path.exists() and output_dir.exists()):
        raise UserError(f"training.output_dir: {output_dir} is what this run reads from; name another folder")
    traces = [name for name in _TRACES if (output_dir / name).exists()]
    traces += [path.name for path in output_dir.glob("model-*.safetensors")] if output_dir.is_dir() else []
    if traces and not resuming and not overwrite:
        raise UserError(
            f"training.output_dir: {output_dir} holds another run ({traces[0]}). Continue it with "
            "training.resume_from_checkpoint: latest, name another folder, or set "
            "training.overwrite_output_dir: true to move it aside."
        )
    existing = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"training.output_dir: {output_dir} cannot be written: {existing} is no writable folder"
        )
    moves = bool(traces) and overwrite and not resuming
    if moves:
        _refuse_to_move(output_dir, inputs)
    return moves


def prepare_output_dir(
    output_dir: Path, *, resuming: bool, overwrite: bool, inputs: Sequence[Path] = ()
) -> Path | None:
    """Make the folder the run's own; the folder that an old run was moved to, if any.

    With ``overwrite`` the old run moves to ``<dir>.old-<time>``; nothing is deleted but what killed exports
    of this run have left under temporary names. Global rank 0 calls it, when all else is known to be right.

    Raises:
        UserError: as `check_output_dir`, or the folder cannot be made.
    """
    moves = check_output_dir(output_dir, resuming=resuming, overwrite=overwrite, inputs=inputs)
    output_dir = Path(os.path.realpath(output_dir))  # a link stays where it points
    try:
        moved = _move_aside(output_dir) if moves else None
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        remove_export_leftovers(output_dir)
    except OSError as error:
        raise UserError(f"training.output_dir: {output_dir} cannot be written: {error.strerror}") from error
    return moved


def _refuse_to_move(output_dir: Path, inputs: Sequence[Path]) -> None:
    for path in (*inputs, Path.cwd()):
        if Path(os.path.realpath(path)).is_relative_to(output_dir):
            raise UserError(
                f"training.overwrite_output_dir: {output_dir} holds {path}, which this run needs where "
                "it is; name another training.output_dir"
            )


def _move_aside(output_dir: Path) -> Path:
    moved = _free_name(output_dir)
    try:
        output_dir.rename(moved)
    except OSError as error:
        raise UserError(
            f"training.overwrite_output_dir: {output_dir} cannot be moved aside: {error.strerror}"
        ) from error
    return moved


def _free_name(output_dir: Path) -> Path:
    stem = f"{output_dir.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 0 else f"{stem}-{n}" for n in range(1000))
    return next(path for name in names if not (path := output_dir.with_name(name)).exists())
