"""Writing a Megatron-core checkpoint folder from the weights of a model, streamed and restartable."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from shardyard.convert.mcore.arguments import arguments_of
from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.journal import Journal
from shardyard.convert.mcore.layout import McoreLayout, Rank
from shardyard.convert.mcore.pieces import Link, Plan
from shardyard.convert.mcore.rank_file import RankFile
from shardyard.convert.mcore.rank_files import FILE, LATEST
from shardyard.convert.mcore.rules import same_bits
from shardyard.convert.weights import Weights
from shardyard.durable import sync, temporary_name, write_durably
from shardyard.errors import UserError

ITERATION = "iter_0000001"
Progress = Callable[[int, int], None]
"""Told the bytes that are written and those that will be."""


@dataclass(frozen=True)
class Written:
    """What a conversion made."""

    folder: Path
    files: int
    kept: int
    """Files that an earlier, interrupted run of the same conversion had finished."""
    left_out: tuple[str, ...]
    """Tensors of the source that the layout does not carry (MTP layers, where none are asked for)."""


def write_mcore(
    weights: Weights,
    folder: Path,
    layout: McoreLayout,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    model_type: str | None = None,
) -> Written:
    """Write ``folder`` in ``layout``.

    One process writes the files of one stage and expert rank side by side, so that the source is read once
    for all tensor-parallel ranks; it holds the source of one mcore tensor and one rank's piece of it. A file
    has its name only once it is complete, and ``latest_checkpointed_iteration.txt``, without which no reader
    takes the folder, is written last. What was finished before a kill is kept when the same conversion
    (source, layout) is started again.

    Raises:
        UserError: the family is not known, the layout does not fit the model, tensors are missing, left over
            or of the wrong shape, the folder holds something else, or it cannot be written.
    """
    plan = plan_of(weights, layout, model_type)
    left_out = _check_names(weights, plan)
    _check_copies(weights, plan)
    shapes = {rank: _shapes(weights, plan, rank) for rank in layout.ranks()}
    journal = Journal.open(folder, _fingerprint(weights, plan), finished=LATEST, work=ITERATION)
    if not journal.complete:
        _write_files(weights, folder, plan, shapes, journal, workers, progress)
        _finish(folder, weights)
    return Written(folder, len(shapes), len(journal.kept), left_out)


def plan_of(weights: Weights, layout: McoreLayout, model_type: str | None = None) -> Plan:
    """The plan for a model's weights.

    Raises:
        UserError: the family is not known, or the layout does not fit.
    """
    model = Model.of(weights.config, model_type)
    layout.check(model)
    there = 0
    while model.family.mtp and f"model.layers.{model.layers + there}.eh_proj.weight" in weights.facts:
        there += 1
    wanted = there if layout.mtp_layers is None else layout.mtp_layers
    if wanted > there:
        raise UserError(f"mtp_num_layers is {wanted}, but {weights.folder} holds {there} MTP layers")
    return Plan(model, layout, wanted)


def _check_names(weights: Weights, plan: Plan) -> tuple[str, ...]:
    """All tensors are used and none is missing; the names of MTP layers that are left out."""
    used = {name for rank in plan.layout.ranks() for links in plan.links(rank).values() for link in links
            for name in link.hf}  # fmt: skip
    missing = sorted(used - weights.facts.keys())
    if missing:
        raise UserError(
            f"{weights.folder} lacks {missing[0]}{_more(missing)}, which {plan.model.model_type} with this "
            "config.json has"
        )
    extra = [name for name in weights.facts if name not in used and name not in plan.copies()]
    behind = tuple(name for name in extra if _layer_of(name) >= plan.model.layers + plan.mtp_layers)
    unknown = [name for name in extra if name not in behind and not name.endswith(".rotary_emb.inv_freq")]
    if unknown or (behind and not plan.model.family.mtp):
        names = unknown or list(behind)
        raise UserError(
            f"{weights.folder} holds {names[0]}{_more(names)}, which has no place in a Megatron-core "
            f"{plan.model.model_type}; nothing is written"
        )
    return behind


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and parts[2].isdigit() else -1


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more tensors" if len(names) > 1 else ""


def _check_copies(weights: Weights, plan: Plan) -> None:
    for name, original in plan.copies().items():
        if name in weights.facts and not same_bits(weights.read(name), weights.read(original)):
            raise UserError(
                f"{weights.folder}: {name} differs from {original}; Megatron-core keeps one tensor for both"
            )


Shapes = dict[int, dict[str, torch.Tensor]]


def _shapes(weights: Weights, plan: Plan, rank: Rank) -> Shapes:
    """Meta tensors of a rank's file, by chunk; the rules themselves say what fits."""
    return {
        chunk: {link.name: _piece(link, _metas(weights, link), weights.folder) for link in links}
        for chunk, links in plan.links(rank).items()
    }


def _metas(weights: Weights, link: Link) -> list[torch.Tensor]:
    facts = (weights.facts[name] for name in link.hf)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in facts]


def _piece(link: Link, wholes: list[torch.Tensor], folder: Path) -> torch.Tensor:
    try:
        return link.rule.piece(wholes, link.index, link.count)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: {link.hf[0]} does not fit its place {link.name}: {error}") from error


def _fingerprint(weights: Weights, plan: Plan) -> str:
    """What makes two conversions the same: the source's files, names, shapes and dtypes, and the layout."""
    source = weights.folder
    files = [
        (str(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.rglob("*"))
        if path.is_file()
    ]
    facts = [(name, list(shape), str(dtype)) for name, (shape, dtype) in weights.facts.items()]
    job = [str(source.resolve()), files, facts, dict(weights.config), plan.layout.as_data(), plan.mtp_layers,
           plan.model.model_type]  # fmt: skip
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class _Unit:
    """Files that are written side by side, because they come from the same tensors."""

    ranks: tuple[Rank, ...]


def _units(plan: Plan, shapes: dict[Rank, Shapes], journal: Journal) -> Iterator[_Unit]:
    together: dict[tuple[int, int], list[Rank]] = {}
    for rank in shapes:
        if not journal.has(_relative(plan, rank)):
            together.setdefault((rank.pp, rank.ep), []).append(rank)
    for ranks in together.values():
        yield _Unit(tuple(ranks))


def _relative(plan: Plan, rank: Rank) -> str:
    return f"{ITERATION}/{plan.layout.folder_of(rank)}/{FILE}"


def _bytes(shapes: Shapes) -> int:
    return sum(t.numel() * t.element_size() for tensors in shapes.values() for t in tensors.values())


def _write_files(
    weights: Weights,
    folder: Path,
    plan: Plan,
    shapes: dict[Rank, Shapes],
    journal: Journal,
    workers: int,
    progress: Progress | None,
) -> None:
    units = list(_units(plan, shapes, journal))
    total = sum(_bytes(s) for s in shapes.values())
    todo = sum(_bytes(shapes[rank]) for unit in units for rank in unit.ranks)
    tell = _Meter(progress, total - todo, total)
    if min(workers, len(units)) <= 1:
        for unit in units:
            journal.add(_write_unit(weights, folder, plan, unit, tell.add))
        return
    context = multiprocessing.get_context("spawn")  # threads of the caller must not be forked
    with ProcessPoolExecutor(min(workers, len(units)), context) as pool:
        jobs = {pool.submit(_write_unit, weights, folder, plan, unit): unit for unit in units}
        try:
            for job in as_completed(jobs):
                journal.add(job.result())
                tell.add(sum(_bytes(shapes[rank]) for rank in jobs[job].ranks))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Meter:
    def __init__(self, progress: Progress | None, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self.add(0)

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write_unit(
    weights: Weights, folder: Path, plan: Plan, unit: _Unit, tell: Callable[[int], None] | None = None
) -> dict[str, int]:
    """Write the files of some tensor-parallel ranks; the size of each by its name within the folder."""
    links = {rank: plan.links(rank) for rank in unit.ranks}
    with ExitStack() as stack:
        files = {
            rank: stack.enter_context(
                RankFile(
                    folder / _relative(plan, rank),
                    arguments_of(plan),
                    {plan.chunk_key(c): t for c, t in _shapes(weights, plan, rank).items()},
                )
            )
            for rank in unit.ranks
        }
        for chunk in range(plan.layout.chunks(plan.model)):
            for side_by_side in zip(*(links[rank][chunk] for rank in unit.ranks), strict=True):
                wholes: dict[str, torch.Tensor] = {}
                for rank, link in zip(unit.ranks, side_by_side, strict=True):
                    wholes = {
                        name: wholes[name] if name in wholes else _read(weights, name) for name in link.hf
                    }
                    piece = _piece(link, [wholes[name] for name in link.hf], weights.folder)
                    size = files[rank].fill(plan.chunk_key(chunk), link.name, piece)
                    if tell is not None:
                        tell(size)
        return {_relative(plan, rank): file.finish() for rank, file in files.items()}


def _read(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights.read(name)
    if (tuple(tensor.shape), tensor.dtype) != (tuple(weights.facts[name][0]), weights.facts[name][1]):
        raise UserError(f"{weights.folder}: {name} is not what its header says")
    return tensor


def _finish(folder: Path, weights: Weights) -> None:
    try:
        sync(folder / ITERATION)
        _put(folder / "config.json", json.dumps(dict(weights.config), indent=2, ensure_ascii=False) + "\n")
        _put(folder / LATEST, "1")
    except OSError as error:
        raise UserError(f"{folder} is not written: {error}") from error


def _put(path: Path, text: str) -> None:
    temporary = temporary_name(path)
    try:
        write_durably(temporary, text)
        temporary.replace(path)
        sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
