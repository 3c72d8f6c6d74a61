"""Megatron's indexed data sets, ``<prefix>.bin`` and ``<prefix>.idx``: read, written, and samples from them.

- ``IndexedReader`` opens a set of any writer by memory map and finds damage there and then; ``IndexedWriter``
  writes one that is complete or absent, in the type that ``dtype_for`` gives. ``merge`` joins sets,
  ``inspect`` counts one. The format is described in layout.py.
- ``WindowSamples`` is the index of this program: the documents in an order of the seed's, as one stream cut
  into windows, every token but the first a target exactly once. The sampler shuffles the windows anew each
  epoch.
- ``MegatronSamples`` is the index of megatron-core, sample for sample, to compare loss curves with. Its
  shuffles are in the index, so it is read in order.
- ``split_documents`` cuts the documents of a set into training, validation and test, for either.
"""

from __future__ import annotations

from shardyard.data.indexed.format import IndexedReader
from shardyard.data.indexed.layout import bin_path, dtype_for, idx_path
from shardyard.data.indexed.megatron_index import MegatronSamples
from shardyard.data.indexed.merge import merge
from shardyard.data.indexed.sample_index import WindowSamples, document_order
from shardyard.data.indexed.split import Splits, split_documents
from shardyard.data.indexed.summary import Summary, inspect
from shardyard.data.indexed.writer import IndexedWriter

__all__ = [
    "IndexedReader",
    "IndexedWriter",
    "MegatronSamples",
    "Splits",
    "Summary",
    "WindowSamples",
    "bin_path",
    "document_order",
    "dtype_for",
    "idx_path",
    "inspect",
    "merge",
    "split_documents",
]
