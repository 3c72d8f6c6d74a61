"""The store of a run's checkpoints, and the verified Hugging Face export."""

from shardyard.checkpoint.export import ExportReport, check_exportable, export_dtype, export_hf
from shardyard.checkpoint.output_dir import check_output_dir, prepare_output_dir
from shardyard.checkpoint.store import CheckpointStore, Restored, fault_of

__all__ = [
    "CheckpointStore",
    "ExportReport",
    "Restored",
    "check_exportable",
    "check_output_dir",
    "export_dtype",
    "export_hf",
    "fault_of",
    "prepare_output_dir",
]
