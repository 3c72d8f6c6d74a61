"""How many bytes of text a token stands for, also where a character is cut between tokens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardyard.data.eval_sets import CountedSamples
from shardyard.data.types import IGNORE_INDEX

_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def bytes_of_tokens(tokenizer: Any) -> np.ndarray:
    """int64 [V]: the UTF-8 bytes of each token of the tokenizer; 0 of special ones, which are no text.

    A byte-level token has a byte a letter, a fallback byte is one, a leading space counts. Tokens of other
    vocabularies are decoded one by one.
    """
    size = len(tokenizer)
    added = tokenizer.added_tokens_decoder
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    state = b"" if decoder is None else decoder.__getstate__()
    byte_level, spaced = b"ByteLevel" in state, decoder is None or _SPACE.encode() in state
    counts = np.zeros(size, np.int64)
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))):
        if number in added:
            counts[number] = 0 if added[number].special else len(added[number].content.encode())
        elif token is None:
            continue
        elif byte_level:
            counts[number] = len(token)
        elif spaced or b"ByteFallback" in state:
            is_byte = _FALLBACK.fullmatch(token) is not None
            counts[number] = 1 if is_byte else len(token.replace(_SPACE, " ").encode())
        else:
            counts[number] = len(tokenizer.decode([number]).encode())
    return counts


def labelled_bytes(samples: CountedSamples, of_tokens: np.ndarray) -> int:
    """The bytes that the labelled tokens of all samples stand for; ids beyond the tokenizer have none."""
    total = 0
    for index in range(len(samples)):
        labels = samples[index].labels
        labels = labels[(labels != IGNORE_INDEX) & (labels < len(of_tokens))]
        total += int(of_tokens[labels].sum())
    return total
