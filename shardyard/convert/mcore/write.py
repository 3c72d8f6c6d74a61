"""Writing a Megatron-core checkpoint folder from the weights of a model, streamed and restartable."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardyard.convert.journal import Journal, job_of
from shardyard.convert.mcore.arguments import arguments_of
from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.layout import McoreLayout, Rank
from shardyard.convert.mcore.pieces import Link, Plan
from shardyard.convert.mcore.rank_file import RankFile
from shardyard.convert.mcore.rank_files import FILE, LATEST
from shardyard.convert.mcore.sizes import check_shapes
from shardyard.convert.weights import Weights, same_bits
from shardyard.convert.workers import Advance, run_tasks
from shardyard.durable import remove_leftovers, sync, temporary_name, write_durably
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
    write_beside: Callable[[], None] | None = None,
) -> Written:
    """Write ``folder`` in ``layout``; ``write_beside`` writes config.json and what else stands beside it.

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
    sizes = {rank: _bytes(_shapes(weights, plan, rank)) for rank in layout.ranks()}
    check_shapes(plan.model, weights.facts, weights.folder)
    job = _Job(weights, folder, plan)
    with Journal(folder, job_of(weights, folder, "mcore", **_options(plan))) as journal:
        kept = [rank for rank in sizes if _is_finished(journal, job.name_of(rank))]
        try:
            _write_files(job, sizes, kept, journal, workers, progress)
        except BaseException:
            names = [job.name_of(rank) for rank in sizes]
            _tidy([folder / name for name in names if not _is_finished(journal, name)])
            raise
        _finish(folder, weights, write_beside)
        journal.complete()
    return Written(folder, len(sizes), len(kept), left_out)


def _options(plan: Plan) -> dict[str, Any]:
    """What makes two layouts the same."""
    return {**asdict(plan.layout), "mtp_layers": plan.mtp_layers, "family": plan.model.model_type}


def _is_finished(journal: Journal, name: str) -> bool:
    return name in journal.finished or str(journal.folder / name) in journal.finished


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
    behind = tuple(name for name in extra if _is_left_out(name, weights, plan))
    unknown = [name for name in extra if name not in behind and not name.endswith(".rotary_emb.inv_freq")]
    if unknown:
        raise UserError(
            f"{weights.folder} holds {unknown[0]}{_more(unknown)}, which has no place in a Megatron-core "
            f"{plan.model.model_type} with this config.json; nothing is written"
        )
    return behind


def _is_left_out(name: str, weights: Weights, plan: Plan) -> bool:
    """Whether it belongs to an MTP layer that is not asked for; a plain layer behind the last one is one that
    config.json forgets.
    """
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match is None or int(match[1]) < plan.model.layers + plan.mtp_layers:
        return False
    return plan.model.family.mtp and f"{match[0]}eh_proj.weight" in weights.facts


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


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


def _tidy(paths: list[Path]) -> None:
    """Remove what an error or a killed worker has left of files that do not count as finished."""
    for path in paths:
        if path.parent.is_dir():
            path.unlink(missing_ok=True)
            remove_leftovers(path)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
                path.parent.parent.rmdir()


def _bytes(shapes: Shapes) -> int:
    return sum(t.numel() * t.element_size() for tensors in shapes.values() for t in tensors.values())


def _write_files(
    job: _Job,
    sizes: dict[Rank, int],
    kept: list[Rank],
    journal: Journal,
    workers: int,
    progress: Progress | None,
) -> None:
    together: dict[tuple[int, int], list[Rank]] = {}
    for rank in sizes:
        if rank not in kept:
            together.setdefault((rank.pp, rank.ep), []).append(rank)
    done = [sum(sizes[rank] for rank in kept)]
    total = sum(sizes.values())

    def advance(count: int) -> None:
        done[0] += count
        if progress is not None:
            progress(done[0], total)

    def record(ranks: list[Rank], _: None) -> None:
        for rank in ranks:
            journal.record(job.name_of(rank))

    advance(0)
    run_tasks(list(together.values()), job, workers=workers, advance=advance, done=record)


@dataclass
class _Job:
    """Writes the files of some ranks side by side, because they come from the same tensors."""

    weights: Weights
    folder: Path
    plan: Plan

    def name_of(self, rank: Rank) -> str:
        """The name of a rank's file within the folder."""
        return f"{ITERATION}/{self.plan.layout.folder_of(rank)}/{FILE}"

    def __call__(self, ranks: list[Rank], advance: Advance) -> None:
        plan = self.plan
        links = {rank: plan.links(rank) for rank in ranks}
        with ExitStack() as stack:
            files = {rank: stack.enter_context(self._open(rank)) for rank in ranks}
            for chunk in range(plan.layout.chunks(plan.model)):
                key = plan.chunk_key(chunk)
                for side_by_side in zip(*(links[rank][chunk] for rank in ranks), strict=True):
                    wholes: dict[str, torch.Tensor] = {}
                    for rank, link in zip(ranks, side_by_side, strict=True):
                        known = wholes  # of the rank before: mostly the same tensors
                        wholes = {
                            name: known[name] if name in known else _read(self.weights, name)
                            for name in link.hf
                        }
                        piece = _piece(link, list(wholes.values()), self.weights.folder)
                        advance(files[rank].fill(key, link.name, piece))
            for file in files.values():
                file.finish()

    def _open(self, rank: Rank) -> RankFile:
        chunks = _shapes(self.weights, self.plan, rank)
        named = {self.plan.chunk_key(chunk): tensors for chunk, tensors in chunks.items()}
        return RankFile(self.folder / self.name_of(rank), arguments_of(self.plan), named)


def _read(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights.read(name)
    if (tuple(tensor.shape), tensor.dtype) != (tuple(weights.facts[name][0]), weights.facts[name][1]):
        raise UserError(f"{weights.folder}: {name} is not what its header says")
    return tensor


def _finish(folder: Path, weights: Weights, write_beside: Callable[[], None] | None) -> None:
    try:
        sync(folder / ITERATION)
        if write_beside is not None:
            write_beside()
        else:
            _put(
                folder / "config.json", json.dumps(dict(weights.config), indent=2, ensure_ascii=False) + "\n"
            )
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
