"""Reading a checkpoint into live tensors: verified first, whatever the number of ranks that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.blocked import Reblocking
from shardyard.checkpoint.disks import readers_of
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.manifest import damage, fault_of, read_manifest, read_run_state
from shardyard.checkpoint.safe_reader import SafeReader, read_metadata
from shardyard.checkpoint.state import model_tensors, optimizer_tensors, prepare_optimizer
from shardyard.checkpoint.writing import causes_of
from shardyard.errors import UserError


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides tensors. Without optimizer state only the weights were read."""

    run_state: dict[str, Any]
    has_optimizer: bool
    path: Path


def verify_together(path: Path, peers: Peers) -> None:
    """Check sizes of all files, and hashes, each rank its share of its disk. Every rank calls it.

    Raises:
        UserError: on every rank, naming the damaged files of the first rank that found any.
    """
    what = str(path)
    disks = readers_of(path, peers)

    def whole() -> None:
        if fault := fault_of(path):
            raise UserError(f"{path} {fault}")

    def share_is_right() -> None:
        files = read_manifest(path).files
        names = sorted(files)[disks.mates.index(peers.rank) :: len(disks.mates)]
        if faults := damage(path, names, files):
            raise UserError(f"{path} is damaged: {'; '.join(faults)}")

    disks.each(what, whole)
    peers.agree(what, share_is_right)


def read_checkpoint(
    path: Path, peers: Peers, *, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Restored:
    """Read ``path``, which has been verified, into the live tensors. Every rank calls it.

    Raises:
        UserError: it is hostile, or holds other tensors than this model has, or a rank's disk lacks a file
            that the rank needs.
    """
    what = f"loading checkpoint {path}"
    run_state = peers.agree(what, lambda: read_run_state(path))[0]
    saved = peers.agree(what, lambda: _saved_tensors(path))[0]
    has_optimizer = optimizer is not None and any(key.startswith("optimizer.") for key in saved)
    tensors = model_tensors(model)
    if has_optimizer:
        assert optimizer is not None
        prepare_optimizer(optimizer)
        tensors |= optimizer_tensors(model, optimizer)
    wanted = Holdings.of(tensors, peers).facts
    held = saved if has_optimizer else {key: s for key, s in saved.items() if key.startswith("model.")}
    anew = Reblocking(model, optimizer if has_optimizer else None, saved)
    reblocks = anew.is_needed(wanted)
    if reblocks:
        tensors, wanted, held = (
            {key: value for key, value in each.items() if not anew.concerns(key)}
            for each in (tensors, wanted, held)
        )
    peers.agree(what, lambda: _compare(wanted, held))
    try:
        dcp.load(tensors, storage_reader=SafeReader(path), process_group=peers.group, no_dist=peers.alone)
    except dcp.api.CheckpointException as error:
        raise UserError(f"{what}: {causes_of(error)}") from error
    if reblocks:
        peers.agree(what, lambda: anew.read(path))
    return Restored(run_state, has_optimizer, path)


def _saved_tensors(path: Path) -> dict[str, Any]:
    """(shape, dtype) by key; `read_metadata` lets nothing but tensors through."""
    entries: Any = read_metadata(path).state_dict_metadata
    return {key: (tuple(entry.size), entry.properties.dtype) for key, entry in entries.items()}


def _compare(wanted: dict[str, Any], held: dict[str, Any]) -> None:
    missing, foreign = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    other = sorted(key for key in wanted.keys() & held.keys() if wanted[key] != held[key])
    faults = [
        f"{len(keys)} {what} (such as {keys[0]})"
        for keys, what in (
            (missing, "missing"),
            (foreign, "unknown to it"),
            (other, "of another shape or dtype"),
        )
        if keys
    ]
    if faults:
        only_state = all(key.startswith("optimizer.") for key in (*missing, *foreign, *other))
        hint = "; training.optimizer and what model.freeze leaves to train have to be the same, as has "
        hint = f"{hint}training.optimizer_state_dtype" if only_state else ""
        raise UserError(
            f"it was written by another model or set-up: of the tensors {', '.join(faults)}{hint}"
        )
