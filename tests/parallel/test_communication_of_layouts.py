"""What a step sends, counted operation by operation: equal to what docs/parallelism.md says of each axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.training import Recipe, make_rows

LAYERS = 4
MOE_LAYERS = 3
"""parity_moe: one of its layers is dense."""

Counts = dict[tuple[str, str], int]


def second_step(folder, rows, recipe):
    """Counts of (kind, mesh dimension), and those of fp64 numbers, of a step that is not the first."""
    from support.traffic import Traffic, axes_of
    from support.training import build_step, micro_batches_of

    _, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(rows, recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    step(batches, step=1, lr=1e-2)
    with Traffic(axes_of(meshes)) as traffic:
        step(batches, step=2, lr=1e-2)
    return dict(traffic.counts()), dict(traffic.counts(control=True))


def fsdp(
    units: int, micro_batches: int, *, axis: str = "fsdp", root: bool = True, kept: bool = False
) -> Counts:
    """Each unit is gathered for each forward and each backward, but the root (and with ``kept`` every unit)
    stays gathered between the two; gradients are reduced once a step.
    """
    staying = units if kept else int(root)
    return {
        ("all-gather", axis): micro_batches * (2 * units - staying),
        ("reduce-scatter", axis): units,
    }


def tensor_parallel(micro_batches: int, *, recompute: bool = False) -> Counts:
    """Attention and MLP of a layer gather the sequence and scatter it; backwards the other way round; so do
    the embedding (which only scatters) and the head (which only gathers). Recompute stops before the last
    scatter of a layer, whose result it has. Cross entropy: one maximum and one pair of sums. Gradients of
    what is not split: once a step.
    """
    again = LAYERS if recompute else 0
    return {
        ("all-gather", "tp"): micro_batches * (4 * LAYERS + 2 + 2 * again),
        ("reduce-scatter", "tp"): micro_batches * (4 * LAYERS + 2 + again),
        ("all-reduce", "tp"): micro_batches * 2 + 1,
    }


def ulysses(micro_batches: int) -> Counts:
    """Query, key and value in one exchange, the output in another; the same backwards."""
    return {("all-to-all", "cp"): micro_batches * 4 * LAYERS}


def ring(micro_batches: int, cp: int) -> Counts:
    """Keys and values go round without the last hop; backwards they do so again, and their gradients go all
    the way, home included.
    """
    hops = micro_batches * LAYERS * ((cp - 1) + (cp - 1) + cp)
    return {("send", "cp"): hops, ("receive", "cp"): hops}


def kvallgather(micro_batches: int) -> Counts:
    """Keys and values once forwards and once backwards; their gradients are scattered."""
    return {
        ("all-gather", "cp"): micro_batches * 2 * LAYERS,
        ("reduce-scatter", "cp"): micro_batches * LAYERS,
    }


def experts(micro_batches: int, *, recompute: bool = False) -> Counts:
    """How many, the tokens, and the tokens back; backwards the last two. Recompute repeats the three."""
    return {("all-to-all", "ep"): micro_batches * MOE_LAYERS * (3 + 2 + (3 if recompute else 0))}


def pipeline(micro_batches: int) -> Counts:
    """Of the first or the last of two stages: a hidden state one way, its gradient the other."""
    return {("send", "pp"): micro_batches, ("receive", "pp"): micro_batches}


def gathers_in_pipeline(order: str) -> int:
    """Of a unit that is there after a backward (B) and not after a forward (F), in the order of a stage."""
    there, count = False, 0
    for action in order:
        count += not there
        there = action == "B"
    return count


@dataclass(frozen=True)
class Case:
    name: str
    world: int
    expected: list[Counts]
    family: str = "parity_dense"
    accumulation: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    quick: bool = False


# Units of parity_dense: the tied embedding and head, the layers, the root; of parity_moe one more.
DENSE, MOE = LAYERS + 2, LAYERS + 3
STAGE_UNITS = LAYERS // 2 + 1
CASES = [
    Case("FSDP 2", 2, [fsdp(DENSE, 1)]),
    Case("FSDP 2, accumulation 2", 2, [fsdp(DENSE, 2)], accumulation=2),
    Case("FSDP 2, recompute", 2, [fsdp(DENSE, 2)], accumulation=2, parallel={"recompute": True}, quick=True),
    Case("FSDP 2, kept", 2, [fsdp(DENSE, 2, kept=True)], accumulation=2,
         parallel={"reshard_after_forward": False}),
    Case("FSDP 2, far prefetch", 2, [fsdp(DENSE, 2)], accumulation=2,
         parallel={"num_to_forward_prefetch": 3, "num_to_backward_prefetch": 3}),
    Case("FSDP 2, no prefetch", 2, [fsdp(DENSE, 1)],
         parallel={"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0}),
    Case("HSDP 2x2", 4, [fsdp(DENSE, 2), {("all-reduce", "dp_replicate"): DENSE}], accumulation=2,
         parallel={"fsdp_size": 2}),
    Case("ignored on FSDP 2", 2, [fsdp(DENSE, 2), {("all-reduce", "fsdp"): LAYERS}], accumulation=2,
         parallel={"ignored_modules": ["model.layers.{*}.self_attn.q_proj"]}),
    Case("TP 2", 2, [tensor_parallel(2)], accumulation=2, parallel={"tp_size": 2}),
    Case("TP 2, recompute", 2, [tensor_parallel(1, recompute=True)],
         parallel={"tp_size": 2, "recompute": True}),
    Case("FSDP 2 x TP 2", 4, [fsdp(DENSE, 2), tensor_parallel(2)], accumulation=2, parallel={"tp_size": 2},
         quick=True),
    Case("FSDP 2 x CP ulysses 2", 4, [fsdp(DENSE, 2), ulysses(2)], accumulation=2, parallel={"cp_size": 2}),
    Case("FSDP 2 x CP ring 2", 4, [fsdp(DENSE, 1), ring(1, 2)], parallel={"cp_size": 2, "cp_type": "ring"}),
    Case("FSDP 2 x CP kvallgather 2", 4, [fsdp(DENSE, 1), kvallgather(1)],
         parallel={"cp_size": 2, "cp_type": "kvallgather"}),
    Case("EP 2 x EFSDP 2 on FSDP 4", 4,
         [fsdp(MOE, 2), fsdp(MOE_LAYERS, 2, axis="efsdp", root=False), experts(2)],
         family="parity_moe", accumulation=2, parallel={"ep_size": 2}),
    Case("EP 2 x EFSDP 2, recompute", 4,
         [fsdp(MOE, 1), fsdp(MOE_LAYERS, 1, axis="efsdp", root=False), experts(1, recompute=True)],
         family="parity_moe", parallel={"ep_size": 2, "recompute": True}),
]  # fmt: skip
PIPELINES = [
    Case("PP 2", 2, [pipeline(2), {("all-reduce", "pp"): 1}], accumulation=2, parallel={"pp_size": 2}),
    Case("PP 2 x FSDP 2", 4, [pipeline(4), {("all-reduce", "pp"): 1}], accumulation=4,
         parallel={"pp_size": 2}),
]  # fmt: skip
ORDERS = {"first": "FFBFBFBB", "last": "FBFBFBFB"}
"""Of a stage's four micro-batches under 1F1B."""


def _parametrised(cases: list[Case]):
    return pytest.mark.parametrize(
        "case",
        [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.soak) for c in cases],
    )


def _sum(parts: list[Counts]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for part in parts:
        total.update(part)
    return total


def _counted(ranks, model_zoo, case: Case) -> list[Counts]:
    recipe = Recipe(parallel=case.parallel, accumulation=case.accumulation)
    answers = ranks.run(case.world, second_step, model_zoo.folder(case.family), make_rows(), recipe)
    for _, control in answers:
        # Two of the step's own, and the routers' counts of a model with experts.
        kinds = Counter(kind for (kind, _), count in control.items() for _ in range(count))
        assert kinds == {"all-gather": 2} | ({"all-reduce": 1} if case.family == "parity_moe" else {})
    return [counts for counts, _ in answers]


@_parametrised(CASES)
def test_a_step_sends_what_the_page_says(ranks, model_zoo, case):
    for counts in _counted(ranks, model_zoo, case):
        assert counts == _sum(case.expected)


@_parametrised(PIPELINES)
def test_a_stage_sends_what_the_page_says(ranks, model_zoo, case):
    """Units stay gathered from one backward to the next forward; so the order of micro-batches counts."""
    for rank, counts in enumerate(_counted(ranks, model_zoo, case)):
        stage = "first" if rank < case.world // 2 else "last"
        if case.world == 4:
            # Two layers and the embedding or head; the last stage's root has the norm, and stays gathered.
            root = stage == "last"
            gathers = STAGE_UNITS * gathers_in_pipeline(ORDERS[stage]) + root
            fsdp_part = {("all-gather", "fsdp"): gathers, ("reduce-scatter", "fsdp"): STAGE_UNITS + root}
        else:
            fsdp_part = {}
        assert counts == _sum([*case.expected, fsdp_part])
