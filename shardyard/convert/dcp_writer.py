"""`Weights` into a DCP folder: a checkpoint of ours without optimizer, as training reads it.

Tensors have their names in memory (``model.<name>``) and are made when they are written. The folder is spread
over files of some GB, each written by one worker, so a conversion that is killed goes on with the next file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from shardyard.checkpoint.manifest import (
    ASSETS,
    METADATA,
    RUN_STATE,
    FileFacts,
    Manifest,
    facts_of,
    write_manifest,
)
from shardyard.convert.journal import Journal, job_of
from shardyard.convert.names import ModelNames, Unit
from shardyard.convert.progress import ByteProgress
from shardyard.convert.side_files import write_side_files
from shardyard.convert.weights import Facts, Weights, config_of, size_of
from shardyard.convert.workers import Advance, run_tasks
from shardyard.durable import flush, sync, write_durably

PART_BYTES = 5_000_000_000
_PREFIX = "model."


class _Part(NamedTuple):
    """One file of the folder."""

    number: int
    units: tuple[Unit, ...]

    @property
    def file(self) -> str:
        return f"__{self.number}_0.distcp"

    @property
    def facts(self) -> dict[str, Facts]:
        return {_PREFIX + name: facts for unit in self.units for name, facts in unit.results.items()}

    @property
    def size(self) -> int:
        return sum(map(size_of, self.facts.values()))


def write_dcp(
    weights: Weights,
    folder: Path,
    *,
    side_dir: Path | None = None,
    part_bytes: float = PART_BYTES,
    workers: int = 1,
) -> list[str]:
    """Write ``weights`` as a checkpoint with config.json and what stands beside it in ``side_dir``.

    ``.metadata`` and the manifest, without which it is no checkpoint, come last.

    Returns:
        Names of tensors that transformers' model has no place for (heads of multi-token prediction): they are
        not in the checkpoint.

    Raises:
        UserError: config.json's model wants other tensors, the folder holds something else, or cannot be
            written.
    """
    names = ModelNames(weights.config, weights.folder)
    units, dropped = names.units_to_memory(weights.facts)
    places = {name: place for place, name in enumerate(weights.facts)}
    units.sort(key=lambda unit: min(places[name] for name in unit.sources))
    parts = list(_parts(units, part_bytes))
    job = job_of(weights, folder, "dcp", shard_bytes=int(part_bytes), side_files=side_dir or weights.folder)
    with Journal(folder, job) as journal:
        _write_parts(weights, names, parts, journal, workers)
        _write_metadata(parts, journal)
        _write_rest(weights, side_dir or weights.folder, journal)
        journal.complete()
    return dropped


def _parts(units: Sequence[Unit], part_bytes: float) -> Iterator[_Part]:
    """Units in order, in files of at most ``part_bytes`` where one unit is not larger."""
    pending: list[Unit] = []
    filled = number = 0
    for unit in units:
        size = sum(map(size_of, unit.results.values()))
        if pending and filled + size > part_bytes:
            yield _Part(number, tuple(pending))
            pending, filled, number = [], 0, number + 1
        pending.append(unit)
        filled += size
    yield _Part(number, tuple(pending))


def _write_parts(
    weights: Weights, names: ModelNames, parts: Sequence[_Part], journal: Journal, workers: int
) -> None:
    left = [part for part in parts if part.file not in journal.finished]
    total, open_ = (sum(part.size for part in some) for some in (parts, left))
    with ByteProgress("writing", total, done=total - open_) as progress:
        run_tasks(
            left,
            functools.partial(_write_part, weights, names, journal.folder),
            workers=workers,
            advance=progress.advance,
            done=lambda part, facts: journal.record(part.file, **facts),
        )


def _write_part(
    weights: Weights, names: ModelNames, folder: Path, part: _Part, advance: Advance
) -> dict[str, Any]:
    """Write one file, each tensor as torch.save writes it, which is what DCP's own writer does; but that one
    keeps all tensors of a file until its end.

    Returns:
        The hash, and where in the file each tensor lies.
    """
    path = folder / part.file
    places: dict[str, list[int]] = {}
    try:
        with path.open("wb") as file:
            for unit in part.units:
                made = names.to_memory({name: weights.read(name) for name in unit.sources})
                for name in unit.results:
                    begin, tensor = file.tell(), alone(made.pop(name))
                    torch.save(tensor, file)
                    places[_PREFIX + name] = [begin, file.tell() - begin]
                    advance(tensor.nbytes)
            flush(file)
    except BaseException as error:
        path.unlink(missing_ok=True)
        # torch's writer of archives fails once more on the way out of a full disk's error.
        raise _cause_on_disk(error) or error from error
    return {"sha256": facts_of(path).sha256, "places": places}


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage of its own: torch.save writes all of a storage."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _cause_on_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _plan(part: _Part) -> SavePlan:
    """What DCP would plan for a rank that holds these tensors whole."""
    on_meta = {
        key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in part.facts.items()
    }
    return create_default_local_save_plan(on_meta, is_coordinator=True)


def _write_metadata(parts: Sequence[_Part], journal: Journal) -> None:
    """DCP's own .metadata of all files."""
    plans, metadata = create_default_global_save_plan([_plan(part) for part in parts])
    results = [
        [_result(item, part.file, journal.finished[part.file]["places"]) for item in plan.items]
        for part, plan in zip(parts, plans, strict=True)
    ]
    FileSystemWriter(journal.folder, sync_files=True).finish(metadata, results)


def _result(item: WriteItem, file: str, places: Mapping[str, Sequence[int]]) -> WriteResult:
    offset, length = places[item.index.fqn]
    return WriteResult(item.index, length, _StorageInfo(file, offset, length))


def _write_rest(weights: Weights, side_dir: Path, journal: Journal) -> None:
    """Side files, the run state of a run that has not begun, and the manifest of all files."""
    folder = journal.folder
    (folder / ASSETS).mkdir(exist_ok=True)
    write_side_files(config_of(weights), side_dir, folder / ASSETS)
    sync(folder / ASSETS)
    write_durably(folder / RUN_STATE, json.dumps({"data_order": "", "step": 0}))
    assets = sorted(path for path in (folder / ASSETS).rglob("*") if path.is_file())
    small = [RUN_STATE, METADATA, *(str(path.relative_to(folder)) for path in assets)]
    files = {name: facts_of(folder / name) for name in small}
    files |= {name: FileFacts(facts["bytes"], facts["sha256"]) for name, facts in journal.finished.items()}
    write_manifest(folder, Manifest(files, ranks=1, torch=torch.__version__))
