"""What somebody asks of the sampling, laid over what the model's own files say. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardyard.errors import UserError
from shardyard.infer.types import MAX_TOP_LOGPROBS, Sampling

_NARROWING = ("top_p", "top_k", "min_p")
_OF_SAMPLING = (
    "max_new_tokens", *_NARROWING, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is wanted of an answer; None leaves a setting to the layer below, and at last to the model."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    """Texts that end the answer and are cut off."""
    logprobs: int | None = None
    """0: those of the chosen tokens; more: also of so many likeliest ones."""
    num_beams: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Asked:
        """Those of ``values`` that this class knows; the others are left alone."""
        known = {item.name for item in fields(cls)}
        found = {name: value for name, value in values.items() if name in known and value is not None}
        if isinstance(found.get("stop"), str | list):
            stop = found["stop"]
            found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(**found)

    def over(self, lower: Asked) -> Asked:
        """This layer's settings, and those of ``lower`` where it has none.

        A layer that says how to sample decides about sampling: ``temperature`` of the upper one turns a
        greedy lower one over, unless the upper one says ``do_sample``.
        """
        merged = {
            item.name: mine if (mine := getattr(self, item.name)) is not None else getattr(lower, item.name)
            for item in fields(self)
        }
        if self.samples is not None:
            merged["do_sample"] = self.samples
        return Asked(**merged)

    @property
    def samples(self) -> bool | None:
        """Whether this layer asks for drawn tokens; None where it does not say."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature != 0  # one below is refused later
        return True if any(getattr(self, name) is not None for name in _NARROWING) else None

    def sampling(self, defaults: Sampling, stop_ids: frozenset[int] = frozenset()) -> Sampling:
        """The engine's form, over the model's own ``defaults``.

        Raises:
            ValueError: a value out of its range, or settings that contradict; the message names them.
        """
        samples = not defaults.is_greedy if self.samples is None else self.samples
        if self.num_beams is not None and self.num_beams < 1:
            raise ValueError(f"num_beams: {self.num_beams} is out of range")
        changes = {name: value for name in _OF_SAMPLING if (value := getattr(self, name)) is not None}
        changes["temperature"] = self._temperature(defaults) if samples else 0.0
        if not samples:  # of no effect then, also where the model's files name them
            changes |= {name: getattr(Sampling(), name) for name in _NARROWING}
        if self.logprobs is not None:
            if not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
                raise ValueError(f"logprobs: {self.logprobs} is out of range (0 to {MAX_TOP_LOGPROBS})")
            changes |= {"logprobs": True, "top_logprobs": self.logprobs}
        return replace(defaults, stop_ids=defaults.stop_ids | stop_ids, **changes)

    def _temperature(self, defaults: Sampling) -> float:
        if self.temperature is None:
            return defaults.temperature or 1.0
        if self.temperature == 0.0:
            raise ValueError("temperature: 0 takes the likeliest token, which contradicts do_sample")
        return self.temperature


def sampling_of(
    asked: Asked, section: Mapping[str, Any] | None, defaults: Sampling, stop_ids: frozenset[int]
) -> tuple[Asked, Sampling]:
    """What holds for an answer: the user's words, over the YAML's ``inference:`` section, over the model's.

    Raises:
        UserError: a value out of its range, or settings that contradict.
    """
    merged = asked.over(Asked.of(section or {}))
    try:
        return merged, merged.sampling(defaults, stop_ids)
    except ValueError as error:
        raise UserError(f"sampling: {error}") from error
