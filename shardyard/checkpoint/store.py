"""Checkpoints of a run: each complete or absent.

A save writes DCP files under a temporary name, all ranks agree that theirs is done, a manifest with sizes and
hashes follows, and only then the folder gets its name, `latest` points to it, and old ones go. What is not a
tensor is JSON. `best` points to the checkpoint of the lowest validation loss, which stays beside the newest
ones.

A save that does not wait copies this rank's tensors to the host's memory and does all else in a thread, over
a process group of its own.

The manifest numbers the saves of a folder. The newest checkpoint is the one that was saved last, which is not
the one with the highest step when a run went back to an earlier checkpoint; no clock is asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.background import Background, State
from shardyard.checkpoint.disks import Disks, find_disks
from shardyard.checkpoint.folder import (
    BEST,
    LATEST,
    checkpoint_path,
    clean,
    complete,
    named,
    point,
    pointed,
    step_of,
)
from shardyard.checkpoint.loading import Restored, read_checkpoint, verify_together
from shardyard.checkpoint.manifest import ManifestError, fault_of, read_manifest
from shardyard.checkpoint.publishing import Assets, Job, publish_job
from shardyard.checkpoint.retention import retain
from shardyard.checkpoint.snapshot import DiskPlanner, HostCopies, SnapshotPlanner
from shardyard.checkpoint.space import Space, check_space, estimate
from shardyard.checkpoint.state import model_tensors, optimizer_tensors, prepare_optimizer
from shardyard.checkpoint.writing import write_tensors
from shardyard.errors import UserError

__all__ = ["CheckpointStore", "Restored", "background_group", "fault_of"]

logger = logging.getLogger("shardyard.checkpoint")

_BACKGROUND_TIMEOUT = timedelta(hours=2)
"""Ranks wait for the slowest disk."""


def background_group() -> dist.ProcessGroup | None:
    """A group of its own for saves beside the training, over the host's network. All ranks call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)
    return group if isinstance(group, dist.ProcessGroup) else None


class CheckpointStore:
    """The folder ``<output_dir>/checkpoints`` of a run.

    All ranks together call the constructor (with ``background``), ``save``, ``wait``, ``load``,
    ``load_latest``, ``point_best`` and ``check_space``; the other methods only look at this rank's folder.

    Args:
        background: makes the group of saves that do not wait (`background_group`); None: every save waits.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        save_total_limit: int | None,
        group: dist.ProcessGroup | None = None,
        background: Callable[[], dist.ProcessGroup | None] | None = None,
    ) -> None:
        self.folder = output_dir / "checkpoints"
        self.limit = save_total_limit if save_total_limit and save_total_limit > 0 else None
        self.peers = Peers(group)
        self._peers_beside = Peers(background()) if background is not None else None
        self._background = Background()
        self._copies: HostCopies | None = None
        self._disks: Disks | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        run_state: dict[str, Any],
        best: bool = False,
        wait: bool = True,
        assets: Assets | None = None,
    ) -> Path:
        """Write ``global_step_<step>``; without ``optimizer`` the model only. With ``best`` it becomes the
        best one, and the best one so far counts as any other.

        With ``wait`` it is complete when this returns. Without, this returns once the tensors are copied:
        they may change then, the checkpoint holds their values of the call, and `poll` and `wait` tell what
        became of it. ``assets`` is called with a folder to fill with what the checkpoint needs to be used
        alone (config, tokenizer), on one rank of each disk, maybe in another thread; it must not look at the
        weights.

        Raises:
            UserError: on every rank, when one cannot write (disk full, no permission); nothing is left
                behind, and earlier checkpoints are untouched. Or the save before, which did not wait, has
                failed: then this one has not begun; call `wait` before to tell the two apart.
        """
        self.wait()
        job = Job(checkpoint_path(self.folder, step), json.dumps(run_state, indent=1), best, assets)
        tensors = model_tensors(model)
        if optimizer is not None:
            prepare_optimizer(optimizer)  # parameters that have had no gradient have no state yet
            tensors |= optimizer_tensors(model, optimizer)
        if wait:
            self._make(job, self.peers, tensors, DiskPlanner)
            return job.path
        if self._peers_beside is None:
            raise ValueError("a store without a background group cannot save beside the training")
        self._copies = copies = HostCopies(tensors, reused=self._copies)
        self._background.start(job.path, lambda: self._make_beside(job, copies))
        return job.path

    def poll(self) -> State:
        """Of the last save that did not wait, on this rank: ``running``, or ``finished`` or ``failed`` until
        `wait` has told, or ``idle``. No rank is asked; the verdict is everyone's, though not at the same
        moment."""
        return self._background.poll()

    def wait(self) -> Path | None:
        """Wait for the save that is under way; its checkpoint, or None when there was none since then.

        Raises:
            UserError: it has failed; the message is the same on every rank.
        """
        return self._background.wait()

    def close(self) -> None:
        """Wait for the save that is under way, whatever comes of it, and give back the memory of copies. A
        failure is said."""
        try:
            self._background.wait()
        except (UserError, RuntimeError) as error:
            logger.error("%s", error)
        self._copies = None

    def check_space(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Space:
        """How large a checkpoint is, and what this rank's disk offers; see `space`.

        Raises:
            UserError: on every rank, when a disk cannot be written or has no room for one checkpoint.
        """
        size = estimate(model, optimizer, self.peers)
        disks = self._find_disks(self.peers)

        def look() -> Space:
            share = size * len(disks.mates) // disks.peers.size
            return check_space(self.folder, share, keep=self.limit)

        try:
            spaces = disks.each("training.output_dir", look)
        except UserError:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # nobody has saved here: no run is to be seen
            raise
        return spaces[disks.leaders.index(disks.leader[disks.peers.rank])]

    def point_best(self, step: int | None) -> bool:
        """Make the complete checkpoint of ``step`` the best one, or none; all ranks call it. Whether it did:
        without such a checkpoint there is no best one.
        """
        self._background.settle()
        path = None if step is None else checkpoint_path(self.folder, step)
        pointer = self.folder / BEST
        what = f"writing {pointer}"
        if all(self.peers.agree(what, lambda: path is not None and fault_of(path) is None)):
            assert path is not None
            self._find_disks(self.peers).each(what, lambda: point(self.folder, BEST, path))
            return True
        self.peers.agree(what, lambda: pointer.unlink(missing_ok=True))
        return False

    def best(self) -> Path | None:
        """The complete checkpoint that `best` points to."""
        return pointed(self.folder, BEST)

    def load(self, path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Restored:
        """Read ``path`` into the live tensors, whatever the number of ranks that wrote it.

        Raises:
            UserError: it is incomplete, damaged, hostile, or holds other tensors than this model has.
        """
        self._background.settle()
        verify_together(path, self.peers)
        return read_checkpoint(path, self.peers, model=model, optimizer=optimizer)

    def load_latest(self, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Restored | None:
        """Read the newest checkpoint whose files are what was written, by their hashes, and which every rank
        has; None without any. Each one that is passed over is named in a warning.

        Raises:
            UserError: that one is hostile, or holds other tensors than this model has.
        """
        self._background.settle()
        shares = [set(share) for share in self.peers.agree(f"looking at {self.folder}", self._numbered)]
        everywhere = set.intersection(*shares)
        for numbered in sorted(set.union(*shares), key=_by_sequence, reverse=True):
            path = self.folder / numbered[1]
            if numbered not in everywhere:
                self._pass_over(f"not every machine has the same {path}")
                continue
            try:
                verify_together(path, self.peers)
            except UserError as error:
                self._pass_over(str(error))
                continue
            return read_checkpoint(path, self.peers, model=model, optimizer=optimizer)
        return None

    def latest(self) -> Path | None:
        """The complete checkpoint that was saved last."""
        found = self.complete()
        return found[-1] if found else None

    def complete(self) -> list[Path]:
        """Complete checkpoints, in the order in which they were saved."""
        return complete(self.folder)

    def resolve(self, wanted: str) -> Path | None:
        """The checkpoint that ``training.resume_from_checkpoint`` names, by file sizes; None for ``latest``
        without any yet. `load_latest` looks at the contents too.

        Raises:
            UserError: a path that is not a complete checkpoint.
        """
        if wanted == LATEST:
            tell_incomplete(self.folder)
            return self.latest()
        path = Path(wanted).expanduser()
        if fault := fault_of(path):
            inside = _newest_around(path)
            hint = f"; did you mean {inside}?" if inside else ""
            raise UserError(f"training.resume_from_checkpoint: {path} {fault}{hint}")
        return path

    def clean(self) -> None:
        """Remove what an earlier process of this run has left under temporary names. One rank of each disk
        calls it, before anything is saved."""
        clean(self.folder)

    def _numbered(self) -> list[tuple[int, str]]:
        """(sequence, name) of what has a manifest; its files are not looked at yet."""
        found = []
        for path in named(self.folder):
            try:
                found.append((read_manifest(path).sequence, path.name))
            except ManifestError as error:
                self._pass_over(f"{path} {error}")
        return found

    def _pass_over(self, reason: str) -> None:
        if self.peers.is_first:
            logger.warning("passing over a checkpoint: %s", reason)

    def _find_disks(self, peers: Peers) -> Disks:
        if self._disks is None:
            self._disks = find_disks(self.folder, peers)
        return Disks(peers, self._disks.leader)

    def _make_beside(self, job: Job, copies: HostCopies) -> None:
        assert self._peers_beside is not None
        self._make(job, self._peers_beside, {}, lambda disks: SnapshotPlanner(disks, copies))

    def _make(
        self,
        job: Job,
        peers: Peers,
        tensors: dict[str, torch.Tensor],
        planner_for: Callable[[Disks], DiskPlanner],
    ) -> None:
        """Write, publish, retain. Every rank calls it, at once or each in its thread."""
        temporary = job.temporary
        disks = None
        try:
            disks = self._find_disks(peers)
            disks.each(job.what, lambda: _make_way(temporary))
            mine = write_tensors(tensors, temporary, planner_for(disks), peers, job.what)
            publish_job(job, disks, peers.gather(mine))
        except BaseException:
            if disks is not None and disks.leads:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if disks.leads and self.limit is not None:
            retain(self.folder, self.limit)


def tell_incomplete(folder: Path) -> None:
    for path in named(folder):
        if fault := fault_of(path):
            logger.warning("passing over %s: it %s", path, fault)


def _newest_around(path: Path) -> Path | None:
    """What a user may have meant with a run's folder, its ``checkpoints``, or a pointer in that."""
    if path.is_file() and path.name in (LATEST, BEST):
        return pointed(path.parent, path.name)
    found = complete(path / "checkpoints") or complete(path)
    return found[-1] if found else None


def _by_sequence(one: tuple[int, str]) -> tuple[int, int, str]:
    """The order of `complete`; of copies all ranks have to take the same one."""
    return one[0], step_of(Path(one[1])) or 0, one[1]


def _make_way(temporary: Path) -> None:
    clean(temporary.parent)
    temporary.mkdir()
