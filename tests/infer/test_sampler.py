"""The choice of a token, against loops written out with plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardyard.infer.sampler import NotFiniteError, Row, choose_all
from shardyard.infer.types import Request, Sampling

CPU = torch.device("cpu")


def logits_of(step: int, size: int = 23) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + step)) * 3


def run(sampling: Sampling, steps: int = 12, prompt: tuple[int, ...] = (4, 9)) -> list[Any]:
    row = Row(Request(prompt, sampling), CPU)
    return [choose_all([row], logits_of(step)[None])[0] for step in range(steps)]


def test_a_seed_draws_what_a_plain_loop_draws() -> None:
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, seed=11)
    generator = torch.Generator().manual_seed(11)
    expected = []
    for step in range(12):
        scores = logits_of(step) / 0.7
        scores[scores < scores.topk(9).values[-1]] = -math.inf
        order = scores.argsort(descending=True)
        before = scores[order].softmax(0).cumsum(0) - scores[order].softmax(0)
        scores[order[before >= 0.8]] = -math.inf
        chances = scores.softmax(0)
        scores[chances < 0.05 * chances.max()] = -math.inf
        expected.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    assert [token.id for token in run(sampling)] == expected


def test_an_answer_does_not_depend_on_what_shares_its_batch() -> None:
    sampling = Sampling(temperature=1.3, seed=5)
    alone = [token.id for token in run(sampling)]
    row, other = Row(Request((4, 9), sampling), CPU), Row(Request((1,), Sampling(temperature=2.0)), CPU)
    together = [
        choose_all([other, row], torch.stack([logits_of(step + 50), logits_of(step)]))[1].id
        for step in range(12)
    ]
    assert together == alone
    assert [token.id for token in run(Sampling(temperature=1.3, seed=6))] != alone


def test_penalties_and_bias_are_those_of_the_formulas() -> None:
    sampling = Sampling(
        repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={2: 1.25, 9: -7.0}
    )
    expected: list[int] = []
    for step in range(12):
        scores = logits_of(step)
        for token in {4, 9, *expected}:
            scores[token] = scores[token] / 1.5 if scores[token] > 0 else scores[token] * 1.5
        for token in set(expected):
            scores[token] -= 0.4 + 0.3 * expected.count(token)
        scores[2] += 1.25
        scores[9] -= 7.0
        expected.append(int(scores.argmax()))
    assert [token.id for token in run(sampling)] == expected


def test_log_probabilities_are_the_models_own() -> None:
    sampling = Sampling(temperature=0.3, seed=1, logprobs=True, top_logprobs=3, logit_bias={0: 50.0})
    for step, token in enumerate(run(sampling)):
        logits = logits_of(step).double()
        total = math.log(sum(math.exp(float(value)) for value in logits))
        assert token.id == 0 and token.logprob == pytest.approx(float(logits[0]) - total, abs=1e-5)
        best = sorted(range(len(logits)), key=lambda index: -float(logits[index]))[:3]
        assert [name for name, _ in token.top] == best
        expected = [float(logits[index]) - total for index in best]
        assert [value for _, value in token.top] == pytest.approx(expected, abs=1e-5)


def test_half_precision_scores_are_compared_in_fp32() -> None:
    row = Row(Request((1,), Sampling(logprobs=True)), CPU)
    (token,) = choose_all([row], logits_of(0)[None].to(torch.bfloat16))
    expected = torch.log_softmax(logits_of(0).to(torch.bfloat16).float(), 0)
    assert token.logprob == pytest.approx(float(expected.max()), abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(presence_penalty=1.0)])
def test_nan_is_no_token_and_is_that_rows_fault_alone(sampling: Sampling) -> None:
    rows = [Row(Request((1,), sampling), CPU), Row(Request((1,), Sampling()), CPU)]
    scores = torch.stack([logits_of(0), logits_of(1)])
    scores[0, 7] = math.nan
    first, second = choose_all(rows, scores)
    assert isinstance(first, NotFiniteError)
    assert second.id == int(logits_of(1).argmax())  # type: ignore[union-attr]


def test_whole_numbers_mean_the_same_as_real_ones() -> None:
    whole: dict[str, Any] = {
        "temperature": 2, "top_p": 1, "min_p": 0, "repetition_penalty": 3, "presence_penalty": 1,
        "frequency_penalty": -1,
    }  # fmt: skip
    real: dict[str, Any] = {name: float(value) for name, value in whole.items()}
    assert run(Sampling(seed=4, **whole)) == run(Sampling(seed=4, **real))


@pytest.mark.parametrize(
    "narrow",
    [
        {"temperature": 1e-9}, {"temperature": 1e-40}, {"temperature": 5e-324}, {"top_p": 1e-9},
        {"min_p": 1.0}, {"top_k": 1},
    ],
    ids=str,
)  # fmt: skip
def test_the_narrowest_sampling_draws_the_likeliest(narrow: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 8, **narrow})
    assert [token.id for token in run(sampling)] == [int(logits_of(step).argmax()) for step in range(12)]


def test_scores_that_a_penalty_makes_infinite_are_that_rows_fault_alone() -> None:
    absurd = Sampling(temperature=1.0, repetition_penalty=1e-40)
    rows = [Row(Request((3,), absurd), CPU), Row(Request((1,), Sampling()), CPU)]
    scores = torch.stack([logits_of(0).abs() + 1, logits_of(1)])
    first, second = choose_all(rows, scores)
    assert isinstance(first, NotFiniteError)
    assert second.id == int(logits_of(1).argmax())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"presence_penalty": 2.5},
        {"frequency_penalty": -3.0}, {"top_logprobs": 21}, {"seed": 2**64}, {"seed": -(2**63) - 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_the_last_token_says_why_an_answer_ends() -> None:
    row = Row(Request((1,), Sampling(max_new_tokens=2, stop_ids=frozenset({5}))), CPU)
    assert row.finished is None
    row.answer.append(3)
    assert row.finished is None
    row.answer.append(5)
    assert row.finished is not None and row.finished.reason == "stop"
    row.answer[-1] = 6
    assert row.finished is not None and row.finished.reason == "length"
