"""The trained model in Hugging Face format: keys, shapes, dtypes and ties of its source, verified before it
counts.

Tensors are gathered one group at a time (a layer at most), turned back into their on-disk names by
transformers' own
conversion, and written by rank 0. `save_pretrained` is not used: it would gather everything and choose
dtypes itself.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from shardyard.checkpoint.agreement import Peers
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

INDEX = "model.safetensors.index.json"
_TEMPORARY = ".export-tmp"
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_SAVABLE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


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
                    dtypes[key] = _DTYPES[file.get_slice(key).get_dtype()]
        return cls(dtypes)

    def dtype_of(self, name: str, fallback: torch.dtype) -> torch.dtype:
        return self.dtypes.get(name, fallback)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def check_exportable(model: Any, *, source_dir: Path | None, tokenizer: Any) -> None:
    """What would stop the export at the end, found before the first step.

    Raises:
        UserError: a tensor that safetensors cannot hold, or side files that cannot be written.
    """
    for name, tensor in _persistent(model).items():
        if tensor.dtype not in _SAVABLE:
            raise UserError(
                f"{name} is {tensor.dtype}, which a safetensors file cannot hold; the export would fail"
            )
    json.dumps(_config_of(model, torch.float32))
    if source_dir is not None:
        _Source.of(source_dir)


def export_hf(
    model: Any,
    *,
    out_dir: Path,
    source_dir: Path | None,
    tokenizer: Any,
    save_dtype: torch.dtype | None = None,
    shard_bytes: float = 5e9,
) -> ExportReport:
    """Write the model into ``out_dir``; every rank calls it, rank 0 writes.

    Each tensor has the dtype of its source file; one without a source has ``save_dtype``, or the dtype that
    most of
    the source has, or that of the config. Files take their final names only when all are written and
    compared.

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
        for group in _groups(model):
            tensors = _gather(group, keep=peers.is_first)
            if peers.is_first:
                for name, tensor in revert_weight_conversion(model, tensors).items():
                    dtype = save_dtype or source.dtype_of(name, main_dtype)
                    writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            peers.agree(what, writer.raise_failure)
        return peers.first(what, lambda: _finish(model, writer, out_dir, source_dir, tokenizer, main_dtype))
    finally:
        if peers.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _main_dtype(source: _Source, model: Any) -> torch.dtype:
    floating = [dtype for dtype in source.dtypes.values() if dtype.is_floating_point]
    if floating:
        return max(set(floating), key=floating.count)
    named = getattr(model.config, "dtype", None)
    return getattr(torch, str(named).removeprefix("torch."), torch.float32) if named else torch.float32


def _fresh(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _persistent(model: Any) -> dict[str, torch.Tensor]:
    """What the source's files hold: parameters, tied ones under their first name, and persistent buffers."""
    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            tensors[name] = buffer
    return tensors


def _groups(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors that one conversion may need together: a layer's, then the rest one by one."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _persistent(model).items():
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, {})[name] = tensor
    yield from layers.values()


def _gather(group: dict[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in group.items():
        full = tensor.detach()
        if isinstance(full, DTensor):
            device = full.device_mesh.device_type
            full = full.to(device).full_tensor()
        if keep:
            whole[name] = full.cpu().contiguous()
    return whole


class _ShardWriter:
    """Collects tensors and writes a file whenever ``shard_bytes`` would be passed. A failure waits to be
    raised.
    """

    def __init__(self, folder: Path, shard_bytes: float) -> None:
        self.folder, self.limit = folder, shard_bytes
        self.expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.files: list[dict[str, int]] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._failure: OSError | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._failure:
            return
        pending = sum(t.nbytes for t in self._pending.values())
        if self._pending and pending + tensor.nbytes > self.limit:
            self._flush()
        # A slice of a fused tensor shares its storage, which a safetensors file may not.
        self._pending[name] = tensor.contiguous().clone()
        self.expected[name] = (tuple(tensor.shape), tensor.dtype)

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def close(self) -> None:
        self._flush()
        self.raise_failure()

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def _flush(self) -> None:
        if not self._pending:
            return
        try:
            save_file(self._pending, self.path(len(self.files)), metadata={"format": "pt"})
        except Exception as error:  # safetensors wraps the operating system's errors in its own
            self._failure = error if isinstance(error, OSError) else OSError(str(error))
        self.files.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self._pending = {}


def _finish(
    model: Any,
    writer: _ShardWriter,
    out_dir: Path,
    source_dir: Path | None,
    tokenizer: Any,
    dtype: torch.dtype,
) -> ExportReport:
    writer.close()
    count = len(writer.files)
    names = (
        [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        if count > 1
        else ["model.safetensors"]
    )
    for number in range(count):
        _compare(writer.path(number), {name: writer.expected[name] for name in writer.files[number]})
    size = sum(sum(file.values()) for file in writer.files)
    side = writer.folder / "side"
    side.mkdir()
    _write_side_files(model, side, source_dir, tokenizer, dtype)
    if count > 1:
        weight_map = {name: names[n] for n, file in enumerate(writer.files) for name in file}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (side / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for stale in [*out_dir.glob("model*.safetensors"), out_dir / INDEX]:
        stale.unlink(missing_ok=True)  # a former export of this run, with another number of files
    for path in sorted(side.iterdir()):
        path.replace(out_dir / path.name)
    for number, name in enumerate(names):
        writer.path(number).replace(out_dir / name)
    return ExportReport(out_dir, tuple(names), len(writer.expected), size)


def _compare(path: Path, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Open a written file again: names, shapes, dtypes as expected, and no NaN or Inf."""
    with safe_open(path, framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if found.keys() != expected.keys():
        raise UserError(f"{path} does not hold the tensors that were written to it")
    for name, tensor in found.items():
        if (tuple(tensor.shape), tensor.dtype) != expected[name]:
            raise UserError(
                f"{path}: {name} came back as {tuple(tensor.shape)} {tensor.dtype}, not {expected[name]}"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise UserError(
                f"the trained weight {name} holds NaN or Inf in {tensor.dtype}; it is not exported"
            )


def _write_side_files(
    model: Any, folder: Path, source_dir: Path | None, tokenizer: Any, dtype: torch.dtype
) -> None:
    config = json.dumps(_config_of(model, dtype, source_dir), indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    generation = source_dir / "generation_config.json" if source_dir else None
    if generation and generation.is_file():
        # As it is: transformers would refuse to save one whose options contradict each other.
        shutil.copyfile(generation, folder / generation.name)
    elif getattr(model, "generation_config", None) is not None:
        text = json.dumps(model.generation_config.to_diff_dict(), indent=2, default=str)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")


def _config_of(model: Any, dtype: torch.dtype, source_dir: Path | None = None) -> dict[str, Any]:
    """config.json without our traces; its dtype is that of the written tensors.

    The source's own text where the model still is what it says: other loaders read keys that transformers
    drops.
    """
    config = _without_traces(model.config.to_diff_dict())
    path = source_dir / "config.json" if source_dir else None
    if path is not None and path.is_file():
        source = json.loads(path.read_text(encoding="utf-8"))
        if _without_traces(type(model.config).from_dict(dict(source)).to_diff_dict()) == config:
            config = source
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [_architecture(model)]
    return config


def _without_traces(config: dict[str, Any]) -> dict[str, Any]:
    ours = {
        "distributed_config",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "architectures",
        "transformers_version",
    }
    return {key: value for key, value in config.items() if key not in ours}


def _architecture(model: Any) -> str:
    """FSDP puts a class of its own in front, with its own prefix to the name."""
    return next(cls.__name__ for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
