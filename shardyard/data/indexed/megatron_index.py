"""The samples of megatron-core 0.16.1's GPTDataset for the same seed (``data.index_compat: megatron``).

Legend: T tokens of one epoch of a set's part, E epochs, c ``cutoff_len``, N samples wanted.

One set, each sequence of which is a document to Megatron:

- E is the least number of epochs with E T >= N c + 1: a window is c tokens and one more, with which the next
  one begins. The windows of all E epochs are cut from one stream; what is left after the last whole one is
  dropped.
- The stream is E copies of the documents, shuffled all together. Only if the last epoch is to give less than
  80 % of an epoch's windows is it shuffled by itself and put last, so that the earlier ones are whole.
- Then the windows are shuffled, those of a last epoch that stands apart by themselves. All shuffles draw from
  one ``RandomState(seed)``, whose algorithms numpy keeps unchanged.

Several sets: see blending.py. With weights each set is built for its share of N, rounded up, and 0.5 % more;
without, for one epoch, and its number of windows is its share.

What Megatron does and this does not: a token that is the tokenizer's pad stays itself (Megatron replaces it
by 0 and does not train it), and the indices are not kept in files.

Source: ``gpt_dataset.py``, ``helpers.cpp`` and ``blended_megatron_dataset_builder.py`` in
``megatron/core/datasets``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardyard.data.indexed.blending import blend_by_weight, blend_exhaustively, normalised
from shardyard.data.indexed.format import IndexedReader
from shardyard.data.indexed.sample_index import TokenStream, window_sample
from shardyard.data.indexed.split import split_documents
from shardyard.data.types import Sample
from shardyard.errors import UserError

Part = Literal["train", "valid", "test"]

_LAST_EPOCH_APART_BELOW = 0.80
_SURPLUS = 0.005


class MegatronSamples:
    """Sample i is the i-th that Megatron trains: read them in order, the shuffles are in the index.

    ``num_samples`` None is one epoch of every set. ``split`` cuts each set by its sequences; ``which`` is the
    part to read. ``eod_id`` says where documents end inside a window, as Megatron sees it; None takes the
    ends of the sequences: the same where ``append_eod`` made the set and no text holds the token itself.

    ``reset_attention_mask`` is Megatron's option of this name with ``reset_position_ids``. As in Megatron the
    last token of a document is then still trained to predict the next one's first, unless ``eod_mask_loss``.

    Sending this to another process sends its arguments, and the index is built anew there.

    Raises:
        UserError: a set is missing or damaged, weights do not fit the sets, a part has no tokens, or the sets
            have fewer samples than are asked for without weights.
    """

    def __init__(
        self,
        prefixes: Sequence[Path],
        weights: Sequence[float] | None = None,
        *,
        split: str,
        which: Part = "train",
        num_samples: int | None,
        cutoff_len: int,
        seed: int,
        reset_attention_mask: bool = False,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "prefixes": tuple(prefixes),
            "weights": None if weights is None else tuple(weights),
            "split": split,
            "which": which,
            "num_samples": num_samples,
            "cutoff_len": cutoff_len,
            "seed": seed,
            "reset_attention_mask": reset_attention_mask,
            "eod_id": eod_id,
            "eod_mask_loss": eod_mask_loss,
        }
        _check_request(prefixes, weights, num_samples, cutoff_len, seed)
        self._reset, self._cutoff_len = reset_attention_mask, cutoff_len
        self._eod_id = eod_id
        self._eod_mask_loss = eod_mask_loss
        shares = None if weights is None else normalised(weights)
        sizes = _sizes_per_set(shares, num_samples, len(prefixes))
        self._sets = [
            _GPTWindows(IndexedReader(prefix), split, which, size, cutoff_len, seed)
            for prefix, size in zip(prefixes, sizes, strict=True)
        ]
        available = [len(windows) for windows in self._sets]
        self._blend = None
        if len(self._sets) > 1 or shares is not None:
            self._blend = _blend(prefixes, available, shares, num_samples)
            available = [len(self._blend[0])]
        self._length = available[0] if num_samples is None else num_samples
        if self._length > available[0]:
            raise UserError(
                f"data.dataset: one epoch of all sets has {available[0]} samples, fewer than the "
                f"{num_samples} of this run; Megatron repeats sets only by weights: give each set a weight, "
                "or train fewer steps"
            )

    def __len__(self) -> int:
        return self._length

    @property
    def samples_per_set(self) -> list[int]:
        """How many of the samples are of each set."""
        if self._blend is None:
            return [self._length]
        return np.bincount(self._blend[0][: self._length], minlength=len(self._sets)).tolist()

    def document_ends(self, index: int) -> np.ndarray:
        """Where documents end in a sample: how many of its inputs there are up to each end, ascending."""
        text, ends = self._read(index)
        return ends[ends < len(text)]

    def doc_lens(self, index: int) -> Sequence[int]:
        """The documents of a sample; only where they do not see each other are tokens read for it."""
        if self._reset:
            return self[index].doc_lens
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return (self._cutoff_len,)

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        windows = self._sets[0]
        if self._blend is not None:
            of_set, in_set = self._blend
            windows, index = self._sets[of_set[index]], int(in_set[index])
        text, ends = windows.read(index)
        if self._eod_id is not None:
            ends = np.flatnonzero(text == self._eod_id) + 1
        return text, ends

    def __getitem__(self, index: int) -> Sample:
        text, ends = self._read(index)
        return window_sample(text, ends, reset_attention_mask=self._reset, ignore_ends=self._eod_mask_loss)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._arguments,)


def _rebuilt(arguments: dict[str, Any]) -> MegatronSamples:
    return MegatronSamples(**arguments)


class _GPTWindows:
    """One set's windows in the order of its shuffle: at least ``num_samples``, or those of one epoch."""

    def __init__(
        self,
        reader: IndexedReader,
        split: str,
        which: Part,
        num_samples: int | None,
        cutoff_len: int,
        seed: int,
    ) -> None:
        part: range = getattr(split_documents(split, len(reader)), which)
        tokens_per_epoch = int(reader.sequence_lengths[part.start : part.stop].sum(dtype=np.int64))
        if not tokens_per_epoch:
            raise UserError(
                f"{reader.prefix}: the {which} part of its {len(reader)} documents (data.split: {split}) has "
                "no token; give it a larger share"
            )
        epochs = 1 if num_samples is None else -(-(num_samples * cutoff_len + 1) // tokens_per_epoch)
        total = (epochs * tokens_per_epoch - 1) // cutoff_len
        before_last = ((epochs - 1) * tokens_per_epoch - 1) // cutoff_len
        apart = (
            num_samples is not None
            and epochs > 1
            and num_samples - before_last
            < int(_LAST_EPOCH_APART_BELOW * ((tokens_per_epoch - 1) // cutoff_len))
        )
        random = np.random.RandomState(seed)
        documents = np.arange(part.start, part.stop, dtype=np.int32)
        repeats = [epochs - 1, 1] if apart else [epochs]
        order = np.concatenate([_shuffled(np.tile(documents, times), random) for times in repeats])
        starts = reader.sequence_offsets(order)
        self._stream = TokenStream(reader.tokens, starts, reader.sequence_lengths[order])
        bounds = [0, before_last, total] if apart else [0, total]
        number = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
        self._shuffle = np.concatenate(
            [_shuffled(np.arange(begin, end, dtype=number), random) for begin, end in pairwise(bounds)]
        )
        self._cutoff_len = cutoff_len

    def __len__(self) -> int:
        return len(self._shuffle)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The c + 1 tokens of one window, and where sequences end among them."""
        begin = int(self._shuffle[index]) * self._cutoff_len
        return self._stream.read(begin, begin + self._cutoff_len + 1)


def _blend(
    prefixes: Sequence[Path],
    available: Sequence[int],
    shares: Sequence[float] | None,
    num_samples: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Set and number within the set of each blended sample; at least N with weights, at most N without."""
    for prefix, count in zip(prefixes, available, strict=True):
        if not count:
            raise UserError(
                f"{prefix}: its part is shorter than one sample of data.cutoff_len + 1 tokens; leave it out"
            )
    if shares is not None and num_samples is not None:
        size = sum(math.ceil(num_samples * share) for share in shares)
        blend = blend_by_weight(normalised(shares), size)
        drawn = np.bincount(blend[0], minlength=len(prefixes))
        for prefix, count, wanted in zip(prefixes, available, drawn.tolist(), strict=True):
            if wanted > count:
                raise UserError(
                    f"{prefix}: the blend draws {wanted} samples from it, but Megatron builds {count} and "
                    "stops here; change the weights or the number of steps a little"
                )
        return blend
    if num_samples is None:
        return blend_exhaustively(available)
    return blend_by_weight(normalised(available), min(num_samples, sum(available)))


def _sizes_per_set(
    shares: Sequence[float] | None, num_samples: int | None, num_sets: int
) -> list[int | None]:
    """How many samples each set is built for; None is one epoch."""
    if shares is not None and num_samples is not None:
        return [math.ceil(math.ceil(num_samples * share) * (1 + _SURPLUS)) for share in shares]
    return [num_samples if num_sets == 1 else None] * num_sets


def _check_request(
    prefixes: Sequence[Path],
    weights: Sequence[float] | None,
    num_samples: int | None,
    cutoff_len: int,
    seed: int,
) -> None:
    if not prefixes:
        raise UserError("data.dataset: no data set is named")
    if weights is not None:
        if len(weights) != len(prefixes):
            raise UserError(f"data.dataset: {len(prefixes)} sets have {len(weights)} weights")
        if not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise UserError(
                f"data.dataset: weights must be above 0, found {list(weights)}; leave unwanted sets out"
            )
        if num_samples is None:
            raise UserError("data.dataset: weights need a number of samples; set training.max_steps")
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
    if cutoff_len < 1:
        raise ValueError(f"cutoff_len is {cutoff_len}; it must be at least 1")
    if not 0 <= seed < 2**32:
        raise UserError(
            f"training.seed: {seed} does not fit Megatron's generator; take one from 0 to {2**32 - 1}"
        )


def _shuffled(numbers: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(numbers)
    return numbers
