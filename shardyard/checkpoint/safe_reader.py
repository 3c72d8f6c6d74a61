"""Reading a DCP folder without running anything that it holds.

DCP's `.metadata` is a pickle, and its byte entries load as pickles too. Here the pickle may name nothing but
an allow-list of exact (module, name) pairs, and what it makes of them are inert records, of which DCP's own
objects are then built, field by field, each checked. A folder with byte entries is refused: ours hold tensors
only.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from shardyard.errors import UserError

_DCP = "torch.distributed.checkpoint.metadata"
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_RECORDS = {
    *((_DCP, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # where Python 3.13 keeps it
}  # fmt: skip
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}
_SHOWN_FILES = 5


class _Record:
    """Holds what a pickle says of an object, as ``arguments`` and ``state``; does nothing with it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class MetadataUnpickler(pickle.Unpickler):
    """Loads DCP metadata and nothing else."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New types for each file: what a pickle does to a type ends with it.
        self._types = {(module, name): type(name, (_Record,), {}) for module, name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        found = self._types.get((module, name), _VALUES.get((module, name)))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return found

    def load(self) -> Metadata:
        """The metadata; byte entries are left in it, their contents are not read.

        Raises:
            pickle.UnpicklingError: it holds anything but a checkpoint's metadata, or leads out of its folder.
            Exception: of every type; whatever a damaged pickle leads to.
        """
        return self._metadata(self._fields(super().load(), "Metadata"))

    def _fields(self, record: Any, name: str, module: str = _DCP) -> dict[str, Any]:
        state = vars(record).get("state", {}) if isinstance(record, self._types[module, name]) else None
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"it is no checkpoint metadata: no {name} where one belongs")
        return state

    def _metadata(self, fields: dict[str, Any]) -> Metadata:
        entries, places = fields["state_dict_metadata"], fields.get("storage_data") or {}
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise pickle.UnpicklingError("it is no checkpoint metadata: it lists no tensors")
        version = fields.get("version")
        return Metadata(
            {_text(key): self._entry(entry) for key, entry in entries.items()},
            storage_data={self._index(index): self._place(place) for index, place in places.items()},
            storage_meta=StorageMeta(),
            version=version if isinstance(version, str) else None,
        )

    def _entry(self, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(record, self._types[_DCP, "BytesStorageMetadata"]):
            return BytesStorageMetadata()
        fields = self._fields(record, "TensorStorageMetadata")
        size, chunks = _sizes(fields["size"]), fields["chunks"]
        if not isinstance(chunks, list):
            raise pickle.UnpicklingError("it lists no pieces of a tensor")
        return TensorStorageMetadata(
            self._properties(fields["properties"]), size, [self._chunk(chunk, size) for chunk in chunks]
        )

    def _properties(self, record: Any) -> TensorProperties:
        state = vars(record).get("state")
        if not isinstance(record, self._types[_DCP, "TensorProperties"]) or not isinstance(state, tuple):
            raise pickle.UnpicklingError("it holds no properties of a tensor where they belong")
        if not isinstance(state[0], torch.dtype):
            raise pickle.UnpicklingError("it gives no dtype of a tensor")
        return TensorProperties(dtype=state[0])

    def _chunk(self, record: Any, whole: torch.Size) -> ChunkStorageMetadata:
        fields = self._fields(record, "ChunkStorageMetadata")
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        if len(offsets) != len(whole) or len(sizes) != len(whole):
            raise pickle.UnpicklingError("a piece has other dimensions than its tensor")
        if any(offset + size > length for offset, size, length in zip(offsets, sizes, whole, strict=True)):
            raise pickle.UnpicklingError("a piece lies outside its tensor")
        return ChunkStorageMetadata(offsets, sizes)

    def _index(self, record: Any) -> MetadataIndex:
        fields = self._fields(record, "MetadataIndex")
        offset, hint = fields.get("offset"), fields.get("index")
        return MetadataIndex(
            _text(fields["fqn"]),
            None if offset is None else _sizes(offset),
            None if hint is None else _count(hint),
        )

    def _place(self, record: Any) -> _StorageInfo:
        fields = self._fields(record, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
        name = _text(fields["relative_path"])
        if Path(name).name != name or not name.isprintable():
            raise pickle.UnpicklingError(f"it points outside the folder ({name!r:.200})")
        if fields.get("transform_descriptors"):
            raise pickle.UnpicklingError("its data was transformed when it was written")
        return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))


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

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing is read when a file is missing that this rank needs: where nodes have disks of their own, a
        folder holds what the ranks of its node wrote."""
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        if missing := sorted(name for name in needed if not (self._folder / name).is_file()):
            more = f" and {len(missing) - _SHOWN_FILES} more" if len(missing) > _SHOWN_FILES else ""
            raise UserError(
                f"this rank needs {', '.join(missing[:_SHOWN_FILES])}{more}, which its disk does not have. "
                "Checkpoints on disks of nodes are read with the layout and order of nodes that wrote them; "
                "for another, copy the folders of all nodes together, onto each node or a shared disk"
            )
        return super().prepare_local_plan(plan)


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a DCP folder that holds tensors only.

    Raises:
        UserError: as `load_metadata`, or it holds anything but tensors.
    """
    metadata = load_metadata(folder)
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(
                f"{folder / '.metadata'} is not read: entry {key} is no tensor; it may be a pickle"
            )
    return metadata


def load_metadata(folder: Path, unpickler: type[MetadataUnpickler] = MetadataUnpickler) -> Metadata:
    """The metadata of a DCP folder as ``unpickler`` reads it; entries of bytes are named and not loaded.

    Raises:
        UserError: there is none, it is damaged, or it would run code or read outside the folder.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            return unpickler(file).load()
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint: it holds no .metadata") from None
    except Exception as error:  # of every type: whatever a damaged or hostile pickle leads to
        raise UserError(f"{path} is not read: {str(error) or type(error).__name__:.300}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} where a name belongs")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise pickle.UnpicklingError(f"it has {value!s:.40} where a count belongs")
    return value


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, tuple):
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} where a shape belongs")
    return torch.Size([_count(length) for length in value])
