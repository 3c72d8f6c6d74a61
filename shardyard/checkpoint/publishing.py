"""From written tensors to a checkpoint with a name: run state, assets, manifest, rename, pointers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardyard.checkpoint.disks import Disks
from shardyard.checkpoint.folder import BEST, LATEST, next_sequence, publish, step_of, temporary_path
from shardyard.checkpoint.manifest import (
    ASSETS,
    METADATA,
    RUN_STATE,
    FileFacts,
    Manifest,
    facts_of,
    fault_of,
    write_manifest,
)
from shardyard.checkpoint.writing import space_told
from shardyard.durable import sync, write_durably
from shardyard.errors import UserError

Assets = Callable[[Path], None]


@dataclass(frozen=True)
class Job:
    """What a save needs besides tensors, as it was at the call."""

    path: Path
    run_state: str
    best: bool
    assets: Assets | None

    @property
    def temporary(self) -> Path:
        return temporary_path(self.path.parent, step_of(self.path))

    @property
    def what(self) -> str:
        return f"saving checkpoint {self.path}"


def publish_job(job: Job, disks: Disks, shares: list[dict[str, FileFacts]]) -> None:
    """Finish each disk's folder, and give all their names when all are finished."""
    sequence = max(disks.each(job.what, lambda: next_sequence(job.path.parent)))
    here = {name: facts for rank in disks.mates for name, facts in shares[rank].items()}
    elsewhere = {
        name: facts
        for rank, share in enumerate(shares)
        if rank not in disks.mates
        for name, facts in share.items()
    }

    def finish() -> None:
        folder = job.temporary
        write_durably(folder / RUN_STATE, job.run_state)
        files = here | {name: facts_of(folder / name) for name in (RUN_STATE, METADATA)}
        if job.assets is not None:
            files |= _write_assets(folder, job.assets)
        manifest = Manifest(
            files, sequence=sequence, ranks=disks.peers.size, saved_at=round(time.time(), 3),
            torch=torch.__version__, elsewhere=elsewhere,
        )  # fmt: skip
        write_manifest(folder, manifest)
        sync(folder)
        if fault := fault_of(folder):
            raise UserError(f"{folder} {fault}: what ranks wrote is not what their disk shows")

    pointers = [LATEST, BEST] if job.best else [LATEST]
    disks.each(job.what, lambda: _telling_space(job, finish))
    disks.each(job.what, lambda: _telling_space(job, lambda: publish(job.temporary, job.path, pointers)))


def _telling_space(job: Job, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        full, free = space_told(job.path.parent)
        raise UserError(f"{job.what}: {full}{error.strerror or error}{free}") from error


def _write_assets(folder: Path, assets: Assets) -> dict[str, FileFacts]:
    """Let the caller fill the folder ``assets``, and make it durable."""
    home = folder / ASSETS
    home.mkdir()
    assets(home)
    found = {}
    for path in sorted(home.rglob("*")):
        sync(path)
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = facts_of(path)
    sync(home)
    return found
