"""Byte-level BPE with a memory of pieces: the ids of the tokenizers library, several times as fast.

A byte-level BPE tokenizer (GPT-2's kind: Qwen, for one) cuts text by one regular expression, and what becomes
of a piece depends on the piece alone. So the cutting is done here, and the library is asked once for each
piece. Where the result could differ the text is left to the library: text with an added token in it, text
that its normalizer would change, and characters for which the two regular expression engines have not been
seen to agree.
"""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import chain
from typing import Any

MOST_PIECES = 1 << 17
"""Pieces that are remembered, some 30 MiB; the first ones, since common words come early."""

_ASCII = "".join(map(chr, range(128)))

_BLOCK = 64
"""Characters that are tried at a time."""

_TRIED = (
    (0x0000, 0x1000),  # the alphabets of Europe, the Near East and India
    (0x1E00, 0x2C00),  # more Latin and Greek, punctuation, currency, arrows, mathematics, shapes
    (0x3000, 0x3400),  # CJK punctuation, kana
    (0x4E00, 0xA000),  # Chinese characters
    (0xAC00, 0xD7C0),  # Hangul
    (0xFE00, 0xFE40),  # variation selectors
    (0xFF00, 0x10000),  # wide forms, the replacement character
    (0x1F300, 0x1FB00),  # emoji
)
"""Ranges of characters that are tried; each begins and ends with a block."""


class PieceEncoder:
    """Encodes texts by their pieces; ``PieceEncoder.of`` says for which tokenizers there is one."""

    def __init__(self, backend: Any, pattern: Any, *, is_nfc: bool) -> None:
        from tokenizers.pre_tokenizers import ByteLevel

        self._find = pattern.findall
        self._is_nfc = is_nfc
        self._ids = _Memory(backend.model, ByteLevel(add_prefix_space=False, use_regex=False))
        added = sorted(
            (token.content for token in backend.get_added_tokens_decoder().values()), key=len, reverse=True
        )
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._strange = re.compile("")
        self._strange = _strange_characters(self, backend)
        self._ids.clear()  # of what was tried

    @classmethod
    def of(cls, backend: Any) -> PieceEncoder | None:
        """The encoder of a tokenizer's library object, None if it is of another kind."""
        import regex

        # Part by part: the whole would be parsed with its vocabulary and merges.
        steps = (_state(backend.pre_tokenizer) or {}).get("pretokenizers") or []
        normalizer = _state(backend.normalizer)
        if (
            not _is_byte_level(steps, normalizer, backend.model)
            or backend.encode("a").ids != _plain(backend, ["a"])[0]
        ):
            return None
        try:
            pattern = regex.compile(steps[0]["pattern"]["Regex"])
        except regex.error:
            return None
        if pattern.groups:
            return None
        encoder = cls(backend, pattern, is_nfc=normalizer is not None)
        return None if encoder._strange.search(_ASCII) else encoder

    def takes(self, text: str) -> bool:
        """Whether the ids of this text are sure to be the library's."""
        if not text.isascii():
            if self._strange.search(text):
                return False
            if self._is_nfc and not unicodedata.is_normalized("NFC", text):
                return False
        return self._added.search(text) is None

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text that it takes; None if the expression leaves some of it out."""
        pieces = self._find(text)
        if sum(map(len, pieces)) != len(text):
            return None
        return list(chain.from_iterable(map(self._ids.__getitem__, pieces)))


class _Memory(dict[str, tuple[int, ...]]):
    """The ids of pieces."""

    def __init__(self, model: Any, to_letters: Any) -> None:
        super().__init__()
        self._model = model
        self._to_letters = to_letters

    def __missing__(self, piece: str) -> tuple[int, ...]:
        letters = self._to_letters.pre_tokenize_str(piece)
        ids = tuple(token.id for word, _ in letters for token in self._model.tokenize(word))
        if len(self) < MOST_PIECES:
            self[piece] = ids
        return ids


def _state(part: Any) -> dict[str, Any] | None:
    """What tokenizer.json says of a part."""
    return None if part is None else json.loads(part.__getstate__())


def _is_byte_level(steps: list[dict[str, Any]], normalizer: dict[str, Any] | None, model: Any) -> bool:
    """Whether these are one expression, bytes as letters, and BPE without chance."""
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        "Regex" in split["pattern"]
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not byte_level["add_prefix_space"]
        and not byte_level["use_regex"]
        and type(model).__name__ == "BPE"
        and not model.dropout
        and (normalizer is None or normalizer == {"type": "NFC"})
    )


def _strange_characters(encoder: PieceEncoder, backend: Any) -> re.Pattern[str]:
    """An expression for the characters that were not tried, or that came out otherwise.

    Each is tried where the expressions of known tokenizers decide by the kind of a character: behind and
    before letters, digits, spaces, line ends and apostrophes. And each kind that the expression names must
    hold the same characters in both engines.
    """
    blocks = [range(begin, begin + _BLOCK) for low, high in _TRIED for begin in range(low, high, _BLOCK)]
    texts = ["".join(map(_tried, map(chr, block))) for block in blocks]
    if encoder._is_nfc:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    kinds = _kinds(backend)
    safe = []
    for block, text, ids in zip(blocks, texts, _plain(backend, texts), strict=True):
        if encoder.encode(text) == ids and all(kind.agrees("".join(map(chr, block))) for kind in kinds):
            safe.append(f"{re.escape(chr(block.start))}-{re.escape(chr(block.stop - 1))}")
    return re.compile(f"[^{''.join(safe)}]" if safe else r"[\s\S]")


_ATOM = re.compile(r"\\[pP]\{\^?\w+\}|\\[pP]\w|\\[sSdDwW]")
"""The kinds of characters that an expression may name."""


class _Kind:
    """One kind of characters, such as letters, in both engines: their tables may be of different years."""

    def __init__(self, atom: str) -> None:
        import regex
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import Split

        self._ours = regex.compile(atom)
        self._theirs = Split(Regex(atom), "removed")

    def agrees(self, characters: str) -> bool:
        """Whether both leave the same of these characters when all of the kind are taken out."""
        rest = "".join(piece for piece, _ in self._theirs.pre_tokenize_str(characters))
        return self._ours.sub("", characters) == rest


def _kinds(backend: Any) -> list[_Kind]:
    """The kinds that the tokenizer's expression names."""
    steps = (_state(backend.pre_tokenizer) or {})["pretokenizers"]
    return [_Kind(atom) for atom in sorted(set(_ATOM.findall(steps[0]["pattern"]["Regex"])))]


def _tried(character: str) -> str:
    if character >= "\u3400":  # one kind each: Chinese characters, Hangul, wide forms, emoji
        return f"a{character}1 {character}'s {character}."
    return (
        f"a{character}b '{character} {character}1{character}{character}\n{character}.{character} "
        f"{character}'s {character}'S1'{character}s "
    )


def _plain(backend: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
