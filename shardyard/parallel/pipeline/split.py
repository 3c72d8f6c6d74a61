"""Which pipeline stage owns what: the decoder layers cut into consecutive stages, and who holds them.

The slowest stage decides the speed. So the even split makes the largest compute of a stage as small as it
can be, where the output layer counts as its vocabulary x hidden weights beside the weights that a token meets
in a layer, and the embedding, a lookup, as nothing. Among those splits it takes the one that spreads the
parameters, embedding and output layer included, most evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from shardyard.config import ParallelConfig
from shardyard.errors import UserError


@dataclass(frozen=True)
class Costs:
    """What a model weighs, in parameters: those that a token meets (compute) and those that lie in memory."""

    layer_compute: tuple[float, ...]
    layer_parameters: tuple[float, ...]
    embedding: float
    head: float

    @classmethod
    def uniform(cls, layers: int, *, embedding: float = 0.0, head: float = 0.0) -> Costs:
        """Layers of weight 1; embedding and head in layers."""
        return cls((1.0,) * layers, (1.0,) * layers, embedding, head)


@dataclass(frozen=True)
class StagePlan:
    """``bounds[s]`` is the half-open range of layers of stage s, which lives on pipeline rank s % ``pp``."""

    bounds: tuple[tuple[int, int], ...]
    pp: int

    @property
    def num_stages(self) -> int:
        return len(self.bounds)

    @property
    def num_layers(self) -> int:
        return self.bounds[-1][1]

    def stages_of(self, pp_rank: int) -> range:
        return range(pp_rank, self.num_stages, self.pp)

    def stage_of_layer(self, layer: int) -> int | None:
        """None for a layer that the model does not have."""
        return next((s for s, (start, end) in enumerate(self.bounds) if start <= layer < end), None)

    def __str__(self) -> str:
        return ", ".join(f"{start}-{end - 1}" for start, end in self.bounds)


def stages_per_rank(parallel: ParallelConfig) -> int:
    """``parallel.pp_stages_per_rank``, or what the schedule needs."""
    return parallel.pp_stages_per_rank or (2 if parallel.pp_schedule == "interleaved_1f1b" else 1)


def plan_stages(parallel: ParallelConfig, costs: Costs) -> StagePlan:
    """The stages that ``parallel`` asks for.

    Raises:
        UserError: fewer layers than stages, or ``pp_layers_per_stage`` does not fit the model.
    """
    layers, per_rank = len(costs.layer_compute), stages_per_rank(parallel)
    stages = parallel.pp_size * per_rank
    if parallel.pp_schedule != "interleaved_1f1b" and per_rank > 1:
        raise UserError(
            f"parallel.pp_stages_per_rank: {per_rank} with parallel.pp_schedule {parallel.pp_schedule}, "
            "which runs one stage a rank; set pp_schedule: interleaved_1f1b, or leave pp_stages_per_rank out"
        )
    if layers < stages:
        raise UserError(
            f"parallel.pp_size: {parallel.pp_size} x {per_rank} stages a rank need {stages} layers, and the "
            f"model has {layers}; at most parallel.pp_size={max(layers // per_rank, 1)} fits"
        )
    counts = parallel.pp_layers_per_stage or even_split(costs, stages)
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise UserError(
            f"parallel.pp_layers_per_stage: {list(counts)} are {len(counts)} stages with {sum(counts)} "
            f"layers; {stages} stages (pp_size {parallel.pp_size} x {per_rank}) of one layer at least share "
            f"the model's {layers}, such as {list(even_split(costs, stages))}"
        )
    ends = list(accumulate(counts))
    return StagePlan(
        tuple((end - count, end) for end, count in zip(ends, counts, strict=True)), parallel.pp_size
    )


def even_split(costs: Costs, stages: int) -> tuple[int, ...]:
    """Layers of each stage, one at least; see the module's docstring. Exact, by dynamic programming."""
    compute, parameters = ([0.0, *accumulate(c)] for c in (costs.layer_compute, costs.layer_parameters))

    def compute_of(stage: int, start: int, end: int) -> float:
        return compute[end] - compute[start] + (costs.head if stage == stages - 1 else 0.0)

    def parameters_of(stage: int, start: int, end: int) -> float:
        ends = (costs.embedding if stage == 0 else 0.0) + (costs.head if stage == stages - 1 else 0.0)
        return parameters[end] - parameters[start] + ends

    layers = len(costs.layer_compute)
    largest, _ = _best(layers, stages, compute_of, max)
    allowed = largest * (1 + 1e-9)

    def spread(stage: int, start: int, end: int) -> float:
        fits = compute_of(stage, start, end) <= allowed
        return parameters_of(stage, start, end) ** 2 if fits else float("inf")

    return _best(layers, stages, spread, lambda one, other: one + other)[1]


def _best(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest cut of ``layers`` into ``stages`` parts, whose costs ``join`` adds up, and its counts."""
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *([None] * layers)]
    for stage in range(stages):
        after: list[tuple[float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = [
                (join(known[0], cost(stage, start, end)), (*known[1], end - start))
                for start in range(stage, end)
                if (known := best[start]) is not None
            ]
            after[end] = min(options)
        best = after
    found = best[layers]
    assert found is not None
    return found
