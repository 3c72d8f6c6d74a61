"""Beside its own shards an export needs less than the largest tensor, on every rank: never two of them, nor
the tensors of a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model
from support.training import Recipe

EMBEDDING = 12_000 * 32 * 4
"""The largest tensor of the dense model, beside which its layers are small."""
EXPERTS = 32 * (2 * 128) * 32 * 4
"""Gate and up of all experts of a layer, as the model holds them, [E, 2I, H] fp32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = ["full_attention"] * 2
    return {
        "dense": write_tiny_model(
            root / "dense", "parity_dense", vocab_size=12_000, num_hidden_layers=2, layer_types=kinds
        ),
        "experts": write_tiny_model(
            root / "experts", "parity_moe", num_experts=32, moe_intermediate_size=128, num_hidden_layers=2,
            layer_types=kinds, mlp_only_layers=[],
        ),
    }  # fmt: skip


def host_peak() -> Any:
    """`LivePeak` without tensors on meta, which have a size and no memory."""
    import torch
    from support.live_memory import LivePeak

    class HostPeak(LivePeak):
        def now(self) -> int:
            self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
            storages = (torch.UntypedStorage._new_with_weak_ptr(key) for key in self._alive)
            return sum(s.nbytes() for s in storages if s is not None and s.device.type != "meta")

    return HostPeak()


def live_peak(folder: Path, out: Path, parallel: dict[str, Any], dtype: str | None) -> int:
    """The most bytes of tensors alive in the export that were not before."""
    import torch
    from support.training import build_step

    from shardyard.checkpoint import export_hf

    built, _, _ = build_step(folder, Recipe(parallel=parallel))
    save_dtype = getattr(torch, dtype) if dtype else None
    options: dict[str, Any] = {"shard_bytes": EXPERTS // 2, "probe_bytes": 0, "save_dtype": save_dtype}
    with host_peak() as memory:
        export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None, **options)
    return memory.peak


@pytest.mark.parametrize(
    ("model", "world", "parallel", "dtype"),
    [
        ("dense", 2, {}, None),
        ("experts", 2, {}, "bfloat16"),
        pytest.param("dense", 1, {}, None, marks=pytest.mark.soak),
        pytest.param("dense", 2, {}, "bfloat16", marks=pytest.mark.soak),
        pytest.param("dense", 2, {"cpu_offload": True}, None, marks=pytest.mark.soak),
        pytest.param("dense", 2, {"tp_size": 2}, None, marks=pytest.mark.soak),
        pytest.param("dense", 2, {"pp_size": 2}, None, marks=pytest.mark.soak),
        pytest.param("dense", 4, {"fsdp_size": 2}, None, marks=pytest.mark.soak),
        pytest.param(
            "experts", 4, {"efsdp_shard_placement_fn": "shard_by_dim_1"}, None, marks=pytest.mark.soak
        ),
        pytest.param("experts", 2, {"ep_size": 2}, None, marks=pytest.mark.soak),
        pytest.param("experts", 4, {"ep_size": 2}, None, marks=pytest.mark.soak),
        pytest.param("experts", 2, {"tp_size": 2}, "float16", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_no_rank_holds_a_tensor_more_than_its_shards(ranks, models, tmp_path, model, world, parallel, dtype):
    """Receiving, turning back, casting, looking for NaN and sending, all at the same time."""
    largest = EMBEDDING if model == "dense" else EXPERTS
    peaks = ranks.run(world, live_peak, models[model], tmp_path / "out", parallel, dtype)
    assert 0 < max(peaks) < largest


def resident_growth(folder: Path, out: Path) -> int:
    """How far the resident memory of this process rises in an export, in bytes, by the kernel's own count."""
    import ctypes

    from support.training import build_step

    from shardyard.checkpoint import export_hf

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    built, _, _ = build_step(folder, Recipe())
    ctypes.CDLL(None).malloc_trim(0)  # what the loading has freed is not there to be used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS:")
    export_hf(built.model, out_dir=out / "out", source_dir=folder, tokenizer=None, probe_bytes=0)
    return status("VmHWM:") - before


@pytest.mark.soak
def test_resident_memory_rises_by_less_than_two_tensors(ranks, tmp_path):
    """What no count of tensors sees is in it: buffers of gloo, of the files, of Python."""
    rows = 500_000
    kinds = ["full_attention"] * 2
    folder = write_tiny_model(
        tmp_path / "model", "parity_dense", vocab_size=rows, num_hidden_layers=2, layer_types=kinds
    )
    largest = rows * 32 * 4
    growth = ranks.run(2, resident_growth, folder, tmp_path)
    assert largest / 16 < max(growth) < 2 * largest  # a job of an eighth is seen, so the count works
