"""The trained model in Hugging Face format: keys, shapes, dtypes and ties of its source, verified.

First every name, shape and dtype is worked out on meta tensors (`turning_back`) and given its place in a file
(`hf_files`), then the tensors stream from the ranks that hold them into files that several ranks write
(`streaming`), each of which its writer reads again; at last all move to their place at once (`placing`).
`save_pretrained` is not used: it would gather everything and choose dtypes itself. `check_exportable` makes
the same plan at step 0, so that what cannot be exported is found then.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.hf_files import INDEX, Facts, FilePlan, facts_of_folder, plan_files
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.pieces import pieces_of
from shardyard.checkpoint.placing import put_in_place, temporary_folder
from shardyard.checkpoint.read_back import answer_of, check_reads_back, probe
from shardyard.checkpoint.side_files import is_native, write_side_files
from shardyard.checkpoint.state import any_stage, names_of_whole, persistent_tensors
from shardyard.checkpoint.streaming import Stream, Task
from shardyard.checkpoint.turning_back import Unit, units_of
from shardyard.errors import UserError
from shardyard.parallel.pipeline import PipelineModel

logger = logging.getLogger("shardyard.checkpoint")

_PLAIN_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SCALE = "_scale_inv"
"""Ends the name of the scales of a tensor in block-fp8, which is read as plain numbers."""
_PROBED_UP_TO = 2 * 10**9
"""Bytes in fp32 up to which an export is loaded again by plain transformers and answers a fixed prompt."""
_JOB_BYTES = 1 << 26
"""What is sent and written at a time, at most; an eighth of the largest tensor where that is less."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, after it was opened again and compared."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    size: int

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {self.size / 2**20:.1f} MiB in {len(self.files)} file(s), verified"


@dataclass(frozen=True)
class _Source:
    """dtype of each tensor on disk, where the model came from files of this format."""

    dtypes: Mapping[str, torch.dtype]
    main_dtype: torch.dtype | None
    """That of most floating tensors; None without any."""

    @classmethod
    def of(cls, folder: Path | None) -> _Source:
        dtypes = {name: dtype for name, (_, dtype) in (facts_of_folder(folder) if folder else {}).items()}
        in_blocks = {name.removesuffix(_SCALE) for name in dtypes if name.endswith(_SCALE)} & dtypes.keys()
        plain = {name: dtype for name, dtype in dtypes.items() if name.removesuffix(_SCALE) not in in_blocks}
        floating = [dtype for dtype in plain.values() if dtype.is_floating_point]
        main = max(set(floating), key=floating.count) if floating else None
        return cls(plain | dict.fromkeys(in_blocks, main or torch.bfloat16), main)


@dataclass(frozen=True)
class _Prepared:
    """An export as all ranks know it before a number is moved."""

    holdings: Holdings
    units: Sequence[Unit]
    aliases: Mapping[str, tuple[str, ...]]
    files: FilePlan

    @property
    def elements(self) -> int:
        return sum(torch.Size(place.shape).numel() for place in self.files.places.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor of the model."""
        facts = self.holdings.facts.values()
        return max((torch.Size(shape).numel() * dtype.itemsize for shape, dtype in facts), default=0)


def check_exportable(
    model: Any, *, source_dir: Path | None, tokenizer: Any, save_dtype: torch.dtype | None = None
) -> None:
    """What would stop the export at the end, found before the first step. Every rank calls it.

    Raises:
        UserError: a tensor that the source's format or a safetensors file cannot hold, names that cannot be
            turned back, or side files that cannot be written.
    """
    peers, source = Peers(), _Source.of(source_dir)
    what = "the export after training would fail"
    prepared = _prepare(model, peers, source, save_dtype, float("inf"), what)

    def rehearse() -> None:
        for name, place in prepared.files.places.items():
            if place.dtype.is_floating_point and place.dtype not in _PLAIN_FLOATS:
                raise UserError(
                    f"model.model_name_or_path: {name} is quantised ({place.dtype}) in {source_dir}, and "
                    "trained weights cannot take that form; set training.export_dtype: bf16, or start from "
                    "the model's bf16 weights"
                )
        _report_differences(source, set(prepared.files.places))
        with tempfile.TemporaryDirectory() as folder:
            write_side_files(model, Path(folder), source_dir, tokenizer, torch.float32)
            if is_native(model):
                check_reads_back(prepared.holdings.facts, Path(folder))

    peers.first(what, rehearse)


def export_hf(
    model: Any,
    *,
    out_dir: Path,
    source_dir: Path | None,
    tokenizer: Any,
    save_dtype: torch.dtype | None = None,
    shard_bytes: float = 5e9,
    chat_template: str | None = None,
    job_bytes: float = _JOB_BYTES,
    probe_bytes: float = _PROBED_UP_TO,
) -> ExportReport:
    """Write the model into ``out_dir``; every rank calls it, and several write.

    Parameters have ``save_dtype`` if given, else each the dtype it has in the source; one that the source
    lacks has the dtype that most of the source has, and without a source that of the config. Persistent
    buffers have the source's dtype, else their own: statistics are no trained weights.

    What is written is read again; a model of at most ``probe_bytes`` in fp32 is also loaded by plain
    transformers, and answers a fixed prompt as the live model does. Only then files take their final names,
    as `placing` says: a folder that does not exist yet comes into being whole. Beside its shards a rank needs
    memory for some jobs of ``job_bytes`` each, or of an eighth of the largest tensor if that is less; what
    transformers turns back in one piece only (`turning_back`) is one job.

    ``chat_template`` (jinja) is written for a tokenizer that has none. The tokenizer's eos id joins the stop
    ids of generation_config.json, as the end of the turns that were trained.

    Raises:
        UserError: the folder cannot be written, a number does not fit its dtype, or what was written differs
            from the model.
    """
    peers, source = Peers(), _Source.of(source_dir)
    what = f"exporting to {out_dir}"
    prepared = _prepare(model, peers, source, save_dtype, shard_bytes, what)
    probed = prepared.elements * 4 <= probe_bytes and is_native(model)
    live = answer_of(model) if probed else None
    folder: Path | None = None
    try:
        folder = peers.first(what, lambda: temporary_folder(out_dir))
        _stream(model, prepared, peers, folder, min(job_bytes, prepared.largest / 8), what)

        def finish(ready: Path) -> ExportReport:
            _complete(ready, prepared.files)
            dtype = save_dtype or _main_dtype(source, model)
            write_side_files(model, ready, source_dir, tokenizer, dtype, chat_template)
            if probed:
                probe(ready, live)
            put_in_place(ready, out_dir)
            return _report(out_dir, prepared.files)

        return peers.first(what, lambda ready=folder: finish(ready))
    finally:
        if peers.is_first and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def export_dtype(model: Any, source_dir: Path | None, save_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of an export's parameters: ``save_dtype``, else what most of the source has, else the
    config's.
    """
    return save_dtype or _main_dtype(_Source.of(source_dir), model)


def _main_dtype(source: _Source, model: Any) -> torch.dtype:
    if source.main_dtype is not None:
        return source.main_dtype
    named = getattr(model.config, "dtype", None)
    return getattr(torch, str(named).removeprefix("torch."), torch.float32) if named else torch.float32


def _prepare(
    model: Any,
    peers: Peers,
    source: _Source,
    save_dtype: torch.dtype | None,
    shard_bytes: float,
    what: str,
) -> _Prepared:
    """Every rank calls it, and gets the same."""
    holdings = Holdings.of(persistent_tensors(model), peers, names_of_whole(model))
    units: list[Unit] = []
    peers.agree(what, lambda: units.extend(units_of(any_stage(model), holdings.facts)))
    aliases, buffers = _tied_names(model, source), _buffers(model, peers)
    main_dtype = _main_dtype(source, model)
    on_disk: dict[str, Facts] = {}
    for unit in units:
        is_buffer = buffers.issuperset(unit.inputs)
        for first_name, (shape, dtype) in unit.facts.items():
            for name in aliases.get(first_name, (first_name,)):
                found = dtype
                if dtype.is_floating_point and is_buffer:
                    found = source.dtypes.get(name, dtype)
                elif dtype.is_floating_point:
                    found = save_dtype or source.dtypes.get(name, main_dtype)
                on_disk[name] = shape, found
    return _Prepared(holdings, units, aliases, plan_files(on_disk, shard_bytes))


def _stream(model: Any, prepared: _Prepared, peers: Peers, folder: Path, job_bytes: float, what: str) -> None:
    """Write all files into ``folder``, by ranks that see it: of machines without a shared disk, rank 0's."""
    seen = peers.agree(what, folder.is_dir)
    tensors, facts = persistent_tensors(model), prepared.holdings.facts
    shapes = {name: shape for name, (shape, _) in facts.items()}
    task = Task(
        units=prepared.units,
        shapes=shapes,
        dtypes={name: dtype for name, (_, dtype) in facts.items()},
        pieces=pieces_of(tensors, prepared.holdings, peers),
        plan=prepared.files,
        aliases=prepared.aliases,
        owners=_owners(len(prepared.files.files), [rank for rank, sees in enumerate(seen) if sees]),
        job_bytes=job_bytes,
    )
    Stream(task, tensors, any_stage(model), peers, folder).run(what)


def _owners(files: int, ranks: Sequence[int]) -> list[int]:
    """The rank that writes each file: spread over all of them, and so over the machines."""
    if files > len(ranks):
        return [ranks[number % len(ranks)] for number in range(files)]
    return [ranks[number * len(ranks) // files] for number in range(files)]


def _complete(folder: Path, files: FilePlan) -> None:
    """Rank 0 sees all files at their size; an index, if there are several."""
    for file in files.files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            raise UserError(f"{path} has {size} bytes of {file.size}: rank 0 does not see what others wrote")
    if (index := files.index()) is not None:
        (folder / INDEX).write_text(index, encoding="utf-8")


def _report(out_dir: Path, files: FilePlan) -> ExportReport:
    names = tuple(file.name for file in files.files)
    return ExportReport(out_dir, names, len(files.places), files.total_size)


def _buffers(model: Any, peers: Peers) -> set[str]:
    """Of all ranks, by their names in the model."""
    names = {name for name, _ in model.named_buffers()}
    return names.union(*peers.gather(names)) if isinstance(model, PipelineModel) else names


def _report_differences(source: _Source, ours: set[str]) -> None:
    """A source may hold what transformers does not read, such as heads of multi-token prediction."""
    for names, what in (
        (source.dtypes.keys() - ours, "of the source are not part of the model and will not be exported"),
        (
            ours - source.dtypes.keys() if source.dtypes else set(),
            "will be exported that the source does not have",
        ),
    ):
        if names:
            logger.warning("%d tensors %s, such as %s", len(names), what, min(names))


def _tied_names(model: Any, source: _Source) -> dict[str, tuple[str, ...]]:
    """On-disk name of each tied weight -> the names that the source has it under; one at least."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    groups = list(aliases.values())
    if isinstance(model, PipelineModel):  # the other name is another stage's
        groups = [[origin, target] for target, origin in model.whole.tied.items()]
    found: dict[str, tuple[str, ...]] = {}
    for names in groups:
        if len(names) > 1:
            meta = torch.empty(0, device="meta")
            on_disk = [next(iter(revert_weight_conversion(any_stage(model), {n: meta}))) for n in names]
            found[on_disk[0]] = tuple(n for n in on_disk if n in source.dtypes) or (on_disk[0],)
    return found
