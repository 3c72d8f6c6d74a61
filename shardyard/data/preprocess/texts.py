"""Documents -> token ids, by the quickest way that gives the tokenizer's own ids."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from shardyard.data.indexed import dtype_for
from shardyard.data.preprocess.batches import Batch, Input
from shardyard.data.preprocess.outcome import Outcome
from shardyard.data.preprocess.pieces import PieceEncoder
from shardyard.data.sources import BadRow
from shardyard.errors import UserError

EMPTY_DOCUMENT = "empty document"
INVALID_UNICODE = "text that is not valid Unicode (half of a surrogate pair)"
ENDED_ALREADY = "documents that ended with the end-of-document token already"

_PROBES = (
    "The quick brown fox, 1234.5 times.",
    "  two  spaces\n\n\tand a tab \r\n",
    "Ünïcødé, 中文，日本語のテキスト 🙂🏽 ﬁ",
    "e\u0301 \u00e9 \u200b \x00 \ufeff",
)


class TextEncoder:
    """Texts -> ids, with the special tokens that the tokenizer adds of itself.

    A fast tokenizer's library is called for whole batches without offsets, which is more than half as fast
    again as calling the tokenizer for each text, if it gives the same ids on a few probes; and only for what
    ``PieceEncoder`` does not take.
    """

    def __init__(self, tokenizer: Any, *, split_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._split = split_special_tokens
        self._options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        if split_special_tokens:
            self._options["split_special_tokens"] = True
        self.is_direct = self._gives_the_same()
        # Special tokens that are to be split are found among the added ones, which pieces leave out.
        by_pieces = self.is_direct and not split_special_tokens
        self._pieces = PieceEncoder.of(tokenizer.backend_tokenizer) if by_pieces else None

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text; a text that is not valid Unicode raises UnicodeEncodeError or TypeError."""
        if not texts:
            return []
        if self._pieces is not None:
            return self._by_pieces(self._pieces, texts)
        return self._direct(texts) if self.is_direct else self._called(texts)

    def _by_pieces(self, pieces: PieceEncoder, texts: list[str]) -> list[list[int]]:
        ids = [pieces.encode(text) if pieces.takes(text) else None for text in texts]
        probe = next((number for number, known in enumerate(ids) if known is not None), None)
        if probe is not None and self._direct([texts[probe]])[0] != ids[probe]:
            raise UserError(
                "the fast path of preprocessing gives other ids than the tokenizer for "
                f"{texts[probe][:60]!r}...; nothing is written. Give --tokenizer-not-use-fast (in a run: "
                "model.use_fast_tokenizer: false), and report this with the tokenizer"
            )
        rest = iter(self._direct([text for text, known in zip(texts, ids, strict=True) if known is None]))
        return [next(rest) if known is None else known for known in ids]

    def _called(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self._tokenizer(texts, **self._options)["input_ids"]]

    def _direct(self, texts: list[str]) -> list[list[int]]:
        backend = self._tokenizer.backend_tokenizer
        if backend.encode_special_tokens != self._split:
            backend.encode_special_tokens = self._split
        return [encoding.ids for encoding in backend.encode_batch_fast(texts)]

    def _gives_the_same(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return False
        special = "a{0} {0}b".format(self._tokenizer.eos_token or "<s>")
        probes = [*_PROBES, special, " ".join(_PROBES) * 20]
        expected = [ids for text in probes for ids in self._called([text])]
        # The call has switched off padding and truncation, which tokenizer.json may have left on.
        return self._direct(probes) == expected


class DocumentWork:
    """A batch of ``Input(texts=True)`` to documents; runs in a tokenising process.

    Gives ``tokens`` [T] in the type of the vocabulary and ``lengths`` int32, of each document. With
    ``append_eod`` a document ends with the tokenizer's eos token, once: one that does already gets no second.

    Raises:
        UserError: ``append_eod`` with a tokenizer that has no eos token.
    """

    def __init__(
        self, source: Input, tokenizer: Any, *, append_eod: bool, split_special_tokens: bool = False
    ) -> None:
        self._source = source
        self._encode = TextEncoder(tokenizer, split_special_tokens=split_special_tokens)
        self._eod = end_of_document(tokenizer) if append_eod else None
        self.dtype = dtype_for(len(tokenizer))

    def __call__(self, batch: Batch) -> Outcome:
        texts: list[str] = []
        places: list[str] = []
        dropped: list[tuple[str, str]] = []
        rows = 0
        for document in self._source.texts_of(batch):
            rows += 1
            if isinstance(document, BadRow):
                dropped.append((document.reason, document.where))
            elif not document[0].strip():
                dropped.append((EMPTY_DOCUMENT, document[1]))
            elif not _is_unicode(document[0]):
                dropped.append((INVALID_UNICODE, document[1]))
            else:
                texts.append(document[0])
                places.append(document[1])
        ids = self._encode(texts)
        empty = [place for place, document in zip(places, ids, strict=True) if not document]
        dropped += [(EMPTY_DOCUMENT, place) for place in empty]
        ids = [document for document in ids if document]
        ended = 0
        if self._eod is not None:
            for document in ids:
                if document[-1] == self._eod:
                    ended += 1
                else:
                    document.append(self._eod)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum(dtype=np.int64)))
        counts = {ENDED_ALREADY: ended} if ended else {}
        return Outcome({"tokens": tokens, "lengths": lengths}, rows, dropped, counts)


def end_of_document(tokenizer: Any) -> int:
    """The id that ends a document.

    Raises:
        UserError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "append_eod: the tokenizer has no eos token to end a document with; leave append_eod out"
        )
    return int(tokenizer.eos_token_id)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
