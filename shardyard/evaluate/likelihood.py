"""How likely a model finds a continuation of a context.

A pair's score is the sum of the log-probabilities of the continuation's tokens after the context, and whether
greedy decoding would have written it. It is the same alone, in any company and on any number of ranks.

Legend: T tokens of a forward, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardyard.data.batches import collate
from shardyard.data.cut import Cut
from shardyard.data.order import Units
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.device import ProcessGroup
from shardyard.evaluate.forwards import forward_parts
from shardyard.evaluate.untouched import untouched
from shardyard.models.head import scoring

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of the context, at least one where there is a continuation, and ids of the continuation."""
Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether each token was the likeliest; (0.0, True) of no tokens."""

TOKENS_OF_A_FORWARD = 4096
_LOGITS_OF_A_FORWARD = 2**27
"""Numbers: rows of logits times words, in a forward of transformers' own model."""
_SLICE = 4096
"""Pairs whose scores are exchanged at a time."""
_FILLER_TOKEN = 0


def log_likelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    group: ProcessGroup | None = None,
    packed: bool = True,
    max_tokens: int = TOKENS_OF_A_FORWARD,
    tell: Callable[[int], None] | None = None,
) -> list[Score]:
    """The scores of ``pairs``, in their order.

    ``model`` is the trainable one, in any layout, with the ``group`` of all its ranks: each calls this with
    the same pairs, takes its share, and gets all scores; pairs lie end to end, at most ``max_tokens`` in a
    forward, or with ``packed`` false have a forward each. Or it is transformers' own, whose ranks, if several
    share it, compute the same. A pair of more tokens has a forward of its own. Training goes on untouched.
    ``tell`` is called with the number of pairs done.

    Raises:
        ValueError: a continuation without a context.
    """
    if wrong := [number for number, (context, more) in enumerate(pairs) if len(more) and not len(context)]:
        raise ValueError(f"pair {wrong[0]}: a continuation needs at least one token before it")
    todo = [number for number, (_, more) in enumerate(pairs) if len(more)]
    todo.sort(key=lambda number: -sum(map(len, pairs[number])))
    scores: list[Score] = [(0.0, True)] * len(pairs)
    for start in range(0, len(todo), _SLICE):
        now = todo[start : start + _SLICE]
        wanted = [pairs[number] for number in now]
        if hasattr(model, "placement"):
            assert group is not None, "a trainable model has ranks"
            found = _of_trainable(model, wanted, group, packed=packed, max_tokens=max_tokens)
        else:
            found = _of_plain(model, wanted, max_tokens)
        for number, score in zip(now, found, strict=True):
            scores[number] = score
        if tell is not None:
            tell(start + len(now) + len(pairs) - len(todo))
    return scores


def sample_of(pair: Pair) -> Sample:
    """The pair as a training sample whose labels are the continuation."""
    context, more = pair
    ids = np.array([*context, *more], np.int32)
    labels = ids[1:].copy()
    labels[: len(context) - 1] = IGNORE_INDEX
    return Sample(ids[:-1], labels, (len(labels),))


def _of_trainable(
    model: Any, pairs: Sequence[Pair], group: ProcessGroup, *, packed: bool, max_tokens: int
) -> list[Score]:
    meshes, device = model.placement.meshes, model.placement.device
    samples = [sample_of(pair) for pair in pairs]
    cut = Cut(1, max_tokens=max_tokens, alone=not packed)
    units = Units.singles(np.arange(len(samples), dtype=np.int64))
    mine = cut.share(
        units, lambda unit: samples[unit[0]].doc_lens, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size
    )
    batches = [[row for unit in batch for row in unit] for batch in mine]
    outputs: list[torch.Tensor] = []
    with untouched(model, device), scoring(model):
        for rows in batches:
            batch = collate([samples[row] for row in rows], rows, _FILLER_TOKEN)
            outputs += [model(**part) for part in forward_parts(batch, 1, device=device, packed=packed)]
    sums, greedy = np.zeros(len(samples)), np.zeros(len(samples))
    # Of the ranks that share a batch one tells its scores; earlier stages of a pipeline have none.
    if meshes.counts_loss and meshes.cp_rank == 0:
        for rows, output in zip(batches, outputs, strict=True):
            begin, numbers = 0, output.cpu().double()
            for row in rows:
                end = begin + len(samples[row].labels)
                at = numbers[max(begin, end - len(pairs[row][1])) : end]
                sums[row], greedy[row] = float(at[:, 0].sum()), float(at[:, 1].min())
                begin = end
    told = group.gather([*sums, *greedy]).sum(0).tolist()
    return [(told[row], told[len(samples) + row] > 0.5) for row in range(len(samples))]


def _of_plain(model: Any, pairs: Sequence[Pair], max_tokens: int) -> list[Score]:
    """Padded on the right, where causal attention does not look; the longest first."""
    device = next(model.parameters()).device
    words = model.config.get_text_config().vocab_size
    scores: list[Score] = []
    with torch.no_grad():
        while len(scores) < len(pairs):
            batch = _next_batch(pairs, len(scores), max_tokens, words)
            scores += _scores_of_batch(model, batch, device)
    return scores


def _next_batch(pairs: Sequence[Pair], start: int, max_tokens: int, words: int) -> Sequence[Pair]:
    """Pairs from ``start`` that fit a forward; at least one."""
    longest = sum(map(len, pairs[start])) - 1
    end, first = start + 1, len(pairs[start][0]) - 1
    while end < len(pairs) and (end + 1 - start) * longest <= max_tokens:
        first = min(first, len(pairs[end][0]) - 1)
        if (end + 1 - start) * (longest - first) * words > _LOGITS_OF_A_FORWARD:
            break
        end += 1
    return pairs[start:end]


def _scores_of_batch(model: Any, batch: Sequence[Pair], device: torch.device) -> list[Score]:
    samples = [sample_of(pair) for pair in batch]
    longest = max(len(sample.input_ids) for sample in samples)
    ids = torch.full((len(batch), longest), _FILLER_TOKEN)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.from_numpy(sample.input_ids)
    first = min(len(context) - 1 for context, _ in batch)
    logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=longest - first).logits
    first = longest - logits.shape[1]  # a family may keep all
    scores = []
    for row, (context, more) in enumerate(batch):
        begin = len(context) - 1 - first
        own = logits[row, begin : begin + len(more)].float()
        targets = torch.tensor(list(more), device=device)
        picked = own.log_softmax(-1).gather(-1, targets[:, None]).double().sum()
        scores.append((float(picked), bool((own.argmax(-1) == targets).all())))
    return scores
