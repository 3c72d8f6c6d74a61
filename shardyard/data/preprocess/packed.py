"""Reading packed samples for training: Megatron's data sets of packed documents as samples.

``<prefix>_packed_input_ids_document``, ``..._attention_mask_document`` and ``..._labels_document`` hold one
sequence each for a sample or a pack. Runs of equal numbers in the mask are the samples of a sequence, which
do not see each other; a mask of ones alone is one document; zeros at the end are padding and left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardyard.data.indexed import IndexedReader, idx_path
from shardyard.data.preprocess.sinks import SFT_PARTS, part_prefix
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.errors import UserError

_SUFFIX = "_packed"


class PackedSamples:
    """``samples[i]`` is sequence i, its labels shifted once; ``prefix`` with or without ``_packed``.

    Sending one to another process sends its path only.

    Raises:
        UserError: a file is missing or damaged, or the three do not fit together.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = without_suffix(Path(prefix))
        readers = [IndexedReader(part_prefix(self.prefix, part)) for part in SFT_PARTS]
        self._input_ids, self._mask, self._labels = readers
        first = readers[0]
        for reader in readers[1:]:
            if len(reader) != len(first):
                raise UserError(
                    f"{reader.prefix} has {len(reader)} sequences, {first.prefix} has {len(first)}; they do "
                    "not belong together, preprocess again"
                )
            differing = np.flatnonzero(reader.sequence_lengths != first.sequence_lengths)
            if len(differing):
                number = int(differing[0])
                raise UserError(
                    f"{reader.prefix}: sequence {number} has {reader.sequence_lengths[number]} tokens, that "
                    f"of {first.prefix} {first.sequence_lengths[number]}; they do not belong together, "
                    "preprocess again"
                )

    def __len__(self) -> int:
        return len(self._input_ids)

    def __getitem__(self, index: int) -> Sample:
        ends = self._ends(index)
        length = int(ends[-1])
        labels = np.full(length, IGNORE_INDEX, np.int32)
        labels[:-1] = self._labels.sequence(index)[1:length]
        labels[ends - 1] = IGNORE_INDEX
        input_ids = self._input_ids.sequence(index)[:length].astype(np.int32)
        _refuse_negative(self._input_ids, index, input_ids)
        _refuse_negative(self._labels, index, labels[labels != IGNORE_INDEX])
        return Sample(input_ids, labels, tuple(np.diff(ends, prepend=0).tolist()))

    def doc_lens(self, index: int) -> tuple[int, ...]:
        """The documents of a sequence; of its three parts only the mask is read for it."""
        return tuple(np.diff(self._ends(index), prepend=0).tolist())

    def _ends(self, index: int) -> np.ndarray:
        """Where its documents end, ascending; the last is its length without padding."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        mask = self._mask.sequence(index)
        filled = np.flatnonzero(mask)
        length = int(filled[-1]) + 1 if len(filled) else 0
        if not length:
            raise UserError(f"{self._mask.prefix}: sequence {index} is padding alone; preprocess again")
        return np.append(np.flatnonzero(np.diff(mask[:length])) + 1, length)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedSamples, (self.prefix,)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, padding included; int32 [N]."""
        return self._input_ids.sequence_lengths

    def check_ids(self, vocab_size: int) -> None:
        """Refuse ids that the model has no embedding for.

        Raises:
            UserError: an id is negative, or ``vocab_size`` or more.
        """
        self._input_ids.check_ids(vocab_size)


def _refuse_negative(reader: IndexedReader, index: int, ids: np.ndarray) -> None:
    """A target that is neither a word nor the mark of what is not trained would count as trained."""
    if len(ids) and int(ids.min()) < 0:
        raise UserError(
            f"{reader.prefix}: sequence {index} holds {int(ids.min())}, which is no token id (labels that "
            f"are not trained are {IGNORE_INDEX}); preprocess again"
        )


def without_suffix(prefix: Path) -> Path:
    """The output prefix of preprocessing, from itself or with the suffix of its files."""
    name = prefix.name
    for part in SFT_PARTS:
        name = name.removesuffix(f"{_SUFFIX}_{part}_document")
    return prefix.with_name(name.removesuffix(_SUFFIX))


def is_packed(prefix: Path | str) -> bool:
    """Whether packed samples lie at ``prefix`` (with or without ``_packed``)."""
    index = part_prefix(without_suffix(Path(prefix)), SFT_PARTS[0])
    return index.with_name(f"{index.name}.idx").is_file()


def token_files(prefix: Path) -> Path:
    """The token files that an output prefix of preprocessing means; ``prefix`` itself if they are its own."""
    meant = (prefix, prefix.with_name(f"{prefix.name}_text_document"), part_prefix(prefix, SFT_PARTS[0]))
    return next((found for found in meant if idx_path(found).is_file()), prefix)
