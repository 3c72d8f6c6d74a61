"""The planned file set is what the safetensors library reads, to the byte; a writer forgets no byte of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardyard.checkpoint.hf_files import DTYPES, FileWriter, facts_of_folder, plan_files
from shardyard.errors import UserError

SHAPES = [(), (0, 3), (1,), (5,), (3, 7), (2, 3, 5)]


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bytes that are a tensor of ``dtype``; booleans have but two."""
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).reshape(shape)


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    return {
        f"{code}.{number}": made(dtype, shape, seed=number)
        for code, dtype in reversed(DTYPES.items())
        for number, shape in enumerate(SHAPES)
    }


def facts(tensors: dict[str, torch.Tensor]) -> dict:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def write_all(tensors: dict[str, torch.Tensor], folder: Path, shard_bytes: float) -> list[str]:
    plan = plan_files(facts(tensors), shard_bytes)
    for file in plan.files:
        with FileWriter(file, folder / file.name) as writer:
            for name in list(file.places)[::-1]:
                writer.write(name, tensors[name])
            writer.finish()
    return [file.name for file in plan.files]


def test_the_library_reads_every_dtype_and_shape_as_it_was(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    assert write_all(tensors, tmp_path, 1e9) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert facts_of_folder(tmp_path) == facts(tensors)


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (1, [["a"], ["b"], ["c"], ["d"]]),
        (48, [["a", "b"], ["c"], ["d"]]),
        (1e9, [["a", "b", "c", "d"]]),
    ],
)
def test_files_are_filled_in_order_and_no_further_than_the_limit(
    limit: float, files: list[list[str]]
) -> None:
    """32, 16, 32 and 40 bytes; a tensor above the limit has a file of its own."""
    kinds = {
        "a": ((8,), torch.float32),
        "b": ((8,), torch.bfloat16),
        "c": ((4,), torch.int64),
        "d": ((40,), torch.uint8),
    }
    plan = plan_files(kinds, limit)
    assert [sorted(file.places) for file in plan.files] == files
    assert plan.total_size == 120
    if len(files) > 1:
        index = json.loads(plan.index() or "")
        names = [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
        assert index == {
            "metadata": {"total_size": 120},
            "weight_map": {key: name for name, keys in zip(names, files, strict=True) for key in keys},
        }
    else:
        assert plan.index() is None


def test_every_tensor_starts_at_a_multiple_of_its_item_size() -> None:
    plan = plan_files(facts(tensors_of_all_kinds()), 1e9)
    for name, place in plan.places.items():
        assert place.offset % place.dtype.itemsize == 0, name


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_tensor_may_come_in_parts_and_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    tensor = made(torch.bfloat16, (9, 5), seed=1)
    (file,) = plan_files({"w": ((9, 5), torch.bfloat16)}, 1e9).files
    with FileWriter(file, tmp_path / "f") as writer:
        for part in order:
            writer.write("w", tensor[3 * part : 3 * part + 3], start=3 * part * 5 * 2)
        writer.finish()
    assert same_bytes(load_file(tmp_path / "f")["w"], tensor)


@pytest.mark.parametrize("starts", [[0], [4], [0, 0], [0, 2], []])
def test_a_gap_or_an_overlap_is_a_fault(tmp_path: Path, starts: list[int]) -> None:
    (file,) = plan_files({"w": ((8,), torch.uint8)}, 1e9).files
    with FileWriter(file, tmp_path / "f") as writer:
        for start in starts:
            writer.write("w", torch.zeros(4, dtype=torch.uint8), start=start)
        with pytest.raises(RuntimeError, match="w was not written once and whole"):
            writer.finish()


@pytest.mark.parametrize(("dtype", "start"), [(torch.float16, 0), (torch.float32, 4)])
def test_another_dtype_or_too_many_bytes_are_a_fault(tmp_path: Path, dtype: torch.dtype, start: int) -> None:
    (file,) = plan_files({"w": ((4,), torch.float32)}, 1e9).files
    with FileWriter(file, tmp_path / "f") as writer, pytest.raises(ValueError, match="do not fit"):
        writer.write("w", torch.zeros(4, dtype=dtype), start=start)


def test_a_byte_that_changed_on_the_way_is_found(tmp_path: Path) -> None:
    (file,) = plan_files({"v": ((4,), torch.int32), "w": ((4,), torch.int32)}, 1e9).files
    with FileWriter(file, tmp_path / "f") as writer:
        writer.write("v", torch.arange(4, dtype=torch.int32))
        writer.write("w", torch.arange(4, dtype=torch.int32))
        with (tmp_path / "f").open("r+b") as other:
            other.seek(-1, 2)
            other.write(b"\x01")
        with pytest.raises(UserError, match="w does not come back"):
            writer.finish()


def test_a_changed_header_is_found(tmp_path: Path) -> None:
    (file,) = plan_files({"v": ((4,), torch.int32)}, 1e9).files
    with FileWriter(file, tmp_path / "f") as writer:
        writer.write("v", torch.arange(4, dtype=torch.int32))
        text = (tmp_path / "f").read_bytes().replace(b'"I32"', b'"F32"')
        (tmp_path / "f").write_bytes(text)
        with pytest.raises(UserError, match="v came back as"):
            writer.finish()


def test_a_dtype_that_the_format_lacks_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"phase is torch\.complex128"):
        plan_files({"phase": ((2,), torch.complex128)}, 1e9)
