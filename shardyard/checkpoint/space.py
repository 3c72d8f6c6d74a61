"""How large a checkpoint is, how fast the disk takes it and how many fit, before the first step."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardyard.checkpoint.folder import complete, temporary_path
from shardyard.durable import flush, sync
from shardyard.errors import UserError

if TYPE_CHECKING:
    from torch import nn, optim

    from shardyard.checkpoint.agreement import Peers

_PROBE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Space:
    """What a disk offers for checkpoints of ``size`` bytes, ``keep`` of which are to stay (None: all)."""

    folder: Path
    size: int
    free: int
    bytes_per_s: float
    held: int
    """Complete checkpoints that lie there already."""
    keep: int | None

    @property
    def room(self) -> int:
        """How many more fit."""
        return self.free // self.size if self.size else 0

    @property
    def warning(self) -> str | None:
        """One more than the limit has to fit: an old one goes when the new one is complete."""
        if self.keep is None or self.room + self.held >= self.keep + 1:
            return None
        fits = self.room + self.held - 1
        lower = f", or set training.save_total_limit: {fits}" if 0 < fits < self.keep else ""
        return (
            f"{self.folder} has room for {self.room} more checkpoints of {in_bytes(self.size)}; "
            f"training.save_total_limit {self.keep} needs {self.keep + 1 - self.held}, as an old one goes "
            f"only after the new one is complete. Free some space{lower}"
        )

    def __str__(self) -> str:
        seconds, rate = self.size / self.bytes_per_s, self.bytes_per_s / 1e6
        return (
            f"a checkpoint is {in_bytes(self.size)}, about {seconds:.0f} s at {rate:.0f} MB/s; "
            f"{in_bytes(self.free)} free, room for {self.room}"
        )


def estimate(model: nn.Module, optimizer: optim.Optimizer | None, peers: Peers | None = None) -> int:
    """Bytes of the tensors of a checkpoint over all ranks, each counted once, from their shapes.

    Parameters, buffers, and of each trained parameter the optimizer's state, whether or not it has been made
    yet. File headers add about 1.5 KiB to each tensor of each rank. Every rank calls it.
    """
    from shardyard.checkpoint.agreement import Peers
    from shardyard.checkpoint.holdings import Holdings
    from shardyard.checkpoint.state import model_tensors
    from shardyard.optim import state_bytes

    tensors: dict[str, Any] = model_tensors(model)
    trained = {} if optimizer is None else state_bytes(optimizer)
    peers = peers or Peers()
    facts = Holdings.of(tensors, peers).facts
    own = {name: trained[p] for name, p in model.named_parameters() if p in trained}
    states: dict[str, int] = {}
    for others in peers.gather(own):
        states |= others
    return sum(dtype.itemsize * math.prod(shape) for shape, dtype in facts.values()) + sum(states.values())


def check_space(folder: Path, size: int, *, keep: int | None) -> Space:
    """Write a few MiB durably to ``folder`` and take them away again; what that tells. One process calls it.

    Args:
        size: bytes of one checkpoint on this disk.
        keep: ``training.save_total_limit``; None keeps all.

    Raises:
        UserError: nothing can be written there, or not even one checkpoint fits.
    """
    probe = temporary_path(folder, f"space-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        rate = _write_probe(probe, min(_PROBE_BYTES, max(free // 4, 1)))
    except OSError as error:
        raise UserError(
            f"training.output_dir: {folder} cannot be written: {error.strerror}. Free some space or name "
            "another folder."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    if free < size:
        raise UserError(
            f"training.output_dir: a checkpoint takes {in_bytes(size)}, and {folder} has {in_bytes(free)} "
            "free: none could be saved. Free some space or name another folder (training.save_only_model: "
            "true leaves out two thirds)."
        )
    held = len(complete(folder))
    return Space(folder, size, free, rate, held, keep if keep and keep > 0 else None)


def in_bytes(size: float) -> str:
    """A size for people, in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _write_probe(path: Path, length: int) -> float:
    """Bytes a second, with the data and the name on the disk."""
    block = secrets.token_bytes(min(length, 2**20))  # no disk packs it
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, length, len(block)):
            file.write(block[: length - start])
        flush(file)
    sync(path.parent)
    return length / max(time.perf_counter() - started, 1e-6)
