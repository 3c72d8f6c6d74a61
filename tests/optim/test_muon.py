"""Muon against torch's own, against a plain loop in double precision, and over shards against one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.optim.matrices import Matrix
from shardyard.optim.matrix_plan import Plan
from shardyard.optim.muon import Muon, scale_of
from shardyard.optim.newton_schulz import orthogonalise

LR, DECAY, STEPS = 0.02, 0.1, 5


def whole(parameter: torch.Tensor) -> Matrix:
    return Matrix(range(parameter.shape[0]), range(parameter.shape[1]))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    for step in range(STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = drawn(100 * step + number, *parameter.shape)
        optimizer.step()


def plain_muon(
    weights: np.ndarray, grads: list[np.ndarray], scale: float, *, nesterov: bool = True
) -> np.ndarray:
    """Jordan's loop, in double precision."""
    momentum = np.zeros_like(weights)
    for grad in grads:
        momentum = 0.95 * momentum + grad  # torch's is 0.05 times this one; the direction is the same
        x = grad + 0.95 * momentum if nesterov else momentum
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        weights = weights * (1 - LR * DECAY) - LR * scale * x
    return weights


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scaling", ["match_rms_adamw", "original"])
def test_in_bf16_it_is_torchs_muon_bit_for_bit(scaling, nesterov):
    shapes = [(24, 16), (16, 24), (8, 8)]
    ours, theirs = (
        [torch.nn.Parameter(drawn(7 + n, *shape)) for n, shape in enumerate(shapes)] for _ in "ab"
    )
    options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY}
    muon = Muon(
        [{"params": ours, **options}], {p: (whole(p),) for p in ours}, nesterov=nesterov, scaling=scaling,
        dtype=torch.bfloat16,
    )  # fmt: skip
    run(muon, ours)
    peer = torch.optim.Muon(theirs, adjust_lr_fn=scaling, nesterov=nesterov, **options)
    run(peer, theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(muon.state[mine]["momentum_buffer"], peer.state[other]["momentum_buffer"])


@pytest.mark.parametrize("nesterov", [True, False])
def test_in_fp32_it_is_the_plain_loop_in_double_precision(nesterov):
    for shape in [(24, 16), (16, 24)]:
        parameter = torch.nn.Parameter(drawn(3, *shape))
        start = parameter.detach().double().numpy().copy()
        muon = Muon(
            [{"params": [parameter], "lr": LR, "weight_decay": DECAY}], {parameter: (whole(parameter),)},
            nesterov=nesterov,
        )  # fmt: skip
        run(muon, [parameter])
        grads = [drawn(100 * step, *shape).double().numpy() for step in range(STEPS)]
        wanted = plain_muon(start, grads, 0.2 * math.sqrt(24), nesterov=nesterov)
        assert np.abs(parameter.detach().numpy() - wanted).max() < 2e-6


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved columns"])
def test_gate_and_up_of_each_expert_are_matrices_of_their_own(interleaved):
    """A stack [3, 8, 6] of gate above up, or [3, 6, 8] of gate and up in turn, as gpt-oss has them."""
    from shardyard.optim.matrices import hidden_matrices

    class Experts(torch.nn.Module):
        num_experts, is_transposed, is_concatenated = 3, interleaved, not interleaved

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(drawn(1, *((3, 6, 8) if interleaved else (3, 8, 6))))
            self.down_proj = torch.nn.Parameter(drawn(2, *((3, 4, 6) if interleaved else (3, 6, 4))))

    model = torch.nn.ModuleDict({"experts": Experts()})
    stacks = list(model.parameters())
    slices = [
        torch.nn.Parameter(part.clone())
        for stack, parts in zip(stacks, (2, 1), strict=True)
        for part in apart(stack.detach(), parts, interleaved)
    ]
    matrices = hidden_matrices(model)
    assert [len(matrices[stack]) for stack in stacks] == [6, 3]
    run(Muon([{"params": stacks, "lr": LR, "weight_decay": DECAY}], matrices), stacks)
    alone = Muon([{"params": slices, "lr": LR, "weight_decay": DECAY}], {p: (whole(p),) for p in slices})
    for step in range(STEPS):
        grads = [drawn(100 * step + number, *stack.shape) for number, stack in enumerate(stacks)]
        parts = [p for g, n in zip(grads, (2, 1), strict=True) for p in apart(g, n, interleaved)]
        for piece, grad in zip(slices, parts, strict=True):
            piece.grad = grad.clone()
        alone.step()
    ours = [p for s, n in zip(stacks, (2, 1), strict=True) for p in apart(s.detach(), n, interleaved)]
    for mine, other in zip(ours, slices, strict=True):
        assert (mine - other).abs().max() < 1e-6


def apart(stack: torch.Tensor, parts: int, interleaved: bool) -> list[torch.Tensor]:
    """The matrices of a stack: all first halves, then all second ones."""
    if parts == 1:
        return list(stack)
    if interleaved:
        return [entry[:, part::2] for part in range(2) for entry in stack]
    return [half for part in range(2) for half in stack.chunk(2, 1)[part]]


def test_singular_values_come_near_one_and_directions_stay():
    given = drawn(5, 12, 20)
    got = orthogonalise(given, steps=5, dtype=torch.float32)
    assert all(0.6 < value < 1.3 for value in torch.linalg.svdvals(got).tolist())
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    inner = left.T @ got @ right.T  # U^T (U S' V^T) V is the diagonal S'
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-5


def test_a_stack_is_orthogonalised_matrix_by_matrix_and_zeros_stay_zeros():
    stack = drawn(6, 3, 5, 4)
    stack[1] = 0
    got = orthogonalise(stack, steps=5, dtype=torch.float32)
    for one, alone in zip(got, stack, strict=True):
        assert (one - orthogonalise(alone, steps=5, dtype=torch.float32)).abs().max() < 1e-6
    assert not got[1].any()


def test_the_rate_goes_by_the_longer_side_or_by_outputs_over_inputs():
    tall, wide = Matrix(range(64), range(16)), Matrix(range(16), range(64))
    assert scale_of(tall, "match_rms_adamw") == scale_of(wide, "match_rms_adamw") == pytest.approx(1.6)
    assert (scale_of(tall, "original"), scale_of(wide, "original")) == (2.0, 1.0)
    transposed = Matrix(range(16), range(64), out_is_cols=True)
    assert scale_of(transposed, "original") == 2.0


def test_a_parameter_without_a_gradient_stays_as_it_is():
    parameters = [torch.nn.Parameter(drawn(n, 4, 4)) for n in range(2)]
    before = parameters[1].detach().clone()
    muon = Muon(
        [{"params": parameters, "lr": LR, "weight_decay": DECAY}], {p: (whole(p),) for p in parameters}
    )
    parameters[0].grad = drawn(9, 4, 4)
    muon.step()
    assert torch.equal(parameters[1], before)
    assert not muon.state[parameters[1]]


SHAPES = ((7, 5), (6, 12), (4, 4, 6), (5, 3))
ENTRIES = tuple(Matrix(range(4), range(6), entry) for entry in range(4))
PLANS = {
    "rows of 2": (2, (2,), ("S0", "S0", "S0", "S0")),
    "columns of 2": (2, (2,), ("S1", "S1", "S2", "R")),
    "replicas of 2 x shards of 2": (4, (2, 2), ("RS0", "RS1", "RS0", "RR")),
    "rows of 2 x columns of 2": (4, (2, 2), ("S0S1", "S1S0", "S0S2", "S0R")),
    "four shards of five rows": (4, (4,), ("S0", "S0", "S0", "S0")),
}


def steps_over_shards(shape: tuple[int, ...], placements: tuple[str, ...], budget: int):
    """Weights after some steps, and what this rank worked on: its tasks by round, and what travelled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def placed(values: torch.Tensor, text: str):
        names = text.replace("R", " R").replace("S", " S").split()
        kinds = [Replicate() if name == "R" else Shard(int(name[1:])) for name in names]
        return distribute_tensor(values, mesh, kinds, src_data_rank=None)

    mesh = init_device_mesh("cpu", shape)
    parameters: list[Any] = [
        torch.nn.Parameter(placed(drawn(50 + n, *size), text))
        for n, (size, text) in enumerate(zip(SHAPES, placements, strict=True))
    ]
    matrices = {p: ENTRIES if p.ndim == 3 else (whole(p),) for p in parameters}
    muon = Muon(
        [{"params": parameters, "lr": LR, "weight_decay": DECAY}], matrices, torch.distributed.group.WORLD,
        budget=budget,
    )  # fmt: skip
    for step in range(STEPS):
        for n, (parameter, text) in enumerate(zip(parameters, placements, strict=True)):
            parameter.grad = placed(drawn(100 * step + n, *parameter.shape), text)
        muon.step()
    rounds = [[muon.plan.tasks[number][1].shape for number in turn.tasks] for turn in muon.plan.rounds]
    full = [p.detach().full_tensor() for p in parameters]
    return full, rounds, [turn.travels for turn in muon.plan.rounds]


QUICK = ("rows of 2", "replicas of 2 x shards of 2")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in PLANS]
)
def test_shards_and_replicas_give_the_weights_of_one_process(ranks, case):
    world, shape, placements = PLANS[case]
    alone = [torch.nn.Parameter(drawn(50 + n, *size)) for n, size in enumerate(SHAPES)]
    matrices = {p: ENTRIES if p.ndim == 3 else (whole(p),) for p in alone}
    run(Muon([{"params": alone, "lr": LR, "weight_decay": DECAY}], matrices), alone)
    budget = 40
    answers = ranks.run(world, steps_over_shards, shape, placements, budget)
    for full, rounds, travels in answers:
        for got, wanted in zip(full, alone, strict=True):
            assert (got - wanted.detach()).abs().max() < 2e-6
        for tasks in rounds:  # a matrix of its own may be larger
            assert len(tasks) <= 1 or sum(rows * cols for rows, cols in tasks) <= budget
        assert any(travels)
        assert sum(map(len, rounds)) >= 1  # seven matrices; each rank has its share
    owned = [sum(map(len, rounds)) for _, rounds, _ in answers]
    assert sum(owned) == 7 and max(owned) - min(owned) <= 3


def test_whole_experts_on_their_ranks_need_no_collective():
    """Four experts on two ranks, as each of these sees it."""
    boxes = [[((0, 2), (0, 4), (0, 6))], [((2, 4), (0, 4), (0, 6))]]
    for rank in range(2):
        plan = Plan([ENTRIES], boxes, rank, budget=100)
        assert plan.owners == [0, 0, 1, 1]
        assert [turn.tasks for turn in plan.rounds] == [((0, 1), (2, 3))[rank]]
        assert not any(turn.travels for turn in plan.rounds)


def test_a_plan_for_many_ranks_shares_the_work():
    """16 + 8 matrices of two shapes, rows over 16 ranks, and two replicas of these: 24 owners."""
    matrices = [(Matrix(range(64), range(32)),)] * 16 + [(Matrix(range(32), range(32)),)] * 8
    own = [[((4 * r, 4 * r + 4), (0, 32))] * 16 + [((2 * r, 2 * r + 2), (0, 32))] * 8 for r in range(16)]
    plan = Plan(matrices, own * 2, 5, budget=64 * 32)
    assert sorted(plan.owners) == list(range(24))
    (turn,) = plan.rounds
    assert turn.parts == 2  # each of two replicas gets a copy, and the copies keep to the budget
    assert len(turn.tasks) == 1
    number = turn.tasks[0]
    assert [len(side) for side in turn.gets] == [1] * 16 + [0] * 16  # from the owner's own replica
    assert [len(side) for side in turn.back] == [1] * 32
    assert {piece.task for side in turn.back for piece in side} == {number}
