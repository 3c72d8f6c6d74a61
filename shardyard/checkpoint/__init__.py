"""The store of a run's checkpoints, and the verified Hugging Face export.

Names are looked up when they are first used: to list and check checkpoints takes no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.checkpoint.export import ExportReport, check_exportable, export_dtype, export_hf
    from shardyard.checkpoint.manifest import fault_of
    from shardyard.checkpoint.output_dir import check_output_dir, prepare_output_dir
    from shardyard.checkpoint.space import Space
    from shardyard.checkpoint.store import CheckpointStore, Restored, background_group
    from shardyard.checkpoint.weights_only import read_weights

__all__ = [
    "CheckpointStore",
    "ExportReport",
    "Restored",
    "Space",
    "background_group",
    "check_exportable",
    "check_output_dir",
    "export_dtype",
    "export_hf",
    "fault_of",
    "prepare_output_dir",
    "read_weights",
]
_HOMES = {
    "CheckpointStore": "store",
    "ExportReport": "export",
    "Restored": "store",
    "Space": "space",
    "background_group": "store",
    "check_exportable": "export",
    "check_output_dir": "output_dir",
    "export_dtype": "export",
    "export_hf": "export",
    "fault_of": "manifest",
    "prepare_output_dir": "output_dir",
    "read_weights": "weights_only",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
