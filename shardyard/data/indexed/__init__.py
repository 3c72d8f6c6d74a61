"""Megatron's indexed data sets, ``<prefix>.bin`` and ``<prefix>.idx``."""

from __future__ import annotations

from shardyard.data.indexed.format import IndexedReader, IndexedWriter, bin_path, dtype_for, idx_path

__all__ = ["IndexedReader", "IndexedWriter", "bin_path", "dtype_for", "idx_path"]
