"""The trained model in Hugging Face format: keys, shapes, dtypes and ties of its source, verified.

Tensors are gathered one group at a time (a layer at most), turned back into their on-disk names by
transformers' own conversion, and written by rank 0. `save_pretrained` is not used: it would gather everything
and choose dtypes itself. `check_exportable` walks the same way on meta tensors, so that what cannot be
exported is found at step 0.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.hf_files import Facts
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.read_back import check_reads_back, probe
from shardyard.checkpoint.side_files import is_native, write_side_files
from shardyard.checkpoint.state import any_stage, names_of_whole, persistent_tensors
from shardyard.durable import sync
from shardyard.errors import UserError
from shardyard.parallel.pipeline import PipelineModel

logger = logging.getLogger("shardyard.checkpoint")

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_TEMPORARY = ".export-tmp"
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_PLAIN_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_PROBED_UP_TO = 2 * 10**9
"""Bytes in fp32 up to which an export is loaded again by plain transformers and answers a fixed prompt."""


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
    """dtype of each tensor on disk, where the model came from files."""

    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, folder: Path | None) -> _Source:
        dtypes: dict[str, torch.dtype] = {}
        for path in sorted(folder.glob("*.safetensors")) if folder else ():
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open has no __iter__)
                    named = file.get_slice(key).get_dtype()
                    if named not in _DTYPES:
                        raise UserError(f"{path}: {key} is {named}, a dtype that is not exported")
                    dtypes[key] = _DTYPES[named]
        return cls(dtypes)

    def dtype_of(self, name: str, fallback: torch.dtype) -> torch.dtype:
        return self.dtypes.get(name, fallback)


def check_exportable(model: Any, *, source_dir: Path | None, tokenizer: Any) -> None:
    """What would stop the export at the end, found before the first step. Every rank calls it.

    Raises:
        UserError: a tensor that the source's format or a safetensors file cannot hold, names that cannot be
            turned back, or side files that cannot be written.
    """
    peers = Peers()
    what = "the export after training would fail"
    holdings = Holdings.of(persistent_tensors(model), peers, names_of_whole(model))
    shares = peers.agree(what, lambda: _turned_back(model, holdings, peers.rank))
    on_disk = {name: dtype for share in shares for name, dtype in share.items()}
    peers.first(what, lambda: _rehearse(model, holdings, on_disk, source_dir, tokenizer))


def _turned_back(model: Any, holdings: Holdings, rank: int) -> dict[str, torch.dtype]:
    """Names and dtypes on disk of the tensors that ``rank`` answers for."""
    own = {name: facts for name, facts in holdings.facts.items() if holdings.owner[name] == rank}
    for name, (_, dtype) in own.items():
        if dtype not in _DTYPES.values():
            raise UserError(f"{name} is {dtype}, which a safetensors file cannot hold")
    one = any_stage(model)
    on_disk: dict[str, torch.Tensor] = {}
    for group in _groups(own):
        on_disk |= revert_weight_conversion(one, _on_meta({name: own[name] for name in group}))
    whole = revert_weight_conversion(one, _on_meta(own))
    if {name: t.shape for name, t in on_disk.items()} != {name: t.shape for name, t in whole.items()}:
        raise UserError(f"the layers of a {one.config.model_type} model cannot be turned back one by one")
    return {name: tensor.dtype for name, tensor in on_disk.items()}


def _rehearse(
    model: Any,
    holdings: Holdings,
    on_disk: dict[str, torch.dtype],
    source_dir: Path | None,
    tokenizer: Any,
) -> None:
    source = _Source.of(source_dir)
    for name, ours in on_disk.items():
        dtype = source.dtype_of(name, torch.float32)
        if ours.is_floating_point and dtype not in _PLAIN_FLOATS:
            raise UserError(
                f"model.model_name_or_path: {name} is quantised ({dtype}) in {source_dir}, and trained "
                "weights cannot take that form; start from the model's bf16 weights"
            )
    _report_differences(
        source, {*on_disk, *(n for names in _tied_names(model, source).values() for n in names)}
    )
    with tempfile.TemporaryDirectory() as folder:
        write_side_files(model, Path(folder), source_dir, tokenizer, torch.float32)
        if is_native(model):
            check_reads_back(holdings.facts, Path(folder))


def _on_meta(facts: dict[str, Facts]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in facts.items()}


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


def export_hf(
    model: Any,
    *,
    out_dir: Path,
    source_dir: Path | None,
    tokenizer: Any,
    save_dtype: torch.dtype | None = None,
    shard_bytes: float = 5e9,
    chat_template: str | None = None,
) -> ExportReport:
    """Write the model into ``out_dir``; every rank calls it, rank 0 writes.

    Floating tensors have ``save_dtype`` if given, else each the dtype it has in the source; one that the
    source lacks has the dtype that most of the source has, and without a source that of the config (buffers
    stay as they are). Files take their final names only when all are written, opened again and compared, and,
    for a model that is not too large, loaded by plain transformers to answer a fixed prompt.

    ``chat_template`` (jinja) is written for a tokenizer that has none. The tokenizer's eos id joins the stop
    ids of generation_config.json, as the end of the turns that were trained.

    Raises:
        UserError: the folder cannot be written, or what was written differs from the model.
    """
    peers = Peers()
    source = _Source.of(source_dir)
    main_dtype = save_dtype or _main_dtype(source, model)
    temporary = out_dir / _TEMPORARY
    what = f"exporting to {out_dir}"
    try:
        peers.first(what, lambda: _fresh(temporary))
        writer = _ShardWriter(temporary, shard_bytes)
        tied = _tied_names(model, source)
        tensors = persistent_tensors(model)
        holdings = Holdings.of(tensors, peers, names_of_whole(model))
        buffers = _buffers(model, peers) if not source.dtypes else set()

        def write(on_disk: dict[str, torch.Tensor]) -> None:
            for first_name, tensor in on_disk.items():
                for name in tied.get(first_name, (first_name,)):
                    fallback = tensor.dtype if name in buffers else main_dtype
                    dtype = save_dtype or source.dtype_of(name, fallback)
                    writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)

        for group in _groups(holdings.facts):
            on_disk = _gather(model, {n: tensors[n] for n in group if n in tensors}, group, holdings, peers)
            peers.first(what, lambda on_disk=on_disk: write(on_disk))

        def finish() -> ExportReport:
            ready = writer.assemble()
            write_side_files(model, ready, source_dir, tokenizer, main_dtype, chat_template)
            if writer.elements * 4 <= _PROBED_UP_TO and is_native(model):
                probe(ready)
            _move_in_place(ready, out_dir, writer.names)
            return ExportReport(out_dir, tuple(writer.names), len(writer.expected), writer.size)

        # A shard at a time: peers wait in a collective, which gives up after half an hour.
        peers.first(what, writer.flush)
        return peers.first(what, finish)
    finally:
        if peers.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def export_dtype(model: Any, source_dir: Path | None) -> torch.dtype:
    """The dtype of an export's floating tensors: what most of the source has; without one, the config's."""
    return _main_dtype(_Source.of(source_dir), model)


def _main_dtype(source: _Source, model: Any) -> torch.dtype:
    floating = [dtype for dtype in source.dtypes.values() if dtype.is_floating_point]
    if floating:
        return max(set(floating), key=floating.count)
    named = getattr(model.config, "dtype", None)
    return getattr(torch, str(named).removeprefix("torch."), torch.float32) if named else torch.float32


def _fresh(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Tensors that one conversion may need together: a layer's, then the rest one by one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, []).append(name)
    return list(layers.values())


def _buffers(model: Any, peers: Peers) -> set[str]:
    """Of all ranks, by their names in the model."""
    names = {name for name, _ in model.named_buffers()}
    return names.union(*peers.gather(names)) if isinstance(model, PipelineModel) else names


def _gather(
    model: Any, held: dict[str, torch.Tensor], group: list[str], holdings: Holdings, peers: Peers
) -> dict[str, torch.Tensor]:
    """The tensors of ``group`` whole, on the host of rank 0, under their names on disk; elsewhere nothing.

    The ranks that hold them gather them; the first of those turns them back and sends them, if it is not
    rank 0. ``held`` are the group's tensors on this rank.
    """
    owner = holdings.owner[group[0]]
    whole: dict[str, torch.Tensor] = {}
    if holdings.takes_part(peers.rank, group[0]):
        for name in group:
            full: Any = held[name].detach()
            if isinstance(full, DTensor):  # offloaded ones come back for the gather
                full = full.to(full.device_mesh.device_type)
                full = full.full_tensor()
            if peers.rank == owner:
                whole[name] = full.cpu().contiguous()
    if peers.rank == owner:
        whole = revert_weight_conversion(any_stage(model), whole)
    return whole if owner == 0 else peers.hand_to_first(whole, owner)


class _ShardWriter:
    """Collects tensors, writes a file whenever ``shard_bytes`` would be passed, and reads it again."""

    def __init__(self, folder: Path, shard_bytes: float) -> None:
        self.folder, self.limit = folder, shard_bytes
        self.expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.files: list[dict[str, int]] = []
        self._pending: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> list[str]:
        count = len(self.files)
        if count == 1:
            return [WEIGHTS]
        return [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]

    @property
    def size(self) -> int:
        return sum(sum(file.values()) for file in self.files)

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape, _ in self.expected.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        pending = sum(t.nbytes for t in self._pending.values())
        if self._pending and pending + tensor.nbytes > self.limit:
            self.flush()
        # A slice of a fused tensor shares its storage, which a safetensors file may not.
        self._pending[name] = tensor.contiguous().clone()
        self.expected[name] = (tuple(tensor.shape), tensor.dtype)

    def flush(self) -> None:
        if not self._pending:
            return
        path = self._path(len(self.files))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # it wraps the operating system's errors in its own
            raise OSError(str(error)) from error
        path.chmod(0o666 & ~_umask())  # safetensors makes its files for their owner alone
        sync(path)
        self.files.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self._pending = {}
        _compare(path, {name: self.expected[name] for name in self.files[-1]})

    def assemble(self) -> Path:
        """The folder in which the files have their final names, with an index if there are several."""
        ready = self.folder / "ready"
        ready.mkdir()
        for number, name in enumerate(self.names):
            self._path(number).replace(ready / name)
        if len(self.files) > 1:
            weight_map = {name: self.names[n] for n, file in enumerate(self.files) for name in file}
            index = {"metadata": {"total_size": self.size}, "weight_map": dict(sorted(weight_map.items()))}
            (ready / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return ready

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"


def _move_in_place(ready: Path, out_dir: Path, names: list[str]) -> None:
    """Side files, then weights, the index last, in place of a former export of this run."""
    for stale in [*out_dir.glob("model-*-of-*.safetensors"), out_dir / WEIGHTS, out_dir / INDEX]:
        stale.unlink(missing_ok=True)
    weights = [*names, INDEX]
    side_files = sorted(path for path in ready.rglob("*") if path.is_file() and path.name not in weights)
    for path in [*side_files, *(ready / name for name in weights if (ready / name).exists())]:
        target = out_dir / path.relative_to(ready)
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(path)
        path.replace(target)
    sync(out_dir)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _compare(path: Path, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Open a written file again: names, shapes, dtypes as expected, and no NaN or Inf."""
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != expected.keys():
            raise UserError(f"{path} does not hold the tensors that were written to it")
        for name, wanted in expected.items():
            tensor = file.get_tensor(name)
            found = (tuple(tensor.shape), tensor.dtype)
            if found != wanted:
                raise UserError(f"{path}: {name} came back as {found[0]} {found[1]}, not {wanted}")
            if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                raise UserError(
                    f"the trained weight {name} holds NaN or Inf in {tensor.dtype}; it is not exported"
                )
