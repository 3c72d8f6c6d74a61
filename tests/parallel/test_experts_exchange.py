"""Tokens to their experts and back: outputs and gradients against a plain loop over tokens and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ranks import RankPool

EXPERTS, HIDDEN, INNER = 8, 8, 8  # rows of 32 bytes: grouped_mm wants multiples of 16


def problem(tokens: list[int], top_k: int, kind: str, seed: int = 0) -> dict[str, Any]:
    """Weights of all experts; of each rank hidden [N, H], index and weights [N, K], upstream [N, H]."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape) / 2  # noqa: E731
    ranks = []
    for count in tokens:
        index = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(count)])
        if kind == "one_expert":
            index = np.stack(
                [np.r_[6, rng.permutation([e for e in range(EXPERTS) if e != 6])][:top_k]] * count
            )
        if kind == "last_rank_idle":  # no token for the experts of the second half
            index = np.stack([rng.permutation(EXPERTS // 2)[:top_k] for _ in range(count)])
        ranks.append((draw(count, HIDDEN), index, rng.random((count, top_k)), draw(count, HIDDEN)))
    return {
        "gate_up_proj": draw(EXPERTS, 2 * INNER, HIDDEN),
        "down_proj": draw(EXPERTS, HIDDEN, INNER),
        "ranks": ranks,
    }


def dense_loop(task: dict[str, Any]) -> dict[str, Any]:
    """One process, float64, token by token and slot by slot; the loss is sum(output * upstream)."""
    import torch

    gate_up, down = (torch.tensor(task[n], requires_grad=True) for n in ("gate_up_proj", "down_proj"))
    answers, total = [], torch.zeros((), dtype=torch.float64)
    for hidden, index, weights, upstream in task["ranks"]:
        hidden, weights = (torch.tensor(x, requires_grad=True) for x in (hidden, weights))
        rows = []
        for token in range(len(hidden)):
            row = torch.zeros(HIDDEN, dtype=torch.float64)
            for slot, expert in enumerate(index[token]):
                both = gate_up[expert] @ hidden[token]
                inner = torch.nn.functional.silu(both[:INNER]) * both[INNER:]
                row = row + weights[token, slot] * (down[expert] @ inner)
            rows.append(row)
        output = torch.stack(rows)
        total = total + (output * torch.tensor(upstream)).sum()
        answers.append((output, hidden, weights))
    total.backward()
    return {
        "outputs": [output.detach().numpy() for output, _, _ in answers],
        "hidden": [hidden.grad.numpy() for _, hidden, _ in answers],
        "weights": [weights.grad.numpy() for _, _, weights in answers],
        "gate_up_proj": gate_up.grad.numpy(),
        "down_proj": down.grad.numpy(),
    }


def split_experts(gate_up: Any, down: Any, implementation: str = "eager", dtype: str = "float32") -> Any:
    """transformers' Qwen3-MoE experts with these weights, split over all ranks; and their mesh."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from shardyard.parallel.experts.split import ExpertParallel

    config = Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu"
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config).to(getattr(torch, dtype))
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.tensor(gate_up))
        experts.down_proj.copy_(torch.tensor(down))
    ExpertParallel(
        experts, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ).install()
    return experts


def run_rank(task: dict[str, Any], implementation: str, recompute: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    experts = split_experts(task["gate_up_proj"], task["down_proj"], implementation)
    hidden, index, weights, upstream = (torch.tensor(x) for x in task["ranks"][dist.get_rank()])
    hidden, weights = (x.float().requires_grad_() for x in (hidden, weights))
    if recompute:
        output = checkpoint(experts, hidden, index, weights, use_reentrant=False)
    else:
        output = experts(hidden, index, weights)
    (output * upstream.float()).sum().backward()
    with torch.no_grad():
        again = experts(hidden, index, weights)
    assert torch.equal(again, output), "the forward without gradients differs"
    parts = {name: experts._parameters[name] for name in ("gate_up_proj", "down_proj")}
    assert all(p.grad is not None and p.to_local().shape[0] == experts.num_experts for p in parts.values())
    grads = {name: p.grad.to_local().numpy() for name, p in parts.items()}
    return {
        "output": output.detach().numpy(), "hidden": hidden.grad.numpy(), "weights": weights.grad.numpy(),
        **grads,
    }  # fmt: skip


CASES = [
    ([7], 2, "spread"),
    ([5, 9], 2, "spread"),
    ([6, 1], 2, "one_expert"),
    ([4, 3], 1, "one_expert"),
    ([5, 4], 3, "last_rank_idle"),
    ([3, 2], EXPERTS, "spread"),
    ([5, 1, 8, 2], 2, "spread"),
    ([2, 3, 1, 4], 2, "last_rank_idle"),
    ([1, 1, 1, 1], 1, "one_expert"),
]


WAYS = [("eager", False), ("eager", True), ("grouped_mm", False), ("grouped_mm", True)]


def run_all(tasks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[run_rank(task, *way) for way in WAYS] for task in tasks]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exchange_equals_a_loop_over_tokens(ranks: RankPool, world: int) -> None:
    cases = [case for case in CASES if len(case[0]) == world]
    tasks = [problem(*case) for case in cases]
    answers = ranks.run(world, run_all, tasks)
    for number, (case, task) in enumerate(zip(cases, tasks, strict=True)):
        wanted = dense_loop(task)
        for way, (implementation, recompute) in enumerate(WAYS):
            got = [answers[rank][number][way] for rank in range(world)]
            label = f"{case} {implementation} recompute={recompute}"
            for rank, answer in enumerate(got):
                for mine, theirs in (("output", "outputs"), ("hidden", "hidden"), ("weights", "weights")):
                    np.testing.assert_allclose(answer[mine], wanted[theirs][rank], 2e-5, 2e-6, err_msg=label)
            for name in ("gate_up_proj", "down_proj"):
                whole = np.concatenate([answer[name] for answer in got])
                np.testing.assert_allclose(whole, wanted[name], 2e-5, 2e-6, err_msg=f"{label} {name}")


def run_in_bf16(task: dict[str, Any]) -> list[Any]:
    """fp32 routing weights over bf16 experts: (output of the split experts, of all experts on this rank)."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts = split_experts(task["gate_up_proj"], task["down_proj"], "grouped_mm", "bfloat16")
    hidden, index, weights, _ = (torch.tensor(x) for x in task["ranks"][dist.get_rank()])
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    whole = Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        whole.gate_up_proj.copy_(torch.tensor(task["gate_up_proj"]))
        whole.down_proj.copy_(torch.tensor(task["down_proj"]))
        inputs = hidden.bfloat16(), index, weights.float()
        split, alone = experts(*inputs), whole(*inputs)
    assert split.dtype == alone.dtype == torch.bfloat16
    return [split.float().numpy(), alone.float().numpy()]


def test_bf16_experts_keep_fp32_routing_weights(ranks: RankPool) -> None:
    for split, alone in ranks.run(2, run_in_bf16, problem([9, 6], 2, "spread")):
        np.testing.assert_array_equal(split, alone)
