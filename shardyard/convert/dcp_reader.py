"""Single tensors out of a DCP folder, whoever wrote it, without running anything that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardyard.checkpoint.safe_reader import SafeReader
from shardyard.checkpoint.weights_only import tensor_metadata
from shardyard.convert.pickled import cause_of
from shardyard.convert.weights import Facts
from shardyard.errors import UserError


class DcpTensors:
    """The tensors of ``folder`` by their keys. Entries that are no tensors are passed over, never read.

    Raises:
        UserError: there is no .metadata, it is damaged, or it would run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader: _Reader | None = _Reader(folder)
        entries = self._reader.metadata.state_dict_metadata
        self.facts: dict[str, Facts] = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor, joined from its shards.

        Raises:
            UserError: a file is missing, cut short or not what the metadata says.
        """
        if self._reader is None:
            self._reader = _Reader(self.folder)
        shape, dtype = self.facts[key]
        entry: Any = self._reader.metadata.state_dict_metadata[key]
        # what no piece holds would be what happened to be in memory
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise UserError(f"{self.folder}: the pieces of {key} that .metadata lists do not make it up")
        tensor = torch.empty(shape, dtype=dtype)
        reader, planner = self._reader, DefaultLoadPlanner()
        try:
            planner.set_up_planner({key: tensor}, reader.metadata, is_coordinator=True)
            reader.set_up_storage_reader(reader.metadata, is_coordinator=True)
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except Exception as error:  # of every type: a file that has gone, is cut short or holds a pickle
            raise UserError(f"{self.folder}: {key} cannot be read: {cause_of(error)}") from error
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


class _Reader(SafeReader):
    """Reads the metadata once, and of that the tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = tensor_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata
