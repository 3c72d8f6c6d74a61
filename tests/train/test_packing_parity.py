"""Packed documents are as if each were alone: loss, gradients, hidden states; against plain transformers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, largest_relative_difference, make_rows, samples_of, whole

TOLERANCE = 1e-5
CAPACITY = 64
ROWS = make_rows(16)
CASES = list(itertools.product((1, 2, 4), (1, 3), (False, True), (False, True), (True, False)))
"""Ranks, micro-batches, recompute, offload, packs in one forward (or a document a forward)."""
SAMPLE = {(2, 3, True, True, True), (2, 1, True, False, False)}
FAMILIES = ("qwen3", "llama_tied", "qwen3_moe", "deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Gradients:
    loss: float
    gradients: dict[str, np.ndarray]
    packs: list[tuple[int, ...]]
    """Documents of each pack of this rank."""


def alone(folder: Path, rows: Any, joined: list[list[int]] | None = None) -> Gradients:
    """Plain transformers, one causal forward a row: the loss per labelled token, and its gradients.

    ``joined`` lists rows that make one text together.
    """
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = sum(label != -100 for _, labels in rows for label in labels)
    loss = torch.zeros(())
    for numbers in joined or [[number] for number in range(len(rows))]:
        ids = torch.tensor([[token for number in numbers for token in rows[number][0]]])
        labels = torch.tensor([label for number in numbers for label in rows[number][1]])
        loss = loss + F.cross_entropy(
            model(input_ids=ids, use_cache=False).logits[0], labels, reduction="sum"
        )
    (loss / total).backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return Gradients(loss.item() / total, gradients, [])


def packed(folder: Path, rows: Any, recipe: Recipe, merge: bool = False) -> Gradients:
    """One global batch of all packs through our order, loader and step."""
    from shardyard.data.batches import BatchLoader
    from shardyard.data.order import EpochOrder, PackedOrder
    from shardyard.data.sampler import ElasticSampler

    built, step, meshes = build_step(folder, recipe)
    lengths = np.array([len(ids) for ids, _ in rows])
    inner = EpochOrder(len(rows), seed=1, shuffle=True)
    order = PackedOrder(inner, lengths, capacity=CAPACITY, window=len(rows))
    per_device = -(-order.size(0) // (recipe.accumulation * meshes.dp_size))
    sampler = ElasticSampler(
        order, global_batch=per_device * recipe.accumulation * meshes.dp_size, drop_last=False,
        num_train_epochs=1, max_steps=0,
    )  # fmt: skip
    (batch,) = BatchLoader(
        samples_of(rows), sampler, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size, per_device=per_device,
        merge_packs=merge,
    )  # fmt: skip
    counts = step._agree(batch.micro_batches)
    result, faults = step._conclude(step._forward_backward(batch.micro_batches, counts), counts)
    assert not faults and result.num_tokens == lengths.sum()
    gradients = {n: p.grad for n, p in built.model.named_parameters() if p.grad is not None}
    units = [tuple(unit) for unit in (order.units(0, 0, order.size(0))[k] for k in range(order.size(0)))]
    return Gradients(result.loss, whole(gradients), units)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("packing"), "qwen3")


@pytest.fixture(scope="module")
def reference(ranks: Any, folder: Path) -> Gradients:
    return ranks.run(1, alone, folder, ROWS)[0]


def assert_same(ours: Gradients, wanted: Gradients) -> None:
    assert ours.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert largest_relative_difference(ours.gradients, wanted.gradients) <= TOLERANCE


def assert_really_packed(ours: Gradients) -> None:
    assert max(map(len, ours.packs)) > 1 and sorted(sum(ours.packs, ())) == list(range(len(ROWS)))
    assert all(sum(len(ROWS[number][0]) for number in pack) <= CAPACITY for pack in ours.packs)


@pytest.mark.parametrize(
    ("world", "accumulation", "recompute", "offload", "shared"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.soak) for case in CASES],
)
def test_packed_gradients_are_those_of_each_row_alone(
    ranks, folder, reference, world, accumulation, recompute, offload, shared
):
    parallel = {"recompute": recompute, "cpu_offload": offload}
    recipe = Recipe(accumulation=accumulation, parallel=parallel, packed=shared)
    ours = ranks.run(world, packed, folder, ROWS, recipe)[0]
    assert_really_packed(ours)
    assert_same(ours, reference)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_of_every_family(ranks, model_zoo, family):
    folder = model_zoo.folder(family)
    ours = ranks.run(2, packed, folder, ROWS, Recipe(accumulation=2, parallel={"recompute": True}))[0]
    assert_same(ours, ranks.run(1, alone, folder, ROWS)[0])


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_documents_that_see_each_other_are_one_causal_text(ranks, folder, reference, world):
    """With ``data.cross_document_attention``; so it is the isolation that the other tests measure."""
    ours = ranks.run(world, packed, folder, ROWS, Recipe(), True)[0]
    wanted = ranks.run(1, alone, folder, ROWS, [list(pack) for pack in ours.packs])[0]
    assert_same(ours, wanted)
    assert abs(ours.loss - reference.loss) > 1e-4 * reference.loss
    assert largest_relative_difference(ours.gradients, reference.gradients) > 1e-2


def hidden_states(folder: Path, recipe: Recipe, lengths: list[int]) -> dict[str, list[np.ndarray]]:
    """[n, D] of each document after the last norm: in a pack, alone, and by plain transformers.

    Each rank has tokens of its own. Forwards are those of training, each with its backward.
    """
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from shardyard.data.batches import collate
    from shardyard.evaluate.forwards import forward_parts

    rng = np.random.default_rng(dist.get_rank())
    rows = [rng.integers(3, 199, length).tolist() for length in lengths]
    samples = samples_of([(ids, [*ids[1:], -100]) for ids in rows])
    built, step, _ = build_step(folder, recipe)
    kept: list[Any] = []
    built.model.model.norm.register_forward_hook(lambda module, args, output: kept.append(output.detach()))

    def states(numbers: list[int]) -> np.ndarray:
        batch = collate([samples[number] for number in numbers], numbers, 0)
        kept.clear()
        built.model(**forward_parts(batch, 1, device=step.device, packed=True)[0]).backward()
        (output,) = kept
        return output[0].numpy()

    pack = np.split(states(list(range(len(rows)))), np.cumsum(lengths)[:-1])
    single = [states([number]) for number in range(len(rows))]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        outputs = [plain(input_ids=torch.tensor([ids]), output_hidden_states=True) for ids in rows]
    return {"pack": pack, "alone": single, "plain": [out.hidden_states[-1][0].numpy() for out in outputs]}


HIDDEN = [("qwen3", 2, True)]
HIDDEN += [
    (family, world, recompute) for family in FAMILIES for world in (1, 2) for recompute in (False, True)
]


@pytest.mark.parametrize(
    ("family", "world", "recompute"),
    [
        pytest.param(*case, marks=() if case == HIDDEN[0] else pytest.mark.soak)
        for case in dict.fromkeys(HIDDEN)
    ],
)
def test_hidden_states_in_a_pack_are_those_of_the_document_alone(ranks, model_zoo, family, world, recompute):
    recipe = Recipe(parallel={"recompute": recompute})
    for states in ranks.run(world, hidden_states, model_zoo.folder(family), recipe, [7, 1, 30, 12]):
        for pack, single, plain in zip(states["pack"], states["alone"], states["plain"], strict=True):
            scale = np.abs(plain).max()
            assert np.abs(pack - single).max() <= TOLERANCE * scale
            assert np.abs(pack - plain).max() <= TOLERANCE * scale
