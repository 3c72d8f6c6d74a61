"""What travels in this room: how to sample, a request, and the events that answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

MAX_TOP_LOGPROBS = 20
_REAL = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How one answer's tokens are chosen. Raises ValueError, naming the field, for values that mean nothing.

    The steps are transformers' and in its order: penalties and bias, temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """transformers': scores of tokens of prompt and answer are divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """OpenAI's: subtracted from the scores of tokens of the answer, once, or once per occurrence."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None draws one; answers of one seed are equal whatever else is asked at the same time."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the last one is the answer's last token."""
    logprobs: bool = False
    """Whether events carry log-probabilities: the model's own, before penalties and temperature."""
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name in _REAL:  # JSON and YAML write 1.0 as 1, and transformers' steps refuse an int
            object.__setattr__(self, name, float(getattr(self, name)))
        ranges = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0.0 <= self.temperature <= 100.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": 0.0 < self.repetition_penalty <= 100.0,
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
            "seed": self.seed is None or -(2**63) <= self.seed < 2**64,
            "top_logprobs": 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
        }
        if wrong := [name for name, fits in ranges.items() if not fits]:
            raise ValueError(f"{wrong[0]}: {getattr(self, wrong[0])} is out of range")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Token:
    """The next token of an answer. ``top``: the likeliest tokens with log-probabilities, likeliest first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of a request: a stop token, ``max_new_tokens`` or the context's end, `Engine.cancel`, or
    a fault, of which ``error`` says more.
    """

    reason: Literal["stop", "length", "cancelled", "error"]
    error: str = ""


Event = Token | Finished
Deliver = Callable[[Event], None]
"""Called from the engine's thread, in order, and must not block; the last event is `Finished`."""


@dataclass(frozen=True)
class Load:
    """What an engine is doing: requests, and tokens since its start."""

    running: int
    waiting: int
    prompt_tokens: int
    new_tokens: int


class Engine(Protocol):
    """Turns requests into events, many at a time. Safe to call from any thread."""

    context_length: int
    """Most tokens of prompt and answer together."""

    @property
    def fault(self) -> str | None:
        """Why it has stopped for good, with all its requests; None while it works."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request; its id. Raises ValueError: an empty prompt, one that leaves no room for an answer,
        or an id outside the vocabulary. RuntimeError: the engine has stopped.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop soon, with ``Finished("cancelled")``; nothing if it has finished."""
        ...

    def load(self) -> Load: ...

    def close(self) -> None:
        """Cancel what runs, and give back threads and memory."""
        ...
