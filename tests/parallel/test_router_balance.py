"""Routers: the loss of balance and its gradient, counts, biases and fixed routing, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.models import tiny_config
from support.ranks import RankPool

LAYERS, HIDDEN, COEFFICIENT = 2, 32, 0.7
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", "softmax"),
    "deepseek_v3": ("DeepseekV3MoE", "sigmoid"),
    "glm4_moe": ("Glm4MoeMoE", "sigmoid"),
    "gpt_oss": ("GptOssMLP", "softmax"),
}


def blocks(family: str) -> Any:
    """``model.layers.{0,1}.mlp`` of a family, with weights of a fixed seed and residuals between them."""
    import importlib

    import torch
    from torch import nn

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = tiny_config(family)
    config._experts_implementation = "eager"

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = getattr(module, FAMILIES[family][0])(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.mlp(x)
            return x + (out[0] if isinstance(out, tuple) else out)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

        def forward(self, x: torch.Tensor, recompute: bool = False, pieces: int = 1) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            for layer in self.model.layers:
                run = (lambda y, f=layer: checkpoint(f, y, use_reentrant=False)) if recompute else layer
                x = torch.cat([run(part) for part in x.chunk(pieces, 1)], 1)
            return x

    net = Net()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return net


def batch(rows: int = 2, tokens: int = 24, seed: int = 1) -> list[dict[str, Any]]:
    """Micro-batches: hidden [N, H], upstream [N, H] and the document of each token; -1 is padding."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        documents = np.sort(rng.integers(0, 3, tokens))
        documents[-3:] = -1
        made.append({
            "hidden": rng.normal(size=(tokens, HIDDEN)).astype(np.float32),
            "upstream": rng.normal(size=(tokens, HIDDEN)).astype(np.float32) * (documents >= 0)[:, None],
            "documents": documents,
        })  # fmt: skip
    return made


def by_plain_loops(family: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """No routing object: logits are recorded, the loss of balance is summed document by document."""
    import torch

    net = blocks(family)
    recorded: list[Any] = []
    for layer in net.model.layers:
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
        router.register_forward_hook(lambda _module, _inputs, answer: recorded.append(answer))
    tokens = sum(int((row["documents"] >= 0).sum()) for row in rows)
    experts = 4
    loads = np.zeros((LAYERS, experts))
    main, balance = torch.zeros(()), torch.zeros(())
    for row in rows:
        recorded.clear()
        out = net(torch.tensor(row["hidden"])[None])
        main = main + (out[0] * torch.tensor(row["upstream"])).sum()
        for number, (logits, _, index) in enumerate(recorded):
            scores = logits.softmax(-1) if FAMILIES[family][1] == "softmax" else logits.sigmoid()
            for document in sorted(set(row["documents"].tolist()) - {-1}):
                mine = [t for t in range(len(logits)) if row["documents"][t] == document]
                loss = torch.zeros(())
                for expert in range(experts):
                    chosen = sum(int(expert in index[t].tolist()) for t in mine)
                    loads[number, expert] += chosen
                    mean = sum(scores[t, expert] / scores[t].sum() for t in mine) / len(mine)
                    loss = loss + experts * (chosen / len(mine)) * mean
                balance = balance + len(mine) * loss / (tokens * LAYERS)
    (main + COEFFICIENT * balance).backward()
    return {
        "grads": {name: p.grad.numpy() for name, p in net.named_parameters() if p.grad is not None},
        "aux_loss": float(balance.detach()),
        "loads": loads,
        "tokens": tokens,
    }


def on_this_rank(
    family: str, rows: list[dict[str, Any]], parallel: dict[str, Any], recompute: bool, pieces: int
) -> dict[str, Any]:
    """Rows go round over dp, the tokens of a row over cp and tp; gradients of this rank's tokens."""
    import torch
    import torch.distributed as dist

    from shardyard.config import ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.parallel import build_meshes
    from shardyard.parallel.experts.routing import RoutingOptions, build_routing

    meshes = build_meshes(resolve_layout(ParallelConfig(**parallel), dist.get_world_size()), "cpu")
    net = blocks(family)
    biases = {n: b.clone() for n, b in net.named_buffers()}
    routing = build_routing([net], meshes, RoutingOptions(aux_coefficient=COEFFICIENT, bias_rate=0.125))
    assert routing is not None
    routing.begin_step(sum(int((row["documents"] >= 0).sum()) for row in rows))
    size = meshes.layout.cp * meshes.layout.tp
    part = meshes.cp_rank * meshes.layout.tp + meshes.tp_rank
    losses = []
    for row in rows[meshes.dp_rank :: meshes.dp_size]:
        hidden, upstream, documents = (
            torch.tensor(row[key]).chunk(size)[part] for key in ("hidden", "upstream", "documents")
        )
        with routing.forward(documents, num_documents=3):
            out = net(hidden[None], recompute, pieces)
        losses.append((out[0] * upstream).sum())
    for loss in reversed(losses):  # as a pipeline may: all forwards, then the backwards
        loss.backward()
    with torch.no_grad():
        net(torch.tensor(rows[0]["hidden"])[None])  # an evaluation is not counted
    stats = routing.finish_step(applied=True)
    moved = {n: (b - biases[n]).numpy() for n, b in net.named_buffers()}
    grads = {}
    for name, parameter in net.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        grads[name] = grad.numpy()
    return {"grads": grads, "stats": stats, "moved": moved}


CP_TP = {"cp_size": 2, "tp_size": 2}
CASES = [
    ("qwen3_moe", 4, CP_TP, True, 1),
    ("deepseek_v3", 4, {"cp_size": 2}, True, 1),
    ("gpt_oss", 2, {"tp_size": 2}, False, 2),
]
MORE = [
    (family, world, parallel, recompute, pieces)
    for family in FAMILIES
    for world, parallel in ((1, {}), (2, {}), (2, {"cp_size": 2}), (2, {"tp_size": 2}), (4, {"cp_size": 4}))
    for recompute, pieces in ((False, 1), (True, 2))
]


@pytest.mark.parametrize(
    ("family", "world", "parallel", "recompute", "pieces"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)],
)
def test_balance_counts_and_biases_equal_plain_loops(
    ranks: RankPool, family: str, world: int, parallel: dict[str, Any], recompute: bool, pieces: int
) -> None:
    rows = batch()
    wanted = by_plain_loops(family, rows)
    for got in ranks.run(world, on_this_rank, family, rows, parallel, recompute, pieces):
        assert got["stats"].aux_loss == pytest.approx(wanted["aux_loss"], rel=1e-5)
        loads = wanted["loads"]
        assert got["stats"].max_load == pytest.approx((loads.max(1) / loads.mean(1)).max(), rel=1e-6)
        assert got["stats"].unused_experts == (loads == 0).sum() and got["stats"].experts == loads.size
        for name, grad in wanted["grads"].items():
            scale = np.abs(grad).max()
            np.testing.assert_allclose(got["grads"][name], grad, atol=2e-5 * scale, err_msg=name)
        assert len(got["moved"]) == (2 if FAMILIES[family][1] == "sigmoid" else 0)
        for name, moved in got["moved"].items():
            layer = int(name.split(".")[2])
            by_hand = [0.125 * np.sign(loads[layer].mean() - load) for load in loads[layer]]
            np.testing.assert_allclose(moved, by_hand, atol=1e-6, err_msg=name)


def with_options(family: str, **options: Any) -> tuple[Any, Any]:
    from shardyard.config import ParallelConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.parallel import build_meshes
    from shardyard.parallel.experts.routing import RoutingOptions, build_routing

    net = blocks(family)
    meshes = build_meshes(resolve_layout(ParallelConfig(), 1), "cpu")
    return net, build_routing([net], meshes, RoutingOptions(**options))


def one_process() -> None:
    """What needs a process group but no second rank."""
    skipped_steps_and_fillers()
    fixed_routing()
    transformers_own_loss()
    without_options_nothing_changes()


def skipped_steps_and_fillers() -> None:
    import torch

    net, routing = with_options("deepseek_v3", bias_rate=0.5)
    before = {n: b.clone() for n, b in net.named_buffers()}
    hidden = torch.randn(1, 6, HIDDEN)
    routing.begin_step(6)
    with routing.forward(torch.full((6,), -1)):
        net(hidden)
    empty = routing.finish_step(applied=True)
    assert np.isnan(empty.max_load) and empty.unused_experts == 2 * 4 and empty.aux_loss is None
    routing.begin_step(6)
    with routing.forward():
        net(hidden)
    routing.finish_step(applied=False)
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())
    # Counts of a step that was skipped are not those of the next one.
    routing.begin_step(6)
    with routing.forward(torch.tensor([0, -1, -1, -1, -1, -1])):
        net(hidden)
    stats = routing.finish_step(applied=True)
    assert stats.unused_experts == 2 * 2 and stats.max_load == 2.0  # one token, two of four experts
    for name, bias in net.named_buffers():
        assert sorted((bias - before[name]).tolist()) == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def fixed_routing() -> None:
    import torch

    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        net, _ = with_options(family, fixed=True)
        mlp = net.model.layers[0].mlp
        router = mlp.router if hasattr(mlp, "router") else mlp.gate
        _, weights, index = router(torch.randn(6, HIDDEN))
        assert index.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2]]
        assert weights.tolist() == [[0.5, 0.5]] * 6
        net(torch.randn(1, 6, HIDDEN)).sum().backward()
        assert router.weight.grad is not None and not router.weight.grad.any()


def transformers_own_loss() -> None:
    """One document and one layer: the value is that of the function that families train with."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    net, routing = with_options("qwen3_moe", aux_coefficient=1.0)
    logits: list[Any] = []
    for layer in net.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, answer: logits.append(answer[0].detach()))
    routing.begin_step(9)
    with routing.forward():
        net(torch.randn(1, 9, HIDDEN))
    each = [float(load_balancing_loss_func((one,), 4, 2)) for one in logits]
    assert routing.finish_step(applied=True).aux_loss == pytest.approx(sum(each) / LAYERS, rel=1e-6)


def without_options_nothing_changes() -> None:
    import torch

    hidden = torch.randn(1, 5, HIDDEN)
    net, routing = with_options("glm4_moe")
    with routing.forward():
        out = net(hidden)
    assert torch.equal(out, blocks("glm4_moe")(hidden))


def test_skipped_steps_fillers_fixed_routing_and_the_peers_loss(ranks: RankPool) -> None:
    ranks.run(1, one_process)


def refusals() -> list[str]:
    from torch import nn

    from shardyard.config import OptimizationConfig, ParallelConfig, TrainingConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.errors import UserError
    from shardyard.parallel import build_meshes
    from shardyard.parallel.experts.routing import RoutingOptions, build_routing

    meshes = build_meshes(resolve_layout(ParallelConfig(), 1), "cpu")
    told = []
    for net, training, optimization in (
        (nn.Linear(2, 2), {"router_aux_loss_coef": 0.1}, {}),
        (nn.Linear(2, 2), {}, {"fix_router": True}),
        (blocks("qwen3_moe"), {"router_bias_update_rate": 0.01}, {}),
    ):
        options = RoutingOptions.of(
            TrainingConfig(output_dir="unused", **training), OptimizationConfig(**optimization)
        )
        try:
            build_routing([net], meshes, options)
        except UserError as error:
            told.append(str(error))
    # Pretraining moves a bias by itself, where there is one; that is no wish that could fail.
    pretraining = RoutingOptions.of(TrainingConfig(output_dir="unused", stage="pt"), OptimizationConfig())
    assert pretraining.bias_rate == 0.001
    assert build_routing([nn.Linear(2, 2)], meshes, pretraining) is None
    assert build_routing([blocks("qwen3_moe")], meshes, pretraining) is not None
    return told


def test_options_without_a_router_to_take_them_are_refused(ranks: RankPool) -> None:
    told = ranks.run(1, refusals)[0]
    keys = ["training.router_aux_loss_coef", "optimization.fix_router", "training.router_bias_update_rate"]
    assert [message.split(":")[0].split(" ")[0] for message in told] == keys
