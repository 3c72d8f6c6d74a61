"""`Weights` into a Hugging Face folder: files planned first, then filled one tensor at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from shardyard.checkpoint.hf_files import INDEX, FilePlan, FileWriter, PlannedFile, plan_files
from shardyard.convert.journal import Journal, job_of
from shardyard.convert.progress import ByteProgress
from shardyard.convert.side_files import write_side_files
from shardyard.convert.weights import Weights, config_of
from shardyard.convert.workers import Advance, run_tasks
from shardyard.durable import sync, temporary_name, write_durably

SHARD_BYTES = 5_000_000_000


def write_hf(
    weights: Weights,
    folder: Path,
    *,
    side_dir: Path | None = None,
    shard_bytes: float = SHARD_BYTES,
    workers: int = 1,
) -> Sequence[Path]:
    """Write ``weights`` as safetensors of at most ``shard_bytes`` each, with config.json and what stands
    beside it in ``side_dir``. Each worker holds one tensor, or what is converted together with it.

    Files take their names when they are whole and were read again; the index, without which several files are
    no model, comes last. What a killed conversion has finished is kept.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    plan = plan_files(weights.facts, shard_bytes)
    job = job_of(weights, folder, "hf", shard_bytes=int(shard_bytes), side_files=side_dir or weights.folder)
    with Journal(folder, job) as journal:
        _write_files(weights, plan, journal, workers)
        write_side_files(config_of(weights), side_dir or weights.folder, folder)
        if (index := plan.index()) is not None:
            temporary = temporary_name(folder / INDEX)
            write_durably(temporary, index)
            temporary.replace(folder / INDEX)
        journal.complete()
    return [folder / file.name for file in plan.files]


def _write_files(weights: Weights, plan: FilePlan, journal: Journal, workers: int) -> None:
    for file in plan.files:
        journal.clear_leftovers(file.name)
    left = [file for file in plan.files if file.name not in journal.finished]
    done = sum(file.size for file in plan.files) - sum(file.size for file in left)
    with ByteProgress("writing", plan.total_size, done=done) as progress:
        run_tasks(
            left,
            functools.partial(_write_file, weights, journal.folder),
            workers=workers,
            advance=progress.advance,
            done=lambda file, _: journal.record(file.name),
        )


def _write_file(weights: Weights, folder: Path, file: PlannedFile, advance: Advance) -> None:
    """One file, whole under its name or not at all."""
    temporary = temporary_name(folder / file.name)
    order = [name for name in weights.facts if name in file.places]
    try:
        with FileWriter(file, temporary) as writer:
            for name in order:
                writer.write(name, weights.read(name))
                advance(file.places[name].size)
            writer.finish()
        temporary.replace(folder / file.name)
        sync(folder)
    finally:
        temporary.unlink(missing_ok=True)
