"""What a save writes: the live tensors, or copies of them in the host's memory as they were at the call."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from shardyard.checkpoint.disks import Disks


class DiskPlanner(DefaultSavePlanner):
    """Writes the tensors as they are when they are written, and leaves on each disk what its ranks hold.

    Of tensors that several ranks hold, one rank of each disk writes its copy; on a shared disk that is DCP's
    own plan. So ranks of the same layout find all they need on their own disk.
    """

    def __init__(self, disks: Disks) -> None:
        super().__init__()
        self.disks = disks

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super()._create_global_plan(
            all_plans
        )  # which names each piece once, and checks them
        if self.disks.are_one:
            return plans, metadata
        plans = list(all_plans)
        for leader in self.disks.leaders:
            ranks = self.disks.ranks_of(leader)
            for rank, plan in zip(ranks, self._dedup_save_plans([all_plans[r] for r in ranks]), strict=True):
                plans[rank] = plan
        return plans, metadata


class SnapshotPlanner(DiskPlanner):
    """Writes `HostCopies`; the tensors may change as soon as those are taken."""

    def __init__(self, disks: Disks, copies: HostCopies) -> None:
        super().__init__(disks)
        self._copies = copies

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.plan = self._copies.plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._copies.of[write_item.index]


class HostCopies:
    """This rank's pieces of all tensors, by their place in the whole.

    The memory is used again by the next copies (``reused``): fresh memory costs more than the copy. For
    tensors of an accelerator it is pinned, and all their copies are in flight at once.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], *, reused: HostCopies | None = None) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        self.plan = planner.create_local_plan()
        self.of: dict[MetadataIndex, torch.Tensor] = {}
        waits = False
        for item in self.plan.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, torch.Tensor), f"{item.index.fqn} is no tensor"
            on_host = piece.device.type == "cpu"
            home = _home(piece, reused.of.get(item.index) if reused else None, pinned=not on_host)
            home.copy_(piece.detach(), non_blocking=not on_host)
            self.of[item.index] = home
            waits = waits or not on_host
        if waits:
            torch.accelerator.synchronize()


def _home(piece: torch.Tensor, before: torch.Tensor | None, *, pinned: bool) -> torch.Tensor:
    """Memory for a copy, and for no more than its elements."""
    if before is not None and before.shape == piece.shape and before.dtype == piece.dtype:
        return before
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=pinned)
