"""The weights of a checkpoint as the start of another run, on any layout; ours or the reference's folders.

Ours name a tensor ``model.<name>``; the reference names it ``model.model.<name>`` (its engine holds the model
in an attribute), writes a tied weight under both names, and the experts of a layer, if it multiplies them in
groups, as one matrix: [E, A, B] as [E * B, A]. Optimizer state and entries that are no tensors stay unread;
the latter are pickles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.loading import verify_together
from shardyard.checkpoint.manifest import MANIFEST
from shardyard.checkpoint.safe_reader import SafeReader, load_metadata
from shardyard.checkpoint.state import any_stage, persistent_tensors
from shardyard.errors import UserError, first_line
from shardyard.parallel import local
from shardyard.parallel.pipeline import PipelineModel

_KEY = "model.model_name_or_path"
T = TypeVar("T")
logger = logging.getLogger("shardyard.checkpoint")
OURS, REFERENCE = "model.", "model.model."
"""What stands before a tensor's name."""


@dataclass(frozen=True)
class Saved:
    """A tensor of the folder: its key, and whether experts stand in it as one matrix."""

    key: str
    merged: bool = False


@dataclass(frozen=True)
class _Part:
    """What a rank reads of a saved tensor: where it begins there, and where it goes."""

    offsets: tuple[int, ...]
    target: torch.Tensor


def read_weights(model: Any, folder: Path) -> None:
    """Read the weights in ``folder``, a DCP folder, into the live tensors of ``model``. Every rank calls it.

    Each rank reads its own parts. A tensor may have another floating dtype than the model's.

    Raises:
        UserError: on every rank: the folder is incomplete, damaged or hostile, or its tensors are not those
            of the model.
    """
    peers = Peers()
    what = f"{_KEY}: the weights of {folder}"
    tensors = persistent_tensors(model)
    if peers.first(what, (folder / MANIFEST).exists):
        try:
            verify_together(folder, peers)
        except UserError as error:
            raise UserError(f"{_KEY}: {error}") from error
    metadata = on_each(peers, what, lambda: tensor_metadata(folder))
    wanted = {name: shape for name, (shape, _) in Holdings.of(tensors, peers).facts.items()}
    tied = tied_names(model)
    saved = on_each(peers, what, lambda: match_tensors(folder, metadata, wanted, tied))
    warn_of_grids(folder, metadata, saved)
    peers.agree(what, lambda: read_tensors(folder, metadata, [(saved[n], t) for n, t in tensors.items()]))


def on_each(peers: Peers, what: str, work: Callable[[], T]) -> T:
    """This rank's result of ``work``, which stays here, unlike those of `Peers.agree`; errors are shared."""
    mine: list[T] = []
    peers.agree(what, lambda: mine.append(work()))
    return mine[0]


def tensor_metadata(folder: Path) -> Metadata:
    """The metadata of a DCP folder's tensors, without entries of bytes: those are pickles.

    Raises:
        UserError: there is none, it is damaged, or it would run code or read outside the folder.
    """
    metadata = load_metadata(folder)
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    metadata.state_dict_metadata = {k: e for k, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    metadata.storage_data = {i: p for i, p in places.items() if i.fqn in metadata.state_dict_metadata}
    return metadata


def tied_names(model: Any) -> dict[str, str]:
    """Names that a checkpoint may hold beside those of the model's tensors, and which tensor each means."""
    if isinstance(model, PipelineModel):
        return dict(model.whole.tied)
    first: dict[torch.Tensor, str] = {}
    named = any_stage(model).named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def match_tensors(
    folder: Path,
    metadata: Metadata,
    wanted: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    prefixes: tuple[str, ...] = (OURS, REFERENCE),
) -> dict[str, Saved]:
    """Which tensor of the folder each of the model's is; names have that of ``prefixes`` that fits most.

    Raises:
        UserError: names the tensors that are missing, unknown to the model, or of another shape.
    """
    sizes = sizes_of(metadata)
    prefix = max(prefixes, key=lambda prefix: sum(prefix + name in sizes for name in wanted))
    missing = sorted(name for name in wanted if prefix + name not in sizes)
    ours = {prefix + name for name in (*wanted, *tied)}
    foreign = sorted(key for key in sizes if key.startswith(OURS) and key not in ours)
    found, other = {}, []
    for name in wanted.keys() - set(missing):
        saved = stands_for(prefix + name, sizes[prefix + name], wanted[name])
        if saved is None:
            other.append(f"{name}: {list(sizes[prefix + name])} there, {list(wanted[name])} in the model")
        else:
            found[name] = saved
    lists = ((missing, "missing"), (foreign, "unknown to it"), (sorted(other), "of another shape"))
    faults = [f"{len(names)} {what} (such as {names[0]})" for names, what in lists if names]
    if faults:
        raise UserError(f"{folder} was written by another model: tensors {', '.join(faults)}")
    return found


def sizes_of(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a folder, by key."""
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(e.size) for key, e in entries if isinstance(e, TensorStorageMetadata)}


def stands_for(key: str, size: tuple[int, ...], shape: tuple[int, ...]) -> Saved | None:
    """How a saved tensor of ``size`` is one of ``shape``, or of its moments; None if it is not."""
    if size == shape:
        return Saved(key)
    merged = len(shape) == 3 and size == (shape[0] * shape[2], shape[1])
    return Saved(key, merged=True) if merged else None


def warn_of_grids(folder: Path, metadata: Metadata, saved: Mapping[str, Saved]) -> None:
    """Say when the reference may have written experts in a wrong order (REFERENCE 9.3, item 27)."""
    for found in saved.values():
        chunks = getattr(metadata.state_dict_metadata[found.key], "chunks", ())
        places = [{chunk.offsets[dim] for chunk in chunks} for dim in range(2 * found.merged)]
        if places and all(len(starts) > 1 for starts in places):
            logger.warning(
                "%s: its experts were split both ways (ep_size and ep_fsdp_size above 1). The reference "
                "writes such pieces in the order of other ranks, and nothing in the folder tells whether it "
                "did: compare the first losses with its own", folder,
            )  # fmt: skip
            return


@torch.no_grad()
def read_tensors(folder: Path, metadata: Metadata, tensors: Iterable[tuple[Saved, torch.Tensor]]) -> None:
    """Plain tensors with one plan; merged experts one by one, by way of a matrix. No key comes twice."""
    plain: dict[str, _Part] = {}
    merged: list[tuple[str, torch.Tensor]] = []
    for saved, tensor in tensors:
        if saved.merged:
            merged.append((saved.key, tensor))
        else:
            plain[saved.key] = _Part(_bounds(tensor)[1], local(tensor))
    _Reading(folder, metadata, plain).run()
    for key, tensor in merged:
        (held, _, _), (first, row, column) = _bounds(tensor)
        depth = tensor.shape[2]
        matrix = local(tensor).new_full((held * depth, local(tensor).shape[1]), torch.nan, device="cpu")
        _Reading(folder, metadata, {key: _Part((first * depth, row), matrix)}).run()
        whole = matrix.view(held, depth, -1)[:, column : column + local(tensor).shape[2]]
        local(tensor).copy_(whole.transpose(1, 2))


def _bounds(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of this rank's part, and where it begins in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(sizes), tuple(offsets)


class _Reading(DefaultLoadPlanner):
    """Reads parts of saved tensors, for this rank alone."""

    def __init__(self, folder: Path, metadata: Metadata, parts: Mapping[str, _Part]) -> None:
        super().__init__()
        self._folder, self._metadata = folder, metadata
        self._parts = {key: part for key, part in parts.items() if part.target.numel()}

    def run(self) -> None:
        reader = SafeReader(self._folder)
        reader.set_up_storage_reader(self._metadata, True)
        items: list[ReadItem] = []
        for key, part in self._parts.items():
            entry: Any = self._metadata.state_dict_metadata[key]
            chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.target.shape)
            items += create_read_items_for_chunk_list(key, entry, [chunk])
        where = self._metadata.storage_data
        try:
            items.sort(key=lambda i: (where[i.storage_index].relative_path, where[i.storage_index].offset))
            reader.read_data(reader.prepare_local_plan(LoadPlan(items)), self).wait()
        except (OSError, UserError):
            raise
        except Exception as error:  # torch.load: of a type for each kind of damage
            raise UserError(f"{self._folder} is damaged: {first_line(error)}") from error

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.lookup_tensor(read_item.dest_index).detach()[
            tuple(
                slice(start, start + length)
                for start, length in zip(read_item.dest_offsets, read_item.lengths, strict=True)
            )
        ]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.fqn].target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
