"""Adam-mini against its algorithm block by block, and over shards against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardyard.optim.adam_mini import AdamMini, Blocks, blocks_of

LR, DECAY, EPS, BETAS, STEPS = 0.01, 0.1, 1e-6, (0.9, 0.95), 4
KINDS: dict[str, tuple[tuple[int, ...], Blocks]] = {
    "rows": ((6, 5), Blocks(1)),
    "heads of 3 rows": ((12, 4), Blocks(1, 3)),
    "vector": ((7,), Blocks(None)),
    "experts": ((4, 3, 6), Blocks(2)),
    "transposed experts": ((4, 6, 4), Blocks(1)),
}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_in(kind: str) -> list[tuple]:
    """The index of each block, written out."""
    match kind:
        case "rows":
            return [(row,) for row in range(6)]
        case "heads of 3 rows":
            return [(slice(begin, begin + 3),) for begin in (0, 3, 6, 9)]
        case "vector":
            return [(slice(None),)]
        case "experts":
            return [(expert, row) for expert in range(4) for row in range(3)]
        case _:
            return [(expert, slice(None), col) for expert in range(4) for col in range(4)]


def plain(kind: str, start: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    weights, moment = start.copy(), np.zeros_like(start)
    squares = [0.0] * len(blocks_in(kind))
    for count, grad in enumerate(grads, 1):
        moment = BETAS[0] * moment + (1 - BETAS[0]) * grad
        for number, index in enumerate(blocks_in(kind)):
            squares[number] = BETAS[1] * squares[number] + (1 - BETAS[1]) * (grad[index] ** 2).mean()
            size = np.sqrt(squares[number] / (1 - BETAS[1] ** count)) + EPS
            step = LR * moment[index] / (1 - BETAS[0] ** count) / size
            weights[index] = weights[index] * (1 - LR * DECAY) - step
    return weights


def optimizer_of(parameters: dict[torch.Tensor, Blocks]) -> AdamMini:
    group = {"params": list(parameters), "lr": LR, "weight_decay": DECAY}
    return AdamMini([group], parameters, betas=BETAS, eps=EPS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_published_algorithm_block_by_block(kind):
    shape, blocks = KINDS[kind]
    parameter = torch.nn.Parameter(drawn(1, *shape))
    start = parameter.detach().double().numpy().copy()
    optimizer = optimizer_of({parameter: blocks})
    for step in range(STEPS):
        parameter.grad = drawn(10 + step, *shape)
        optimizer.step()
    grads = [drawn(10 + step, *shape).double().numpy() for step in range(STEPS)]
    assert np.abs(parameter.detach().numpy() - plain(kind, start, grads)).max() < 1e-6


def steps_over_shards(shape: tuple[int, ...], placements: dict[str, str]):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def placed(values: torch.Tensor, text: str):
        kinds = [Replicate() if letter == "R" else Shard(int(letter)) for letter in text]
        return distribute_tensor(values, mesh, kinds, src_data_rank=None)

    mesh = init_device_mesh("cpu", shape)
    parameters: dict[str, Any] = {
        kind: torch.nn.Parameter(placed(drawn(1, *KINDS[kind][0]), text)) for kind, text in placements.items()
    }
    optimizer = optimizer_of({parameter: KINDS[kind][1] for kind, parameter in parameters.items()})
    for step in range(STEPS):
        for kind, parameter in parameters.items():
            parameter.grad = placed(drawn(10 + step, *parameter.shape), placements[kind])
        optimizer.step()
    states = {kind: optimizer.state[p]["exp_avg_sq"] for kind, p in parameters.items()}
    return (
        {kind: p.detach().full_tensor() for kind, p in parameters.items()},
        {kind: s.full_tensor() if hasattr(s, "full_tensor") else s for kind, s in states.items()},
    )


@pytest.mark.parametrize(
    ("world", "shape", "placements"),
    [
        pytest.param(2, (2,), ("1", "0", "0", "2", "1"), id="2", marks=pytest.mark.soak),
        pytest.param(4, (2, 2), ("0R", "01", "R0", "02", "12"), id="2x2"),
        pytest.param(4, (4,), ("0", "0", "0", "0", "2"), id="4, uneven", marks=pytest.mark.soak),
    ],
)
def test_shards_give_the_weights_of_one_process(ranks, world, shape, placements):
    placements = dict(zip(KINDS, placements, strict=True))
    alone = {kind: torch.nn.Parameter(drawn(1, *KINDS[kind][0])) for kind in placements}
    optimizer = optimizer_of({parameter: KINDS[kind][1] for kind, parameter in alone.items()})
    for step in range(STEPS):
        for parameter in alone.values():
            parameter.grad = drawn(10 + step, *parameter.shape)
        optimizer.step()
    for weights, states in ranks.run(world, steps_over_shards, shape, placements):
        for kind, parameter in alone.items():
            assert (weights[kind] - parameter.detach()).abs().max() < 2e-7
            wanted = optimizer.state[parameter]["exp_avg_sq"]
            assert states[kind].shape == wanted.shape
            assert torch.allclose(states[kind], wanted, rtol=1e-6, atol=0)


def devices_of_offloaded_state():
    """Of a parameter on the host whose mesh is of another device: where its first state lies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = torch.nn.Parameter(distribute_tensor(drawn(1, 6, 5), mesh, [Shard(0)]))
    mesh._device_type = "meta"  # as an accelerator's is none of the host's
    state = optimizer_of({parameter: Blocks(1)}).first_state(parameter, {})
    return {name: getattr(t, "_local_tensor", t).device.type for name, t in state.items()}


def test_the_state_of_an_offloaded_parameter_lies_beside_it(ranks):
    (devices,) = ranks.run(1, devices_of_offloaded_state)
    assert devices == {"step": "cpu", "exp_avg": "cpu", "exp_avg_sq": "cpu"}


def test_roles_of_a_real_model():
    import transformers
    from support.models import tiny_config

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    blocks = {
        name: found
        for (name, _), found in zip(model.named_parameters(), blocks_of(model).values(), strict=True)
    }
    layer = "model.layers.0"
    assert blocks[f"{layer}.self_attn.q_proj.weight"] == Blocks(1, 8)
    assert blocks[f"{layer}.self_attn.k_proj.weight"] == Blocks(1, 8)
    assert blocks[f"{layer}.self_attn.v_proj.weight"] == Blocks(1)
    assert blocks["model.embed_tokens.weight"] == blocks["lm_head.weight"] == Blocks(1)
    assert blocks[f"{layer}.mlp.experts.gate_up_proj"] == Blocks(2)
    assert (
        blocks[f"{layer}.input_layernorm.weight"]
        == blocks[f"{layer}.self_attn.q_norm.weight"]
        == Blocks(None)
    )


def test_its_state_is_half_of_adamws():
    """A matrix [256, 128]: one moment and a number for each row; AdamW has two moments."""
    parameter = torch.nn.Parameter(torch.zeros(256, 128))
    state = optimizer_of({parameter: Blocks(1)}).first_state(parameter, {})
    assert sum(tensor.numel() for tensor in state.values()) == 256 * 128 + 256 + 1
