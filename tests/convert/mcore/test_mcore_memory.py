"""Writing holds the source of one tensor and a piece of it, whatever the size of a rank's file."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from support.mcore import DictWeights, shapes, tiny_config
from support.ranks import RankPool

from shardyard.convert.mcore import McoreLayout, write_mcore

Bytes = int  # a number of them
M_MMAP_THRESHOLD = -3  # of malloc.h


class MadeOnRead(DictWeights):
    """Tensors come to be when they are read, as those of a file do."""

    def read(self, name: str) -> torch.Tensor:
        shape, dtype = self.facts[name]
        return torch.ones(shape, dtype=dtype)


def resident(field: str) -> Bytes:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def source_of(folder: Path, family: str) -> MadeOnRead:
    """A model of 16 layers; meta tensors stand for its files."""
    folder.mkdir(exist_ok=True)
    config = tiny_config(
        family, num_hidden_layers=16, hidden_size=512, intermediate_size=1024, moe_intermediate_size=128,
        vocab_size=512, head_dim=64, num_attention_heads=8,
    )  # fmt: skip
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes(config).items()}
    return MadeOnRead(folder, config, tensors)


def written(folder: Path, family: str, layout: McoreLayout) -> tuple[Bytes, Bytes]:
    """What resident memory grew by at most while writing, and the bytes of all files."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # as large ones are: given back when freed
    source = source_of(folder / "hf", family)
    small = tiny_config("qwen3")
    warm = {name: torch.zeros(shape) for name, shape in shapes(small).items()}
    write_mcore(DictWeights(source.folder, small, warm), folder / "warm", McoreLayout())  # needed once
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    write_mcore(source, folder / "mcore", layout)
    grown = resident("VmHWM") - before
    return grown, sum(path.stat().st_size for path in (folder / "mcore").rglob("*.pt"))


def test_writing_a_dense_model_holds_a_tensor_not_a_file(ranks: RankPool, tmp_path: Path) -> None:
    """The largest mcore tensor, fc1, is 2 x 1024 x 512 fp32 = 4 MiB; the files have 146 MiB."""
    largest = 2 * 1024 * 512 * 4
    layout = McoreLayout(tp=2, pp=2)
    grown, total = ranks.run(1, written, tmp_path, "llama", layout, init_process_group=False)[0]
    assert total > 35 * largest
    assert grown < 3 * largest + (1 << 22), (grown, largest, total)


def test_writing_joined_experts_holds_those_of_a_layer(ranks: RankPool, tmp_path: Path) -> None:
    """weight1 of 8 experts is 8 x 512 x 2 x 128 fp32 = 4 MiB."""
    largest = 8 * 512 * 2 * 128 * 4
    layout = McoreLayout(grouped=True)
    grown, total = ranks.run(1, written, tmp_path, "qwen3_moe", layout, init_process_group=False)[0]
    assert total > 25 * largest
    assert grown < 3 * largest + (1 << 22), (grown, largest, total)
