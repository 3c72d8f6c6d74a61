"""What one client may ask of the service. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 512
MAX_BIASED_TOKENS = 1024
MAX_CHOICES = 128
MAX_JSON_DEPTH = 100
BODY_SECONDS = 30.0
"""How long the body of a request may take to arrive."""


@dataclass(frozen=True)
class Limits:
    """The bounds that an operator sets. ``max_prompt_tokens`` and ``max_new_tokens``: None leaves the length
    of the context as the only one.
    """

    max_running: int = 32
    max_waiting: int = 128
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    request_timeout: float = 600.0
    """Seconds from a request's arrival to its last byte."""

    @property
    def max_answers(self) -> int:
        """Most answers under way or waiting, of all requests together."""
        return self.max_running + self.max_waiting
