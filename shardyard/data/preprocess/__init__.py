"""Raw rows -> Megatron's indexed data sets, in a stream and over all cores.

write_documents(entry, tokenizer, prefix, ...)    text for pretraining -> ``<prefix>.bin`` and ``.idx``
"""

from shardyard.data.preprocess.documents import DocumentsReport, write_documents

__all__ = ["DocumentsReport", "write_documents"]
