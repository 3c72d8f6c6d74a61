"""What a template gives: for each sample of a conversation its turns, as token ids."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Protocol

from shardyard.data.types import Conversation

THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
"""A thought inside a reply's text."""


class Turn(NamedTuple):
    """One reply and what stands before it; a sample is its turns end to end."""

    prompt: list[int]
    """Ids since the previous reply: given, not trained."""
    reply: list[int]
    """Ids of the reply and its terminator: trained."""


class Template(Protocol):
    """A conversation's text and ids, by the rules of one template."""

    name: str
    cut: Literal["each_turn", "end"]
    """How a sample longer than the cut-off is cut: every turn in proportion, or the end of the whole."""

    def encode(self, conversation: Conversation) -> list[list[Turn]]:
        """The samples of a conversation, each a list of turns; usually one sample.

        Raises:
            NotUsable: the conversation cannot be written, or its masks cannot be proven right.
        """
        ...


def common_prefix(first: str, second: str) -> str:
    """The longest text that both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return first[: min(len(first), len(second)) if length is None else length]


def without_thoughts(text: str) -> str:
    """The reply without its thoughts and the line ends that they leave in front."""
    return THOUGHT.sub("", text).lstrip("\n")
