"""Reading a DCP folder without running anything that it holds.

DCP's `.metadata` is a pickle, and its byte entries load as pickles too. Here the pickle is read with an
allow-list of exact (module, name) pairs, and a folder with byte entries is refused: ours hold tensors only.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from shardyard.errors import UserError

_DCP = "torch.distributed.checkpoint.metadata"
_DTYPES = [
    str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
]
_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # where Python 3.13 keeps it
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *((_DCP, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch", name) for name in _DTYPES),
}  # fmt: skip


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """A file-system reader whose metadata passes the allow-list."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self._folder)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a DCP folder.

    Raises:
        UserError: there is none, it is damaged, it would run code, or it holds anything but tensors.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _AllowListUnpickler(file).load()
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint: it holds no .metadata") from None
    except Exception as error:
        raise UserError(f"{path} is not read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path} is not read: it is no checkpoint metadata")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"{path} is not read: entry {key} is no tensor; it may be a pickle")
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != str(info.relative_path):
            raise UserError(f"{path} is not read: it points outside the folder ({info.relative_path})")
        if info.transform_descriptors:
            raise UserError(f"{path} is not read: its data went through {info.transform_descriptors}")
    return metadata
