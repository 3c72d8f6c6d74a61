"""Raw rows -> Megatron's indexed data sets, in a stream and over all cores.

write_documents(entry, tokenizer, prefix, ...)    text for pretraining -> ``<prefix>.bin`` and ``.idx``
run_job(Job(...), tokenizer)                      any kind of rows, with a manifest; restartable
PackedSamples(prefix)                             packed samples read back for training
"""

from shardyard.data.preprocess.documents import DocumentsReport, write_documents
from shardyard.data.preprocess.job import Job, Result, run_job
from shardyard.data.preprocess.packed import PackedSamples, is_packed

__all__ = ["DocumentsReport", "Job", "PackedSamples", "Result", "is_packed", "run_job", "write_documents"]
