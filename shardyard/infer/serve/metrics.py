"""Counters and histograms of the service, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shardyard.infer.types import Load

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of seconds up to each bound."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name, self.meaning, self._bounds = name, meaning, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total, self.count = 0.0, 0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds
        self.count += 1

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, "histogram", self.meaning)
        below = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{self.name}_bucket{{le="{shown}"}} {below}'
        yield f"{self.name}_sum {self.total:.6f}"
        yield f"{self.name}_count {self.count}"


class Metrics:
    """What the service counts itself; tokens and queues are the engine's `Load`."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By method, route and status."""
        self.cancelled = 0
        self.first_token = Histogram(
            "shardyard_time_to_first_token_seconds",
            "From a request's arrival to the first token of an answer.",
        )
        self.per_token = Histogram(
            "shardyard_time_per_output_token_seconds", "Between two tokens of an answer."
        )
        self.whole = Histogram("shardyard_request_seconds", "From a request's arrival to its answers' end.")

    def text(self, load: Load, *, is_up: bool, active: int) -> str:
        """One page; ``active``: answers under way or waiting."""
        lines = [
            *_single("shardyard_up", "gauge", "1 while requests are answered.", int(is_up)),
            *_labelled("shardyard_http_requests_total", "HTTP requests by route and status.", self.requests),
            *_single("shardyard_answers_active", "gauge", "Answers under way or waiting.", active),
            *_single("shardyard_answers_running", "gauge", "Answers that get tokens.", load.running),
            *_single("shardyard_answers_waiting", "gauge", "Answers that wait for a place.", load.waiting),
            *_single(
                "shardyard_answers_cancelled_total", "counter", "Answers nobody waited for.", self.cancelled
            ),
            *_single("shardyard_prompt_tokens_total", "counter", "Tokens of prompts.", load.prompt_tokens),
            *_single("shardyard_generation_tokens_total", "counter", "Tokens of answers.", load.new_tokens),
            *self.first_token.lines(),
            *self.per_token.lines(),
            *self.whole.lines(),
        ]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _single(name: str, kind: str, meaning: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, meaning)
    yield f"{name} {value}"


def _labelled(name: str, meaning: str, counts: Mapping[tuple[str, str, int], int]) -> Iterator[str]:
    yield from _head(name, "counter", meaning)
    for (method, route, code), count in sorted(counts.items()):
        yield f'{name}{{method="{method}",route="{route}",code="{code}"}} {count}'
