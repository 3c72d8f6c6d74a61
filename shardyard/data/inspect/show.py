"""A sample for the eye: its text, special tokens and all, with the trained part marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardyard.data.inspect.view import LEFT_OUT, View
from shardyard.data.report import Decoder, stretches, trained_tokens
from shardyard.data.types import IGNORE_INDEX, Sample

_DOCUMENT_ENDS = "---- a document ends here ----"

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which could change what a terminal shows, marks that turn text round, and halves of
surrogate pairs, which cannot be printed; line ends and tabs stay.
"""


@dataclass(frozen=True)
class Style:
    """How marks are written: in a terminal's colours, or as plain text."""

    colour: bool

    def trained(self, text: str) -> str:
        """A trained stretch: green, or between ``[[`` and ``]]``."""
        return self._paint(text, "1;32") if self.colour else f"[[{text}]]"

    def heading(self, text: str) -> str:
        return self._paint(text, "1") if self.colour else text

    def boundary(self, text: str) -> str:
        return self._paint(text, "36") if self.colour else text

    def _paint(self, text: str, code: str) -> str:
        # Each line by itself: a pager forgets the colour at a line's end.
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def show(
    view: View, number: int, tokenizer: Decoder, style: Style, *, max_tokens: int, ids: bool = False
) -> Iterator[str]:
    """The lines of one sample: what it is, then its first ``max_tokens`` tokens as text.

    Where a document ends inside it, a line says so. With ``ids`` each token follows on a line of its own:
    position, id, target and text.
    """
    sample = view.samples[number]
    yield style.heading(_head(view, number, sample))
    input_ids, trained = sample.input_ids[:max_tokens], trained_tokens(sample.labels)[:max_tokens]
    ends = view.document_ends(number)
    bounds = [0, *ends[ends < len(input_ids)].tolist(), len(input_ids)]
    for begin, end in pairwise(bounds):
        if begin:
            yield style.boundary(_DOCUMENT_ENDS)
        pieces = stretches(input_ids[begin:end], trained[begin:end], tokenizer)
        text = "".join(
            style.trained(visible(text)) if is_trained else visible(text) for text, is_trained in pieces
        )
        yield from text.split("\n")
    if len(input_ids) < len(sample.input_ids):
        yield f"... ({len(sample.input_ids) - len(input_ids)} more tokens; --max-tokens shows more)"
    if ids:
        yield from _token_lines(sample, max_tokens, tokenizer)


def visible(text: str) -> str:
    """The text with its control characters written out, such as ``\\x1b``."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def _head(view: View, number: int, sample: Sample) -> str:
    tokens, trained = len(sample.input_ids), int(np.count_nonzero(sample.labels != IGNORE_INDEX))
    place = view.place_of(number)
    parts = [f"sample {number}", visible(view.source_of(number).name)]
    if place is not None:
        parts.append(visible(place))
    parts.append(f"{tokens} tokens, {trained} trained ({100 * trained / max(tokens, 1):.1f} %)")
    flags = view.flags_of(number)
    parts += [words for flag, words in LEFT_OUT.items() if flags & flag]
    if number in view.held_out:
        parts.append("kept for validation")
    return " | ".join(parts)


def _token_lines(sample: Sample, max_tokens: int, tokenizer: Decoder) -> Iterator[str]:
    yield "position       id   target  text"
    for place in range(min(len(sample.input_ids), max_tokens)):
        token, label = int(sample.input_ids[place]), int(sample.labels[place])
        target = "-" if label == IGNORE_INDEX else str(label)
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        yield f"{place:>8} {token:>8} {target:>8}  {visible(repr(text))}"
