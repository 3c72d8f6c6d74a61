"""Several indexed data sets as one: their documents in the order in which the sets are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardyard.data.indexed.format import IndexedReader
from shardyard.data.indexed.layout import bin_path
from shardyard.data.indexed.writer import IndexedWriter
from shardyard.errors import UserError

_DOCUMENTS_AT_A_TIME = 1 << 16


def merge(prefixes: Sequence[Path], out: Path) -> None:
    """Write the documents of all ``prefixes`` to ``out``; a set without documents adds none.

    The bytes are copied from mapped files, so memory does not grow with them. Nothing is written unless all
    sets fit together.

    Raises:
        UserError: see ``open_fitting``; ``out`` cannot be written.
    """
    readers = open_fitting(prefixes, out)
    with_modes = any(reader.modes is not None for reader in readers if len(reader))
    with IndexedWriter(out, readers[0].dtype, with_modes=with_modes) as writer:
        for reader in readers:
            _append_all(writer, reader)
        writer.finish()


def open_fitting(prefixes: Sequence[Path], out: Path) -> list[IndexedReader]:
    """The sets to merge into ``out``, which fit together.

    Raises:
        UserError: nothing to merge, a set is damaged, their types differ, some have modes and some have none,
            or ``out`` is one of them.
    """
    if not prefixes:
        raise UserError("merge needs at least one data set")
    if bin_path(out).resolve() in {bin_path(prefix).resolve() for prefix in prefixes}:
        raise UserError(f"{out} is one of the sets to merge; give the result another name")
    readers = [IndexedReader(prefix, allow_empty=True) for prefix in prefixes]
    for reader in readers[1:]:
        if reader.dtype != readers[0].dtype:
            raise UserError(
                f"{readers[0].prefix} holds {readers[0].dtype.name} ids and {reader.prefix} "
                f"{reader.dtype.name} ids; sets of different vocabularies cannot be merged, preprocess them "
                "with one tokenizer"
            )
    filled = [reader for reader in readers if len(reader)]
    with_modes = [reader for reader in filled if reader.modes is not None]
    without_modes = [reader for reader in filled if reader.modes is None]
    if with_modes and without_modes:
        raise UserError(
            f"{with_modes[0].prefix} is a multimodal set with modes, {without_modes[0].prefix} has none"
        )
    return readers


def _append_all(writer: IndexedWriter, reader: IndexedReader) -> None:
    for begin in range(0, reader.num_documents, _DOCUMENTS_AT_A_TIME):
        sequences = reader.document_indices[begin : begin + _DOCUMENTS_AT_A_TIME + 1]
        part = slice(int(sequences[0]), int(sequences[-1]))
        first_token, last_token = reader.sequence_offsets(sequences[[0, -1]])
        writer.append(
            reader.tokens[first_token:last_token],
            reader.sequence_lengths[part],
            np.diff(sequences),
            None if reader.modes is None else reader.modes[part],
        )
