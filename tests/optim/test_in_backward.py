"""The step in the backward: the values of the ordinary step to the bit, gradients of one unit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.live_memory import LivePeak, bytes_kept
from support.models import write_tiny_model
from support.parity import write_parity_model
from support.training import Recipe, build_step, make_rows, micro_batches_of, whole, whole_model

from shardyard.optim import InBackward

CLIPPED = {"adam_epsilon": 1e-4, "max_grad_norm": 0.05}
FREE = {"adam_epsilon": 1e-4, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_parity_model(tmp_path_factory.mktemp("in_backward") / "dense", "dense")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("in_backward") / "moe", "deepseek_v3", vocab_size=200)


def both_ways(folder, parallel, training, mode):
    """Three steps, ordinary and in the backward: (losses, norms, weights) of each. Attention drops weights
    out, the same ones in both passes.
    """
    outcomes = []
    dropping = {"config_overrides": {"attention_dropout": 0.3}}
    for chosen in (False, mode):
        options = training | {"optimizer_in_backward": chosen}
        recipe = Recipe(parallel=parallel, training=options, model=dropping)
        built, step, meshes = build_step(folder, recipe)
        batches = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
        results = [step(batches, step=number, lr=1e-2) for number in (1, 2, 3)]
        assert all(p.grad is None for p in step.parameters)
        weights = whole_model(dict(built.model.named_parameters()))
        outcomes.append(([r.loss for r in results], [r.grad_norm for r in results], weights))
    return outcomes


CASES = [
    pytest.param("dense", 1, {}, FREE, True, id="one rank"),
    pytest.param("dense", 2, {"recompute": True}, CLIPPED, "two_pass", id="FSDP 2, clipped, recomputed"),
    pytest.param("dense", 2, {"tp_size": 2}, FREE, True, id="TP 2: norms are updated after the backward"),
    pytest.param("moe", 4, {"tp_size": 2, "ep_size": 2},
                 CLIPPED | {"router_aux_loss_coef": 0.01, "router_bias_update_rate": 0.1}, "two_pass",
                 id="TP 2 x FSDP 2 with EP 2, routers that move", marks=pytest.mark.soak),
    pytest.param("moe", 2, {"ep_size": 2}, CLIPPED | {"router_bias_update_rate": 0.1}, "two_pass",
                 id="EP 2, routers that move", marks=pytest.mark.soak),
    pytest.param("dense", 4, {"fsdp_size": 2, "ignored_modules": ["model.norm"]}, FREE, True,
                 id="HSDP 2x2 with an ignored module", marks=pytest.mark.soak),
    pytest.param("dense", 2, {"cpu_offload": True, "enable_chunk_batch": True}, FREE, True,
                 id="offloaded, in pieces", marks=pytest.mark.soak),
    pytest.param("dense", 2, {"cp_size": 2}, CLIPPED, "two_pass", id="CP 2", marks=pytest.mark.soak),
    pytest.param("dense", 1, {}, FREE | {"optimizer": "lion"}, True, id="Lion", marks=pytest.mark.soak),
    pytest.param("dense", 2, {}, FREE | {"optimizer_state_dtype": "bf16"}, True,
                 id="moments in bf16", marks=pytest.mark.soak),
]  # fmt: skip


@pytest.mark.parametrize(("family", "world", "parallel", "training", "mode"), CASES)
def test_the_values_are_those_of_the_ordinary_step(ranks, request, family, world, parallel, training, mode):
    folder = request.getfixturevalue(family)
    ordinary, ours = ranks.run(world, both_ways, folder, parallel, training, mode)[0]
    assert ours[0] == ordinary[0] and ours[1] == ordinary[1], "losses and norms, to the bit"
    assert ordinary[2].keys() == ours[2].keys()
    assert all(np.array_equal(ours[2][name], weights) for name, weights in ordinary[2].items())
    if training["max_grad_norm"]:
        assert min(ordinary[1]) > 2 * training["max_grad_norm"], "it clips"


def with_a_nan(folder):
    """For each way: (what the step says, whether the weights stand, what the next step says)."""
    told = []
    for mode, on_nonfinite in (("two_pass", "skip"), (True, "stop")):
        training = FREE | {"optimizer_in_backward": mode, "on_nonfinite": on_nonfinite}
        built, step, meshes = build_step(folder, Recipe(training=training))
        batches = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
        before = whole(dict(built.model.named_parameters()))
        handle = built.model.register_forward_hook(lambda module, args, output: output * float("nan"))
        said = what_it_says(step, batches)
        handle.remove()
        after = whole(dict(built.model.named_parameters()))
        same = all(np.array_equal(before[name], after[name]) for name in before)
        told.append((said, same, what_it_says(step, batches)))
    return told


def what_it_says(step, batches):
    try:
        return step(batches, step=1, lr=1e-2).skipped
    except Exception as error:
        return f"{type(error).__name__} {error}"


def test_two_passes_keep_the_weights_from_a_nan_and_one_pass_says_that_it_does_not(ranks, dense):
    two_passes, one_pass = ranks.run(1, with_a_nan, dense)[0]
    assert "the loss is NaN or Inf" in two_passes[0] and two_passes[1] and two_passes[2] is None
    assert one_pass[0].startswith("NonFiniteError") and "optimizer_in_backward" in one_pass[0]
    assert not one_pass[1] and one_pass[2].startswith("NonFiniteError")


def peaks_of_a_step(folder):
    """(the most bytes alive in a step of each mode, all gradients, those of the largest unit)."""
    peaks = {}
    for mode in (False, True, "two_pass"):
        built, step, meshes = build_step(folder, Recipe(training=FREE | {"optimizer_in_backward": mode}))
        row = ([3, 4, 5, 6], [4, 5, 6, -100])  # hardly any activations
        batches = micro_batches_of([row], 1, meshes.dp_rank, meshes.dp_size)
        step(batches, step=1, lr=1e-3)  # which makes the state
        with LivePeak() as live:
            step(batches, step=2, lr=1e-3)
        peaks[mode] = live.peak
    model = built.model
    layers = [bytes_kept(layer.parameters()) for layer in model.model.layers]
    return peaks, bytes_kept(model.parameters()), max(layers)


def test_gradients_of_a_unit_are_alive_at_a_time(ranks, tmp_path):
    """Eight layers and hardly a vocabulary, so that gradients are what makes the peak."""
    folder = write_tiny_model(
        tmp_path / "deep", "qwen3", num_hidden_layers=8, hidden_size=128, intermediate_size=512,
        layer_types=["full_attention"] * 8,
    )  # fmt: skip
    peaks, gradients, unit = ranks.run(1, peaks_of_a_step, folder)[0]
    assert peaks[False] >= gradients
    for mode in (True, "two_pass"):
        assert peaks[False] - peaks[mode] >= gradients - 2 * unit, (peaks, gradients, unit)


def test_a_gradient_that_comes_twice_is_no_update_without_a_word():
    parameter = torch.nn.Parameter(torch.ones(3))
    updates = InBackward(torch.optim.SGD([parameter], lr=0.1), two_passes=False)
    with updates.first_pass():
        parameter.square().sum().backward()
        with pytest.raises(RuntimeError, match="reduced twice"):
            parameter.square().sum().backward()
    assert torch.allclose(parameter, torch.full((3,), 0.8)), "1 - 0.1 x 2"


def test_outside_of_a_pass_gradients_stay():
    parameter = torch.nn.Parameter(torch.ones(3))
    InBackward(torch.optim.SGD([parameter], lr=0.1), two_passes=False)
    parameter.square().sum().backward()
    assert parameter.grad is not None and torch.equal(parameter.detach(), torch.ones(3))
