"""Runs with AdamW's moments in 8 and 4 bits: torchao's numbers, their bytes, resumed, on another layout."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import write_tiny_model
from support.optimizer_states import TIMEOUT_S, add_torchao, leg_of_a_run, unbroken_and_resumed
from support.training import Recipe, build_step

from shardyard.config import load_config
from shardyard.errors import UserError

GAP = {"int8": 0.9 / 64, "int4": 0.9 / 4}
"""The widest distance between two neighbours of torchao's maps, as a share of a block's largest element: of
the upper decade of 64 (4) values between 0.1 and 1; those of the 4-bit second moment are 1/16 apart."""


def training(dtype: str) -> dict[str, object]:
    return {"adam_epsilon": 1e-4, "max_grad_norm": 0.5, "lr": 1e-3, "optimizer_state_dtype": dtype}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parts of 4,096 elements and more, which blocks divide on one and on two ranks, and others."""
    return write_tiny_model(
        tmp_path_factory.mktemp("low_bit") / "m", "qwen3", hidden_size=128, intermediate_size=272
    )


def beside_torchao(dtype):
    """Five updates of both, then (largest difference, bytes of ours, whether a small part stays in fp32)."""
    add_torchao()
    import torch
    from support.live_memory import bytes_kept
    from support.optimizer_states import parts_of
    from torchao.optim import AdamW4bit, AdamW8bit

    from shardyard.optim.low_bit import LowBitAdamW, form_of

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((64, 128), (100, 50), (64,))]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = LowBitAdamW([{"params": ours, "weight_decay": 0.1}], form_of(dtype), **options)
    peer = {"int8": AdamW8bit, "int4": AdamW4bit}[dtype](theirs, weight_decay=0.1, **options)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(5):
            for one, other in zip(ours, theirs, strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
            optimizer.step()
            peer.step()
    states = [[optimizer.state[p][what] for what in ("exp_avg", "exp_avg_sq")] for p in ours]
    kept = [sum(bytes_kept(parts_of(t)) for t in pair) for pair in states]
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True)), kept


@pytest.mark.parametrize("dtype", ["int8", pytest.param("int4", marks=pytest.mark.soak)])
def test_the_numbers_are_those_of_torchao_and_the_bytes_those_that_are_promised(ranks, dtype):
    difference, kept = ranks.run(1, beside_torchao, dtype)[0]
    assert difference == 0
    elements, block, table = 64 * 128, {"int8": 256, "int4": 128}[dtype], {"int8": 256, "int4": 16}[dtype]
    codes = elements if dtype == "int8" else elements // 2
    assert kept == [2 * (codes + 4 * elements // block + 4 * table), 2 * 4 * 5000, 2 * 4 * 64]


def both_legs(folder, dtype, out):
    add_torchao()
    return unbroken_and_resumed(folder, Recipe(training=training(dtype)), out)


def elsewhere(folder, dtype, out):
    """What two ranks have saved, read by one: (largest difference to the saved moments as a share of their
    blocks' scales, two steps from there, and twenty from the start in this and in fp32).
    """
    add_torchao()
    recipe, in_fp32 = Recipe(training=training(dtype)), Recipe(training=training("fp32"))
    share = largest_error_of_moments(folder, recipe, out / "broken")
    resumed = leg_of_a_run(folder, recipe, out / "broken", 3, 4)
    twenty = [leg_of_a_run(folder, each, out / str(n), 1, 20) for n, each in enumerate((recipe, in_fp32))]
    return share, resumed, *twenty


def largest_error_of_moments(folder, recipe, out):
    import torch

    from shardyard.checkpoint import CheckpointStore
    from shardyard.checkpoint.safe_reader import SafeReader, read_metadata
    from shardyard.optim.low_bit import form_of

    built, step, _ = build_step(folder, recipe)
    form = form_of(recipe.training["optimizer_state_dtype"])
    maps = {
        what: form.zeros(torch.zeros(4096), signed=what == "exp_avg").qmap
        for what in ("exp_avg", "exp_avg_sq")
    }
    path = CheckpointStore(out, save_total_limit=None).folder / "global_step_2"
    CheckpointStore(out, save_total_limit=None).load(path, model=built.model, optimizer=step.optimizer)
    entries = read_metadata(path).state_dict_metadata
    raw = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if "@" in key
    }
    torch.distributed.checkpoint.load(raw, storage_reader=SafeReader(path), no_dist=True)
    worst, compared = 0.0, 0
    for name, parameter in built.model.named_parameters():
        for what, moment in step.optimizer.state[parameter].items():
            if moment.ndim != 2:
                continue
            own = moment.to_local()
            ours = own.dequantize() if hasattr(own, "codes") else own
            for key, saved in raw.items():
                if not key.startswith(f"optimizer.{name}.{what}.") or ".scale@" in key:
                    continue
                row, column, height, width = map(int, key.rpartition("@")[2].replace("+", ",").split(","))
                values = saved
                if ".codes@" in key:
                    scale = raw[key.replace(".codes@", ".scale@")]
                    values = by_hand(saved, scale, maps[what]).view(height, width)
                mine = ours[row : row + height, column : column + width]
                largest = ours.abs().max()  # of any block
                worst = max(worst, float((mine - values).abs().max() / largest))
                compared += 1
    assert compared > 20
    return worst


def by_hand(codes, scale, qmap):
    """Look up each code, 4-bit ones with the upper half of a byte first, times its block's scale."""
    import torch

    if len(qmap) == 16:
        codes = torch.stack((codes // 16, codes % 16), dim=-1)
    return (qmap[codes.long()].view(len(scale), -1) * scale[:, None]).view(-1)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("int4", marks=pytest.mark.soak)])
def test_a_run_resumes_to_the_bit_and_on_another_layout_with_an_error_of_one_more_rounding(
    ranks, folder, tmp_path, dtype
):
    unbroken, resumed = ranks.run(2, both_legs, folder, dtype, tmp_path, timeout_s=TIMEOUT_S)[0]
    assert resumed.losses == unbroken.losses[2:]
    assert all(np.array_equal(resumed.weights[name], w) for name, w in unbroken.weights.items())
    share, alone, low, in_fp32 = ranks.run(1, elsewhere, folder, dtype, tmp_path, timeout_s=TIMEOUT_S)[0]
    half = GAP[dtype] / 2
    assert share <= half / (1 - half) + 1e-5, "of the largest element, maybe rounded down itself"
    tolerance = {"int8": 1e-3, "int4": 0.3}[dtype]  # of a loss that falls from 5.4 to 0.2
    assert alone.losses == pytest.approx(unbroken.losses[2:], abs=tolerance)
    assert in_fp32.losses[-1] < in_fp32.losses[0] - 4, "it learns"
    assert low.losses == pytest.approx(in_fp32.losses, abs=tolerance)
    assert low.state_bytes < in_fp32.state_bytes / {"int8": 2, "int4": 2.5}[dtype], "some parts stay in fp32"


def test_without_torchao_the_check_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  model_name_or_path: m\ndata:\n  dataset: d\ntraining:\n  output_dir: o\n")
    with pytest.raises(UserError, match=r"pip install .*shardyard\[low_bit\]"):
        load_config([str(path), "--training.optimizer_state_dtype", "int8"])
