"""Log-likelihoods of continuations: alone, in company, over ranks and layouts, against a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.models import VOCAB_SIZE, write_tiny_model
from support.training import Recipe, build_step

from shardyard.ops.vocabulary import token_scores_

_RNG = np.random.default_rng(5)
PAIRS = [
    (_RNG.integers(3, VOCAB_SIZE, int(context)).tolist(), _RNG.integers(3, VOCAB_SIZE, int(more)).tolist())
    for context, more in [
        (1, 1),
        (7, 1),
        (3, 12),
        (40, 2),
        (1, 30),
        (12, 5),
        (9, 1),
        (2, 2),
        (25, 25),
        (5, 3),
    ]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def plain_loop(folder, pairs) -> list[tuple[float, bool]]:
    """Transformers alone, a pair at a time, every logit, sums in fp64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for context, more in pairs:
            logits = model(torch.tensor([[*context, *more]])).logits[0].double().log_softmax(-1)
            rows = logits[len(context) - 1 : -1]
            greedy = rows.argmax(-1).tolist() == list(more)
            scores.append((sum(rows[t, word].item() for t, word in enumerate(more)), greedy))
    return scores


def with_greedy(folder, pairs) -> list[Any]:
    """And pairs whose continuation is what the model would write."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = []
    for context, _ in pairs[:3]:
        ids = list(context)
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        made += [(context, ids[len(context) :]), (context, [*ids[len(context) : -1], ids[-1] ^ 1])]
    return [*pairs, *made]


@pytest.fixture(scope="module")
def pairs(folder):
    return with_greedy(folder, PAIRS)


@pytest.fixture(scope="module")
def wanted(folder, pairs):
    return plain_loop(folder, pairs)


def check(found, wanted) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-5)


def scores_by_budget(folder, pairs, budgets: tuple[int, ...], recipe: Recipe) -> list[Any]:
    from shardyard.evaluate.likelihood import log_likelihoods

    built, step, _ = build_step(folder, recipe)
    packed = built.unpacked is None if recipe.packed is None else recipe.packed
    return [
        log_likelihoods(built.model, pairs, group=step.group, packed=packed, max_tokens=budget)
        for budget in budgets
    ]


def test_alone_and_in_company_they_are_those_of_a_plain_loop(ranks, folder, pairs, wanted):
    assert {greedy for _, greedy in wanted} == {True, False}
    (results,) = ranks.run(1, scores_by_budget, folder, pairs, (1, 64, 10_000), Recipe())
    for found in results:
        check(found, wanted)
    (alone,) = ranks.run(1, scores_by_budget, folder, pairs, (64,), Recipe(packed=False))
    check(alone[0], wanted)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {}),
        (3, {}),
        (2, {"cp_size": 2}),
        (2, {"cp_size": 2, "cp_type": "ring"}),
        (2, {"tp_size": 2}),
        (2, {"pp_size": 2}),
        pytest.param(4, {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.soak),
        pytest.param(4, {"cp_size": 2, "fsdp_size": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_every_split_over_ranks_gives_the_same(ranks, tmp_path, pairs, world, parallel):
    folder = write_tiny_model(tmp_path / "m", "parity_dense")
    wanted = plain_loop(folder, pairs)
    for found in ranks.run(world, scores_by_budget, folder, pairs, (96,), Recipe(parallel=parallel)):
        check(found[0], wanted)


def test_experts_on_two_ranks_score_the_same(ranks, tmp_path, pairs):
    folder = write_tiny_model(tmp_path / "m", "qwen3_moe")
    wanted = plain_loop(folder, pairs)
    recipe = Recipe(parallel={"ep_size": 2})
    for found in ranks.run(2, scores_by_budget, folder, pairs, (96,), recipe):
        check(found[0], wanted)


def plain_scores(folder, pairs, max_tokens: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from shardyard.evaluate.likelihood import log_likelihoods

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return log_likelihoods(model, pairs, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 100, 10_000])
def test_a_model_of_transformers_scores_them_in_padded_batches(folder, pairs, wanted, max_tokens):
    check(plain_scores(folder, pairs, max_tokens), wanted)


def test_no_continuation_is_certain_and_no_context_is_a_fault(folder):
    assert plain_scores(folder, [([5], []), ([], [])], 100) == [(0.0, True), (0.0, True)]
    with pytest.raises(ValueError, match="pair 1: a continuation needs at least one token before it"):
        plain_scores(folder, [([5], [6]), ([], [6])], 100)


def test_of_equally_likely_words_the_first_is_the_likeliest():
    import torch

    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    scores = token_scores_(logits, torch.tensor([0, 1, -100]), None)
    p = float(-np.log(2 + np.exp(-1.0)))
    assert scores.tolist() == [[pytest.approx(p), 1.0], [pytest.approx(p), 0.0], [0.0, 0.0]]
