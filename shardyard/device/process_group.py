"""Start and end of torch.distributed, and the two ways in which ranks talk besides tensors of the model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardyard.device.device import Device
from shardyard.device.interface import choose_gloo_interface
from shardyard.device.peers import PeerWatch, make_watch
from shardyard.device.restart import START
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.device")

_HEARTBEAT_S = 30.0
_LEAVE_S = 5.0
_STORE_KEPT_S = 60.0
"""How long rank 0 keeps the store for others at the end of a run, where no launcher keeps it."""


class ProcessGroup:
    """The ranks of this run.

    `gather` carries a few numbers of each rank to all ranks in one collective; `publish` and `wait` hand a
    text over through the store, without a collective, for work that may take longer than a collective's time
    limit.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, watch: PeerWatch | None = None) -> None:
        self._store = store
        self._watch = watch
        self.rank = rank
        self.world_size = world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.node_rank = int(os.environ.get("GROUP_RANK", "0"))
        self.num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """All ranks' numbers as fp64 [W, n], row r from rank r. The only collective of small values."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = torch.empty(self.world_size, len(mine), dtype=torch.float64)
        dist.all_gather_single(rows.view(-1), mine)
        return rows

    def gather_objects(self, value: object) -> list:
        """Every rank's picklable value, on every rank; for rare paths such as a fault report."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        self.gather([0.0])

    def publish(self, key: str, value: str) -> None:
        self._store.set(f"shardyard/{key}", value)

    def wait(self, key: str) -> str:
        """The value that another rank publishes under ``key``; a line every half minute says that we wait."""
        name, started, told = f"shardyard/{key}", time.monotonic(), 0.0
        while not self._store.check([name]):
            waited = time.monotonic() - started
            if waited - told > _HEARTBEAT_S:
                told = waited
                logger.info("rank %d waits for %s (%.0f s)", self.rank, key, waited)
            time.sleep(0.1)
        return self._store.get(name).decode()

    def leave_together(self) -> None:
        """Wait some seconds at most until every rank is here: rank 0 may hold the store others still read."""
        self.publish(f"left/{self.rank}", "")
        names = [f"shardyard/left/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + _LEAVE_S
        while self.rank == 0 and not self._store.check(names) and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self) -> None:
        """Leave the run, which is complete on this rank."""
        if self._watch is not None:
            self._watch.finish("done")
            if self.rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
                self._keep_store(self._watch)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _keep_store(self, watch: PeerWatch) -> None:
        deadline = time.monotonic() + _STORE_KEPT_S
        while not watch.everyone_is_done() and time.monotonic() < deadline:
            time.sleep(0.1)


def start_process_group(device: Device, *, timeout_minutes: float = 30.0) -> ProcessGroup:
    """Join the ranks that the launcher started; alone, when there was no launcher.

    Raises:
        UserError: the rendezvous cannot be reached.
    """
    device.bind()
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        store, rank, world_size = dist.HashStore(), 0, 1
    else:
        try:
            store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        except (dist.DistError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"cannot meet the other ranks at {address} (MASTER_ADDR, MASTER_PORT): {error}. Check that "
                f"rank 0's "
                "machine is reachable and the port is free."
            ) from error
        # One store may outlive several starts of the ranks: what an earlier one wrote is not for this one.
        starts = os.environ.get(START, "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start/{'.'.join(starts)}", store)
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and (name := choose_gloo_interface()):
        logger.info("rank %d talks to the other machines through %s (GLOO_SOCKET_IFNAME)", rank, name)
    watch = make_watch(store, rank, world_size)
    if watch is not None:
        watch.announce()
    dist.init_process_group(
        device.backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
        device_id=device.torch_device if device.type == "cuda" else None,
    )  # fmt: skip
    if watch is not None:
        watch.start()
    return ProcessGroup(store, rank, world_size, watch)
