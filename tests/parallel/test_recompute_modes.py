"""Recomputing changes no bit of a training; what each mode keeps is known to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configs import load
from support.models import write_tiny_model
from support.training import Recipe, bits_of, make_rows, train_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardyard.config import ParallelConfig
from shardyard.errors import UserError
from shardyard.parallel.kept import keep_and_reuse, kept_operators
from shardyard.parallel.recompute import mode_of

LAYER = "model.layers.{*}"
SELECTIVE = {"recompute": "selective"}
MIXED = {
    "recompute": "full",
    "recompute_modules": [LAYER, {"pattern": "model.layers.{1-2}", "mode": "selective"},
                          {"pattern": "model.layers.{3-3}", "mode": "none"}],
}  # fmt: skip
INSIDE = {"recompute": "selective", "recompute_modules": [LAYER, "model.layers.{*}.mlp"]}
FROZEN = {"freeze": ["model.embed_tokens", "model.layers.{0-1}"]}

CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "selective": (1, "dense", {}, SELECTIVE, {}),
    "selective, experts": (1, "moe", {}, SELECTIVE, {}),
    "selective, attention again": (1, "moe", {}, SELECTIVE | {"recompute_operators": ["attention"]}, {}),
    "selective, products again": (1, "dense", {}, SELECTIVE | {"recompute_operators": ["linear"]}, {}),
    "a mode per pattern": (1, "dense", {}, MIXED, {}),
    "one inside the other": (1, "dense", {}, INSIDE, {}),
    "frozen below": (1, "dense", {}, SELECTIVE, FROZEN),
    "full, frozen below": (1, "dense", {}, {"recompute": "full"}, FROZEN),
    "dropout": (1, "dense", {}, SELECTIVE, {"config_overrides": {"attention_dropout": 0.2}}),
    "FSDP 2": (2, "dense", {}, SELECTIVE, {}),
    "FSDP 2, kept whole": (2, "dense", {"reshard_after_forward": False}, SELECTIVE, {}),
    "HSDP 2x2": (4, "dense", {"fsdp_size": 2}, MIXED, {}),
    "TP 2": (2, "dense", {"tp_size": 2}, SELECTIVE, {}),
    "EP 2 on FSDP 4, prefetch": (
        4, "moe", {"ep_size": 2, "num_to_forward_prefetch": 3, "num_to_backward_prefetch": 2}, SELECTIVE, {},
    ),
    "TP 2 with EP 2": (2, "moe", {"tp_size": 2, "ep_size": 2}, SELECTIVE, {}),
    "CP ring 2": (2, "dense", {"cp_size": 2, "cp_type": "ring"}, SELECTIVE, {}),
    "CP ulysses 2": (2, "dense", {"cp_size": 2}, SELECTIVE, {}),
    "CP kvallgather 2": (2, "moe", {"cp_size": 2, "cp_type": "kvallgather"}, SELECTIVE, {}),
    "PP 2": (2, "dense", {"pp_size": 2}, SELECTIVE, {}),
    "PP 2 interleaved": (2, "moe", {"pp_size": 2, "pp_schedule": "interleaved_1f1b"}, MIXED, {}),
    "offloaded parameters": (2, "dense", {"cpu_offload": True}, SELECTIVE, {}),
    "pieces": (1, "dense", {"enable_chunk_batch": True, "chunk_mbs": 2}, SELECTIVE, {}),
}  # fmt: skip
QUICK = {"selective, attention again", "a mode per pattern", "one inside the other", "TP 2 with EP 2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CASES]
)
def test_no_bit_changes(ranks, model_zoo, name):
    world, family, parallel, recompute, model = CASES[name]
    folder = model_zoo.folder(f"parity_{family}")
    plain, ours = (
        ranks.run(
            world, train_rows, folder, make_rows(),
            Recipe(accumulation=2, parallel=parallel | options, model=model, steps=2),
        )[0]
        for options in ({}, recompute)
    )  # fmt: skip
    assert bits_of(ours) == bits_of(plain)


LAYERS, HIDDEN, MLP, QUERY, KV, HEADS, FP32 = 4, 32, 56, 64, 32, 8, 4
PRODUCTS = QUERY + 2 * KV + HIDDEN + 2 * MLP + HIDDEN
ATTENTION = QUERY + HEADS
"""Numbers a token: outputs of q, k, v, o, gate, up and down; output and log-sum-exp of attention."""


def peak(folder, parallel, tokens):
    """The most bytes alive in a step of one row with four labels, beyond what was there before."""
    from support.live_memory import LivePeak
    from support.training import build_step, micro_batches_of

    _, step, _ = build_step(folder, Recipe(parallel=parallel))
    ids = [3 + i % 90 for i in range(tokens)]
    batches = micro_batches_of([(ids, [-100] * (tokens - 4) + ids[:4])], 1, 0, 1)
    step(batches, step=1, lr=1e-2)
    with LivePeak() as memory:
        step(batches, step=2, lr=1e-2)
    return memory.peak


def deep(folder, layers):
    return write_tiny_model(
        folder / str(layers), "parity_dense", num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("again", "kept"),
    [
        ([], HIDDEN + PRODUCTS + ATTENTION),
        (["attention"], HIDDEN + PRODUCTS),
        pytest.param(["linear"], HIDDEN + ATTENTION, marks=pytest.mark.soak),
        pytest.param(["linear", "attention"], HIDDEN, marks=pytest.mark.soak),
    ],
)
def test_a_layer_keeps_its_input_and_the_named_outputs(ranks, tmp_path, again, kept):
    parallel: dict[str, Any] = dict(SELECTIVE)
    if again:
        parallel["recompute_operators"] = again
    tokens = (
        1024  # so that a layer keeps more in the forward than its gradients take at the end of the backward
    )
    few, many = (ranks.run(1, peak, deep(tmp_path, n), parallel, tokens)[0] for n in (4, 8))
    assert many - few == 4 * kept * tokens * FP32


def test_with_full_recompute_memory_is_linear_in_the_length(ranks, tmp_path):
    """A token costs a hidden state per layer, and once what one layer and its backward hold."""
    lengths = (1024, 2048, 4096)
    slopes = {}
    for layers in (LAYERS, 2 * LAYERS):
        folder = deep(tmp_path, layers)
        peaks = [ranks.run(1, peak, folder, {"recompute": "full"}, tokens)[0] for tokens in lengths]
        first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
        assert second == 2 * first
        slopes[layers] = first / (lengths[1] - lengths[0])
    assert slopes[2 * LAYERS] - slopes[LAYERS] == LAYERS * HIDDEN * FP32
    of_one_layer = slopes[LAYERS] - LAYERS * HIDDEN * FP32
    # Twice (value and gradient) every product's and attention's output, and six times what norms see.
    assert of_one_layer <= 2 * FP32 * (PRODUCTS + ATTENTION + 6 * HIDDEN)


def test_the_last_entry_that_matches_counts():
    parallel = ParallelConfig(**MIXED)
    modes = [mode_of(f"model.layers.{layer}", parallel) for layer in range(4)]
    assert modes == ["full", "selective", "selective", "none"]
    assert parallel.recompute_modes == {"full", "selective", "none"}
    assert ParallelConfig(recompute_modules=MIXED["recompute_modules"]).recompute_modes == {"none"}


@pytest.mark.parametrize("entry", ["{pattern: a}", "{pattern: a, mode: half}", "{mode: full}"])
def test_an_entry_that_is_none_is_refused(tmp_path, entry):
    with pytest.raises(UserError, match=r"recompute_modules: .* is no entry; write a pattern, or"):
        load(tmp_path, f"parallel: {{recompute: true, recompute_modules: [{entry}]}}")


def test_operators_without_the_mode_are_told(tmp_path):
    loaded = load(tmp_path, "parallel: {recompute: full, recompute_operators: [attention]}")
    assert any("recompute_operators: has no effect while no module" in line for line in loaded.warnings)


def selectively(function, x):
    operators = kept_operators(())
    return checkpoint(function, x, use_reentrant=False, context_fn=lambda: keep_and_reuse(operators))


def test_kept_products_do_not_run_again():
    weight, calls = torch.randn(4, 4, requires_grad=True), []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 4, requires_grad=True)
    plain = torch.autograd.grad((x @ weight).sin().exp().sum(), (x, weight))
    with Counting():
        result = selectively(lambda x: (x @ weight).sin().exp().sum(), x)
        ours = torch.autograd.grad(result, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert calls.count(torch.ops.aten.mm.default) == 3, "one forward, two of the backward"
    assert calls.count(torch.ops.aten.sin.default) == 2


def test_what_was_kept_and_then_changed_is_not_used():
    weight = torch.randn(4, 4, requires_grad=True)
    result = selectively(lambda x: (x @ weight).add_(1).sin().sum(), torch.randn(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="changed in place"):
        result.backward()


def test_attention_that_drops_out_runs_again_so_that_later_draws_are_the_same():
    q = torch.randn(1, 2, 8, 4, requires_grad=True)

    def attend(x):
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return torch.nn.functional.dropout(out, 0.5).sin().sum()

    grads = []
    for run in (attend, lambda x: selectively(attend, x)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(run(q), q)[0])
    assert torch.equal(*grads)
