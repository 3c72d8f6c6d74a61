"""No tensor of all tokens times all words exists in a step, and memory does not grow with their product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import write_tiny_model
from support.training import Recipe, build_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

WORDS, TOKENS, LABELLED, CHUNK = 200, 300, 90, 7


class Logits(TorchDispatchMode):
    """The most rows of any new tensor with one number per word (of this rank), and the largest tensor."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.rows, self.numel = words, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in _tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata in before:
                continue  # a view of what was there
            self.numel = max(self.numel, tensor.untyped_storage().nbytes() // 4)
            if tensor.ndim > 1 and tensor.shape[-1] == self.words:
                self.rows = max(self.rows, tensor.numel() // self.words)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return [v for v in tree_iter(values) if isinstance(v, torch.Tensor) and not isinstance(v, DTensor)]


def batch() -> list[tuple[list[int], list[int]]]:
    ids = [3 + i % 90 for i in range(TOKENS // 2)]
    return [(ids, [-100] * (len(ids) - LABELLED // 2) + ids[: LABELLED // 2])] * 2


def watched(folder: Path, recipe: Recipe) -> dict[int | None, list[tuple[int, int]]]:
    """Chunk size -> (rows of logits, largest tensor) of two training steps, and of a validation."""
    import torch.distributed as dist
    from support.training import micro_batches_of

    from shardyard.evaluate.forwards import forward_parts
    from shardyard.models import LossOptions
    from shardyard.models.head import heads_of

    built, step, meshes = build_step(folder, recipe)
    batches = micro_batches_of(batch(), recipe.accumulation, meshes.dp_rank, meshes.dp_size)
    words = WORDS // meshes.layout.tp
    found: dict[int | None, list[tuple[int, int]]] = {None: [], CHUNK: []}
    for chunk, seen_with in found.items():
        for head in heads_of(built.model):
            head.options = LossOptions(chunk=chunk)
        for number in (1, 2):
            with Logits(words) as seen:
                step(batches, step=number, lr=1e-2)
            seen_with.append((seen.rows, seen.numel))
        built.model.eval()
        with Logits(words) as seen, torch.no_grad():
            for one in batches:
                built.model(**forward_parts(one, 1, device=step.device, packed=True)[0])
        built.model.train()
        seen_with.append((seen.rows, seen.numel))
    dist.barrier()  # a stage that is done may have sent what another has yet to receive
    return found


CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "plain": (1, {}, 1),
    "recompute, accumulation": (1, {"recompute": True}, 2),
    "TP 2": (2, {"tp_size": 2}, 1),
    "FSDP 2": (2, {}, 1),
    "CP 2": (2, {"cp_size": 2, "cp_type": "ring"}, 1),
    "PP 2": (2, {"pp_size": 2}, 2),
}
QUICK = {"recompute, accumulation", "TP 2"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in CASES]
)
def test_no_tensor_holds_all_tokens_times_all_words(ranks, model_zoo, case):
    world, parallel, accumulation = CASES[case]
    results = ranks.run(world, watched, model_zoo.folder("parity_dense"), Recipe(accumulation, parallel))
    for chunk in (None, CHUNK):
        most = max(rows for result in results for rows, _ in result[chunk])
        assert most == CHUNK if chunk else 0 < most <= LABELLED  # so the watch does see logits
        largest = max(numel for result in results for _, numel in result[chunk])
        assert largest < TOKENS // accumulation * WORDS


def peak(folder: Path, chunk: int | None) -> int:
    """The most bytes alive in a step on one row, all of it trained."""
    from support.live_memory import LivePeak
    from support.training import micro_batches_of

    recipe = Recipe(parallel={"recompute": True}, optimization={"chunk_loss_size": chunk})
    _, step, _ = build_step(folder, recipe)
    ids = [3 + i % 90 for i in range(TOKENS)]
    batches = micro_batches_of([(ids, ids)], 1, 0, 1)
    step(batches, step=1, lr=1e-2)
    with LivePeak() as memory:
        step(batches, step=2, lr=1e-2)
    return memory.peak


def test_a_word_costs_its_weights_and_gradients_and_no_number_for_each_token(ranks, tmp_path):
    sizes = (1_000, 3_000)
    folders = [write_tiny_model(tmp_path / str(words), "qwen3", vocab_size=words) for words in sizes]
    grown = {}
    for chunk in (CHUNK, None):
        less, more = (ranks.run(1, peak, folder, chunk)[0] for folder in folders)
        grown[chunk] = (more - less) / (sizes[1] - sizes[0])
    hidden = 32
    # The head's gathered weight, its gradient, a copy of it on its way to the shard; the chunk's logits.
    assert grown[CHUNK] <= 4 * (4 * hidden + 2 * CHUNK)
    assert grown[None] >= 4 * TOKENS  # these fit the bound, and are one chunk
