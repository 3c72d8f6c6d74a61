"""Where rows come from: dataset entries, their files, and the readers that turn files into Python objects.

resolve_datasets(data.dataset, data.dataset_dir) -> [DatasetEntry]
iter_rows(entry, skip, on_bad_row) -> Row(data, where)       for conversations
iter_texts(entry, skip, on_bad_row) -> (text, where)         for pretraining documents
read_rows, text_lines, count_rows                            the same of a single file
"""

from shardyard.data.sources.columnar import columns_of, parquet_rows
from shardyard.data.sources.entry import Columns, DatasetEntry, Tags
from shardyard.data.sources.files import file_type, open_bytes
from shardyard.data.sources.readers import Policy, count_rows, read_rows, text_lines
from shardyard.data.sources.registry import resolve_datasets
from shardyard.data.sources.row import BadRow, Row
from shardyard.data.sources.rows import count_entry_rows, iter_rows, iter_texts

__all__ = [
    "BadRow",
    "Columns",
    "DatasetEntry",
    "Policy",
    "Row",
    "Tags",
    "columns_of",
    "count_entry_rows",
    "count_rows",
    "file_type",
    "iter_rows",
    "iter_texts",
    "open_bytes",
    "parquet_rows",
    "read_rows",
    "resolve_datasets",
    "text_lines",
]
