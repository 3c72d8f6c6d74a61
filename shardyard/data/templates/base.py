"""What a template gives: for each sample of a conversation its turns, as token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from shardyard.data.templates.tokens import Hidden, TextTokenizer
from shardyard.data.types import Conversation


class Turn(NamedTuple):
    """One reply and what stands before it; a sample is its turns end to end."""

    prompt: list[int]
    """Ids since the previous reply: given, not trained."""
    reply: list[int]
    """Ids of the reply and its terminator: trained, unless the row says otherwise."""
    trained: bool = True
    """False for a reply that the row gives as context only."""
    lost_thought: bool = False
    """The reply's thought is in the row but not in the text."""
    stop: int | None = None
    """The token that ends this reply where it belongs to the next turn, and there is none: the last reply's
    last token is trained to predict it, though it is not in the text."""
    context: int = 0
    """So many of the prompt's first ids are never trained: replies stand among them, and an earlier sample
    has trained what is to be trained of them."""


class SampleWriter:
    """Texts -> turns: cuts each reply out of the ids of the whole text up to its end.

    Replies whose texts, and ids, extend one another share a sample; one that does not (the template rewrites
    earlier turns, or a token spans the joint) begins a new sample, with all that stands before it as prompt.
    """

    def __init__(self, tokens: TextTokenizer, hidden: Hidden) -> None:
        self._tokens = tokens
        self._hidden = hidden
        self.samples: list[list[Turn]] = []
        self._text = ""
        self._ids: list[int] = []

    def add(
        self,
        before: str,
        through: str,
        *,
        trained: bool = True,
        lost_thought: bool = False,
        context: Callable[[], str] = str,
    ) -> None:
        """The reply that ``through`` adds to ``before``; ``context`` gives what of ``before`` ends with the
        previous reply, and is asked if a new sample begins. Raises NotUsable if no token begins there.
        """
        through_ids = self._tokens.ids(through, self._hidden)
        start = self._tokens.boundary(before, through, through_ids, self._hidden)
        shared = len(self._ids)
        extends = through.startswith(self._text) and through_ids[:shared] == self._ids and shared <= start
        num_context = 0
        if not self.samples or not extends:
            self.samples.append([])
            shared = 0
            num_context = self._tokens.num_shared(context(), through_ids[:start], self._hidden)
        turn = Turn(through_ids[shared:start], through_ids[start:], trained, lost_thought)
        turn = turn._replace(context=num_context)
        self.samples[-1].append(turn)
        self._text, self._ids = through, through_ids


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


def find_thought(
    text: str, marks: tuple[str, str] = ("<think>", "</think>"), start: int = 0
) -> tuple[int, int] | None:
    """Where the first thought inside a reply's text begins and ends, marks included, from ``start`` on."""
    begin = text.find(marks[0], start)
    end = text.find(marks[1], begin + len(marks[0])) if begin >= 0 else -1
    return (begin, end + len(marks[1])) if end >= 0 else None


def without_thoughts(text: str, marks: tuple[str, str] = ("<think>", "</think>")) -> str:
    """The reply without its thoughts and the line ends that they leave in front."""
    kept, start = [], 0
    while thought := find_thought(text, marks, start):
        kept.append(text[start : thought[0]])
        start = thought[1]
    return "".join([*kept, text[start:]]).lstrip("\n")
