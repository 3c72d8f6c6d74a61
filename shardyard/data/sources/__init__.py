"""Where rows come from: dataset entries, their files, and the readers that turn files into Python objects.

resolve_datasets(data.dataset, data.dataset_dir) -> [DatasetEntry]
iter_rows(entry) -> Row(data, where)       for conversations
iter_texts(entry) -> (text, where)         for pretraining documents
"""

from shardyard.data.sources.entry import Columns, DatasetEntry, Tags
from shardyard.data.sources.readers import Row, parquet_rows
from shardyard.data.sources.registry import resolve_datasets
from shardyard.data.sources.rows import iter_rows, iter_texts

__all__ = [
    "Columns",
    "DatasetEntry",
    "Row",
    "Tags",
    "iter_rows",
    "iter_texts",
    "parquet_rows",
    "resolve_datasets",
]
