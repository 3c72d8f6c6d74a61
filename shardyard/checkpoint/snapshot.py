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

    Tensors of an accelerator are copied into pinned memory that is used again by the next copies
    (``reused``), all in flight at once; those on the host are cloned, so that the memory is free between
    saves.
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
            piece = piece.detach()
            if piece.device.type == "cpu":
                self.of[item.index] = _contiguous_clone(piece)
                continue
            home = _home(piece, reused.of.get(item.index) if reused else None)
            home.copy_(piece, non_blocking=True)
            self.of[item.index] = home
            waits = True
        if waits:
            torch.accelerator.synchronize()

    def keep_pinned(self) -> HostCopies | None:
        """What the next copies may use again: pinned memory, which is slow to come by. None without any."""
        self.of = {index: tensor for index, tensor in self.of.items() if tensor.is_pinned()}
        return self if self.of else None


def _contiguous_clone(piece: torch.Tensor) -> torch.Tensor:
    """A copy that holds no more memory than its elements take."""
    return torch.empty(piece.shape, dtype=piece.dtype).copy_(piece)


def _home(piece: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    if before is not None and before.shape == piece.shape and before.dtype == piece.dtype:
        return before
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
