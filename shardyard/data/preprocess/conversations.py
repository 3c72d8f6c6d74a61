"""Rows of conversations and of preference pairs -> samples; runs in the tokenising processes.

The samples are those that fine-tuning itself would train on (``Encoder``). They travel as flat arrays, with
labels at their token's own position, as Megatron's data sets of packed documents keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shardyard.data.converters import Dropped, convert, convert_pair
from shardyard.data.encode import Samples
from shardyard.data.preprocess.batches import Batch, Input
from shardyard.data.preprocess.outcome import Outcome
from shardyard.data.preprocess.texts import ENDED_ALREADY
from shardyard.data.sources import BadRow, Row
from shardyard.data.types import IGNORE_INDEX, Conversation, Sample

SPLIT = "rows split into one sample per reply"


class Encodes(Protocol):
    """What turns a conversation into samples: an ``Encoder``."""

    def encode(self, conversation: Conversation, /) -> Samples | Dropped: ...


class ConversationWork:
    """A batch of rows to samples: ``input_ids`` and ``labels`` int32 end to end, ``lengths`` of each."""

    def __init__(self, source: Input, encoder: Encodes) -> None:
        self._source = source
        self._encoder = encoder

    def __call__(self, batch: Batch) -> Outcome:
        entry = self._source.entries[batch.entry]
        samples: list[Sample] = []
        dropped: list[tuple[str, str]] = []
        counts: Counter[str] = Counter()
        rows = 0
        for row in self._source.rows_of(batch):
            rows += 1
            outcome = row if isinstance(row, BadRow) else convert(row, entry)
            if isinstance(outcome, Conversation):
                outcome = self._encoder.encode(outcome)
            if isinstance(outcome, Samples):
                samples += outcome
                counts.update(map(told, outcome.notes))
                counts[SPLIT] += len(outcome) > 1
            else:
                dropped.append((outcome.reason, outcome.where))
        return Outcome(flat(samples), rows, dropped, counts)


class ConversationDocumentWork:
    """A batch of rows to documents for pretraining: the whole conversation as the template writes it, and
    ``eod`` (None: nothing) at the end, once. Gives what ``DocumentWork`` gives.
    """

    def __init__(self, source: Input, encoder: Encodes, dtype: np.dtype, eod: int | None) -> None:
        self._source = source
        self._encoder = encoder
        self._eod = eod
        self.dtype = dtype

    def __call__(self, batch: Batch) -> Outcome:
        entry = self._source.entries[batch.entry]
        documents: list[np.ndarray] = []
        dropped: list[tuple[str, str]] = []
        rows = ended = 0
        for row in self._source.rows_of(batch):
            rows += 1
            outcome = row if isinstance(row, BadRow) else convert(row, entry)
            if isinstance(outcome, Conversation):
                outcome = self._encoder.encode(outcome)
            if not isinstance(outcome, Samples):
                dropped.append((outcome.reason, outcome.where))
                continue
            ids = outcome[-1].input_ids  # of several samples, one per reply, the last holds all turns
            if self._eod is not None:
                ended += int(ids[-1]) == self._eod
                ids = ids if int(ids[-1]) == self._eod else np.append(ids, self._eod)
            documents.append(ids)
        tokens = np.concatenate([np.empty(0, np.int32), *documents]).astype(self.dtype)
        lengths = np.array([len(document) for document in documents], np.int32)
        counts = {ENDED_ALREADY: ended} if ended else {}
        return Outcome({"tokens": tokens, "lengths": lengths}, rows, dropped, counts)


class PairWork:
    """A batch of preference pairs to two samples each, arrays named ``chosen_...`` and ``rejected_...``.

    The encoder trains the last reply only. A pair of which either reply cannot be used is dropped.
    """

    def __init__(self, source: Input, encoder: Encodes) -> None:
        self._source = source
        self._encoder = encoder

    def __call__(self, batch: Batch) -> Outcome:
        chosen: list[Sample] = []
        rejected: list[Sample] = []
        dropped: list[tuple[str, str]] = []
        counts: Counter[str] = Counter()
        rows = 0
        for row in self._source.rows_of(batch):
            rows += 1
            both = row if isinstance(row, BadRow) else self._encode(row, batch.entry)
            if isinstance(both, BadRow | Dropped):
                dropped.append((both.reason, both.where))
                continue
            counts.update({told(note) for samples in both for note in samples.notes})
            chosen.append(both[0][-1])
            rejected.append(both[1][-1])
        arrays = {f"chosen_{name}": array for name, array in flat(chosen).items()}
        arrays |= {f"rejected_{name}": array for name, array in flat(rejected).items()}
        return Outcome(arrays, rows, dropped, counts)

    def _encode(self, row: Row, entry: int) -> tuple[Samples, Samples] | Dropped:
        pair = convert_pair(row, self._source.entries[entry])
        if isinstance(pair, Dropped):
            return pair
        chosen = self._encoder.encode(pair.conversation(pair.chosen))
        rejected = self._encoder.encode(pair.conversation(pair.rejected))
        for which, samples in (("chosen", chosen), ("rejected", rejected)):
            if isinstance(samples, Dropped):
                return Dropped(f"{which} reply: {samples.reason}", samples.where)
        assert isinstance(chosen, Samples) and isinstance(rejected, Samples)
        return chosen, rejected


def told(note: str) -> str:
    """What became of a row beside its samples, in this command's words."""
    return f"rows: {note.replace('data.cutoff_len', '--seq-length')}"


def flat(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The samples end to end, with labels at their token's own position."""
    empty = [np.empty(0, np.int32)]
    return {
        "input_ids": np.concatenate([*empty, *(sample.input_ids for sample in samples)]),
        "labels": np.concatenate([*empty, *(own_position(sample.labels) for sample in samples)]),
        "lengths": np.array([len(sample.input_ids) for sample in samples], np.int32),
    }


def own_position(labels: np.ndarray) -> np.ndarray:
    """Shifted labels [n] (the target of each position) to the tokens' own; the first token has none."""
    return np.concatenate([np.full(1, IGNORE_INDEX, labels.dtype), labels[:-1]])
