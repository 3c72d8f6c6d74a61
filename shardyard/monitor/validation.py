"""A validation in numbers, its log lines and its object in ``metrics.jsonl``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardyard.monitor.record import scientific

ALL_SETS = "all"
"""The name of the total over the sets in ``metrics.jsonl``."""


@dataclass(frozen=True)
class EvalScore:
    """Sums over a whole set and all ranks: what they say does not depend on batches and ranks.

    ``loss_sum`` is the cross entropy (nats) summed over ``labelled`` tokens; ``tokens`` are all tokens read;
    ``seconds`` is the time of global rank 0.
    """

    loss_sum: float
    labelled: int
    tokens: int
    seconds: float

    @property
    def loss(self) -> float:
        """Nats per labelled token; NaN when a loss was NaN."""
        return self.loss_sum / self.labelled

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond the largest float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class EvalResult:
    """The scores of the sets, in the order of the run's sets."""

    sets: dict[str, EvalScore]

    @property
    def total(self) -> EvalScore:
        """All sets as one: a large set weighs more than a small one, by its labelled tokens."""
        scores = self.sets.values()
        return EvalScore(
            sum(score.loss_sum for score in scores),
            sum(score.labelled for score in scores),
            sum(score.tokens for score in scores),
            sum(score.seconds for score in scores),
        )


def format_validation(step: int, result: EvalResult) -> list[str]:
    """One line a set and, with several sets, one of their total."""
    scores = dict(result.sets)
    lines = [_format(step, f"set {name}", score) for name, score in scores.items()]
    return lines if len(lines) == 1 else [*lines, _format(step, "all sets", result.total)]


def _format(step: int, what: str, score: EvalScore) -> str:
    return (
        f" validation at step {step} | {what} | lm loss: {scientific(score.loss)} |"
        f" ppl: {_short(score.perplexity)} | tokens: {score.tokens} | {score.seconds:.1f} s |"
    )


def _short(perplexity: float) -> str:
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.3e}"


def validation_metrics(step: int, result: EvalResult) -> dict[str, Any]:
    """The object written for a validation after ``step`` updates, losses per labelled token, seconds."""
    scores = {**result.sets, ALL_SETS: result.total}
    return {
        "step": step,
        "eval": {
            name: {
                "loss": score.loss,
                "ppl": score.perplexity,
                "tokens": score.tokens,
                "labelled": score.labelled,
                "seconds": score.seconds,
            }
            for name, score in scores.items()
        },
    }
