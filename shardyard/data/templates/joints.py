"""The ids of a text from those of its stretches between special tokens, each tokenised once.

A template is rendered up to each reply and through it, so the same stretches come again and again. A fast
tokenizer takes special tokens out of a text before all else, and what stands between them has the ids that it
has alone. That holds for a token if its neighbours are nothing to it (no stripping, no overlap with another)
and if the model does not treat a text's beginning in a way of its own, which a few probes show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_PROBES = (("a b\n", "\n c"), (" x ", " y "), ("中", "é."), ("1", "2"))
"""What stands before and behind a token when it is tried."""

_MOST_CHARACTERS = 2**20
"""Of the stretches that are remembered: those of a few conversations."""


class Joints:
    """``whole`` gives the ids of a text; ``ids`` gives the same with fewer of its characters tokenised."""

    def __init__(self, tokenizer: Any, whole: Callable[[str], list[int]]) -> None:
        self._tokenizer = tokenizer
        self._whole = whole
        added = list(tokenizer.added_tokens_decoder.values()) if tokenizer.is_fast else []
        self._contents = [token.content for token in added]
        plain = [token.content for token in added if token.special and _is_plain(token)]
        names = "|".join(map(re.escape, sorted(plain, key=len, reverse=True)))
        self._pattern = re.compile(f"({names})" if names else r"((?!))")
        self._id_of: dict[str, int | None] = {}
        self._known: dict[str, list[int]] = {}
        self._characters = 0

    def ids(self, text: str) -> list[int]:
        """The ids of ``text``."""
        ids: list[int] = []
        for number, piece in enumerate(self._pattern.split(text)):
            if number % 2 == 0:
                ids += self._stretch(piece) if piece else []
                continue
            token_id = self._joint(piece)
            if token_id is None:
                return self._whole(text)
            ids.append(token_id)
        return ids

    def _stretch(self, text: str) -> list[int]:
        if text not in self._known:
            self._characters += len(text)
            if self._characters > _MOST_CHARACTERS:
                self._known, self._characters = {}, len(text)
            self._known[text] = self._whole(text)
        return self._known[text]

    def _joint(self, token: str) -> int | None:
        """The token's id; None if texts may not be cut at it."""
        if token not in self._id_of:
            token_id = int(self._tokenizer.convert_tokens_to_ids(token))
            overlaps = any(_overlap(token, other) for other in self._contents if other != token)
            parts_texts = all(
                self._whole(before + token + after) == [*self._whole(before), token_id, *self._whole(after)]
                for before, after in _PROBES
            )
            self._id_of[token] = token_id if parts_texts and not overlaps else None
        return self._id_of[token]


def _is_plain(token: Any) -> bool:
    """Whether a token is found wherever it stands, and takes no white space with it."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)


def _overlap(token: str, other: str) -> bool:
    """Whether a text may hold both in a way that only one of them is found."""
    if token in other or other in token:
        return True
    lengths = range(1, min(len(token), len(other)))
    return any(token.startswith(other[-n:]) or other.startswith(token[-n:]) for n in lengths)
