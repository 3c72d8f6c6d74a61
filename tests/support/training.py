"""The step without the data layer: rows in, losses, gradients and weights out, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 199


@dataclass(frozen=True)
class Recipe:
    """What a case varies. The defaults are the reference: one rank, one micro-batch."""

    accumulation: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    packed: bool | None = None
    fix_router: bool = False
    optimization: dict[str, Any] = field(default_factory=dict)
    compile: tuple[Any, str] = ("none", "inductor")
    """The mode, and torch's name of the compiler."""


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    first_grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def bits_of(outcome: Outcome) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Its numbers, to be compared to the last bit."""
    tensors = {**outcome.first_grads, **{f"{n} after": w for n, w in outcome.weights.items()}}
    return outcome.losses, outcome.norms, {name: tensor.tobytes() for name, tensor in tensors.items()}


def make_rows(count: int = 16, seed: int = 0, empty: int = 5) -> list[tuple[list[int], list[int]]]:
    """(input_ids, labels) of unequal length with very uneven labels; row ``empty`` has no labelled token at
    all.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(3, 40))
        ids = rng.integers(3, VOCAB_SIZE, length)
        labels = np.append(ids[1:], -100)
        prompt = length if index == empty else int(rng.integers(0, length - 1))
        labels[:prompt] = -100
        rows.append((ids.tolist(), labels.tolist()))
    return rows


def samples_of(rows: list[tuple[list[int], list[int]]]) -> list[Any]:
    from shardyard.data.types import Sample

    return [Sample(np.array(ids, np.int32), np.array(labels, np.int32), (len(ids),)) for ids, labels in rows]


def build_step(folder: Path, recipe: Recipe) -> tuple[Any, Any, Any]:
    """(model, TrainStep, meshes) on the ranks of the running process group."""
    import torch.distributed as dist

    from shardyard.config import ModelConfig, OptimizationConfig, ParallelConfig, TrainingConfig
    from shardyard.config.layout import resolve_layout
    from shardyard.device import Device, ProcessGroup
    from shardyard.models import LossOptions, Placement, build_model, load_model_config
    from shardyard.optim import build_optimizer
    from shardyard.parallel import Compilation, RoutingOptions, build_meshes, build_routing
    from shardyard.train.scaler import LossScaler
    from shardyard.train.step import TrainStep

    options = ModelConfig(model_name_or_path=str(folder), **recipe.model)
    parallel = ParallelConfig(**recipe.parallel)
    training = TrainingConfig(output_dir="unused", **recipe.training)
    optimization = OptimizationConfig(fix_router=recipe.fix_router, **recipe.optimization)
    device = Device("cpu")
    meshes = build_meshes(resolve_layout(parallel, dist.get_world_size()), "cpu")
    loss = LossOptions.of(training, optimization)
    placement = Placement(parallel, meshes, device, Compilation(*recipe.compile), optimization, loss)
    built = build_model(
        options,
        load_model_config(options, folder),
        folder,
        placement,
        seed=training.seed,
    )
    options = RoutingOptions.of(training, optimization)
    built.model.routing = build_routing([built.model], meshes, options)
    group = ProcessGroup(dist.HashStore(), dist.get_rank(), dist.get_world_size())
    step = TrainStep(
        built.model, build_optimizer(built.model, training, meshes), group, device,
        meshes=meshes, max_grad_norm=training.max_grad_norm, on_nonfinite=training.on_nonfinite,
        packed=built.unpacked is None if recipe.packed is None else recipe.packed, seed=training.seed,
        scaler=LossScaler.of(training, parallel),
        in_backward=training.optimizer_in_backward,
    )  # fmt: skip
    return built, step, meshes


def refusal_of(folder: Path) -> str:
    """What building the model in ``folder`` is refused with; "" if it is built."""
    from shardyard.errors import UserError

    try:
        build_step(folder, Recipe())
    except UserError as error:
        return str(error)
    return ""


def micro_batches_of(rows: Any, accumulation: int, dp_rank: int, dp_size: int) -> list[Any]:
    from shardyard.data.batches import collate

    samples = samples_of(rows)
    mine = list(range(len(rows)))[dp_rank::dp_size]
    size = -(-len(rows) // (dp_size * accumulation))
    pieces = [mine[i * size : (i + 1) * size] for i in range(accumulation)]
    return [collate([samples[i] for i in piece], piece, 0) for piece in pieces]


def train_rows(folder: Path, rows: Any, recipe: Recipe) -> Outcome | None:
    """Run on every rank; rank 0 returns the outcome, with gradients of the first step before clipping."""
    import torch.distributed as dist

    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(rows, recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    counts = step._agree(batches)
    step.device.seed(0)
    step._forward_backward(batches, counts)
    grads = whole_model({n: p.grad for n, p in built.model.named_parameters() if p.grad is not None})
    step.optimizer.zero_grad(set_to_none=True)
    results = [step(batches, step=k, lr=1e-2) for k in range(1, recipe.steps + 1)]
    weights = whole_model(dict(built.model.named_parameters()))
    if dist.get_rank() != 0:
        return None
    return Outcome([r.loss for r in results], [r.grad_norm for r in results], grads, weights)


def whole(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor gathered, as NumPy."""
    from torch.distributed.tensor import DTensor

    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().numpy()
        for name, t in tensors.items()
    }


def whole_model(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same of every rank's tensors: the stages of a pipeline have different names."""
    import torch.distributed as dist

    parts: list[dict[str, np.ndarray]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, whole(tensors))
    return {name: tensor for part in reversed(parts) for name, tensor in part.items()}


def largest_relative_difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """max over tensors of max|difference| / max|reference|; infinite when the names differ."""
    if ours.keys() != reference.keys():
        return float("inf")
    worst = 0.0
    for name, wanted in reference.items():
        scale = np.abs(wanted).max()
        worst = max(worst, float(np.abs(ours[name] - wanted).max() / (scale if scale > 0 else 1.0)))
    return worst
