"""Checkpoints of a run: each complete or absent.

A save writes DCP files under a temporary name, all ranks agree that theirs is done, a manifest with sizes and
hashes follows, and only then the folder gets its name, `latest` points to it, and old ones go. What is not a
tensor is JSON. `best` points to the checkpoint of the lowest validation loss, which stays beside the newest
ones.

The manifest numbers the saves of a folder. The newest checkpoint is the one that was saved last, which is not
the one with the highest step when a run went back to an earlier checkpoint; no clock is asked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemWriter

from shardyard.checkpoint.agreement import Peers
from shardyard.checkpoint.holdings import Holdings
from shardyard.checkpoint.safe_reader import SafeReader, read_metadata
from shardyard.checkpoint.state import model_tensors, optimizer_tensors, prepare_optimizer
from shardyard.durable import sync, write_durably
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

FORMAT = 1
MANIFEST, RUN_STATE, LATEST, BEST = "manifest.json", "run_state.json", "latest", "best"
_NAME = re.compile(r"global_step_(\d+)")
_FULL_MIB = 16.0
"""A disk with less free space than this counts as full when a write has failed."""
_TEMPORARY = ".tmp-global_step_"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides tensors. Without optimizer state only the weights were read."""

    run_state: dict[str, Any]
    has_optimizer: bool


class CheckpointStore:
    """The folder ``<output_dir>/checkpoints`` of a run.

    All ranks call ``save`` and ``load`` together; the other methods only look at the folder.
    """

    def __init__(
        self, output_dir: Path, *, save_total_limit: int | None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder = output_dir / "checkpoints"
        self.limit = save_total_limit if save_total_limit and save_total_limit > 0 else None
        self.peers = Peers(group)

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        run_state: dict[str, Any],
        best: bool = False,
    ) -> Path:
        """Write ``global_step_<step>``; without ``optimizer`` the model only. With ``best`` it becomes the
        best one, and the best one so far counts as any other.

        Raises:
            UserError: on every rank, when one cannot write (disk full, no permission); nothing is left
                behind, and earlier checkpoints are untouched.
        """
        path, temporary = self.folder / f"global_step_{step}", self.folder / f"{_TEMPORARY}{step}"
        what = f"saving checkpoint {path}"
        tensors = model_tensors(model)
        if optimizer is not None:
            prepare_optimizer(optimizer)  # parameters that have had no gradient have no state yet
            tensors |= optimizer_tensors(model, optimizer)
        try:
            self.peers.first(what, lambda: self._make_way(temporary))
            self.peers.agree(what, lambda: temporary.mkdir(parents=True, exist_ok=True))  # per-node disks
            self._write(tensors, temporary, what)
            hashes = self.peers.agree(what, lambda: _hash_own_files(temporary, self.peers.rank))
            files = {name: facts for share in hashes for name, facts in share.items()}
            self.peers.first(what, lambda: self._publish(temporary, path, files, run_state, best))
        except BaseException:
            if self.peers.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self.peers.is_first:
            self._retain(path)
        return path

    def point_best(self, step: int | None) -> bool:
        """Make the complete checkpoint of ``step`` the best one, or none; all ranks call it. Whether it did:
        without such a checkpoint there is no best one.
        """

        def point() -> bool:
            path = None if step is None else self.folder / f"global_step_{step}"
            if path is None or fault_of(path):
                (self.folder / BEST).unlink(missing_ok=True)
                return False
            self._point(BEST, path)
            return True

        return self.peers.first(f"writing {self.folder / BEST}", point)

    def best(self) -> Path | None:
        """The complete checkpoint that `best` points to."""
        try:
            name = (self.folder / BEST).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        path = self.folder / name
        return path if _NAME.fullmatch(name) and fault_of(path) is None else None

    def load(self, path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Restored:
        """Read ``path`` into the live tensors, whatever the number of ranks that wrote it.

        Raises:
            UserError: it is incomplete, damaged, hostile, or holds other tensors than this model has.
        """
        what = f"loading checkpoint {path}"
        run_state = self.peers.agree(what, lambda: _verify(path, self.peers))[0]
        saved = self.peers.agree(what, lambda: _saved_tensors(path))[0]
        has_optimizer = optimizer is not None and any(key.startswith("optimizer.") for key in saved)
        tensors = model_tensors(model)
        if has_optimizer:
            assert optimizer is not None
            prepare_optimizer(optimizer)
            tensors |= optimizer_tensors(model, optimizer)
        wanted = Holdings.of(tensors, self.peers).facts
        held = saved if has_optimizer else {key: s for key, s in saved.items() if key.startswith("model.")}
        self.peers.agree(what, lambda: _compare(path, wanted, held))
        reader = SafeReader(path)
        try:
            dcp.load(tensors, storage_reader=reader, process_group=self.peers.group, no_dist=self.peers.alone)
        except dcp.api.CheckpointException as error:
            raise UserError(f"{what}: {_causes(error)}") from error
        return Restored(run_state, has_optimizer)

    def latest(self) -> Path | None:
        """The complete checkpoint that was saved last."""
        complete = self.complete()
        return complete[-1] if complete else None

    def complete(self) -> list[Path]:
        """Complete checkpoints, in the order in which they were saved."""
        found = self.folder.glob("global_step_*") if self.folder.is_dir() else ()
        named = [(int(match[1]), path) for path in found if (match := _NAME.fullmatch(path.name))]
        whole = [(_sequence(path), step, path) for step, path in named if fault_of(path) is None]
        return [path for _, _, path in sorted(whole)]

    def resolve(self, wanted: str) -> Path | None:
        """The checkpoint that ``training.resume_from_checkpoint`` names; None for ``latest`` without any yet.

        Raises:
            UserError: a path that is not a complete checkpoint.
        """
        if wanted == LATEST:
            for path in sorted(self.folder.glob("global_step_*")) if self.folder.is_dir() else ():
                if _NAME.fullmatch(path.name) and (fault := fault_of(path)):
                    logger.warning("passing over %s: it %s", path, fault)
            return self.latest()
        path = Path(wanted).expanduser()
        if fault := fault_of(path):
            inside = CheckpointStore(path, save_total_limit=None).latest()
            hint = f"; did you mean {inside}?" if inside else ""
            raise UserError(f"training.resume_from_checkpoint: {path} {fault}{hint}")
        return path

    def _make_way(self, temporary: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _write(self, tensors: dict[str, torch.Tensor], folder: Path, what: str) -> None:
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        try:
            dcp.save(
                dict(tensors), storage_writer=writer, process_group=self.peers.group, no_dist=self.peers.alone
            )
        except dcp.api.CheckpointException as error:
            if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
                raise KeyboardInterrupt from error
            free = shutil.disk_usage(self.folder).free / 2**20
            full = "no space is left; " if free < _FULL_MIB else ""
            raise UserError(f"{what}: {full}{_causes(error)} ({free:,.0f} MiB are free there)") from error

    def _publish(
        self, temporary: Path, path: Path, files: dict[str, Any], run_state: dict[str, Any], best: bool
    ) -> None:
        write_durably(temporary / RUN_STATE, json.dumps(run_state, indent=1))
        files = files | {name: _facts(temporary / name) for name in (RUN_STATE, ".metadata")}
        manifest = {
            "format": FORMAT,
            "sequence": 1 + max(map(_sequence, self.complete()), default=0),
            "torch": torch.__version__,
            "ranks": self.peers.size,
            "files": files,
        }
        write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1))
        sync(temporary)
        if fault := fault_of(temporary):
            raise UserError(
                f"{temporary} {fault}. Rank 0 does not see what the other ranks wrote: training.output_dir "
                "has to be a folder that all nodes share."
            )
        if path.exists():  # the same step again, after a resume from an earlier one
            replaced = path.with_name(f"{_TEMPORARY}{path.name}.replaced")
            path.rename(replaced)
            temporary.rename(path)
            shutil.rmtree(replaced)
        else:
            temporary.rename(path)
        sync(self.folder)
        self._point(LATEST, path)
        if best:
            self._point(BEST, path)

    def _point(self, name: str, path: Path) -> None:
        pointer = self.folder / f"{_TEMPORARY}{name}"
        write_durably(pointer, path.name + "\n")
        pointer.replace(self.folder / name)
        sync(self.folder)

    def _retain(self, newest: Path) -> None:
        """Remove what the limit no longer keeps: the newest ones, and beside them the best one.

        A failure costs space and nothing else, so it only warns.
        """
        if self.limit is None:
            return
        best = self.best()
        others = [path for path in self.complete() if path not in (newest, best)]
        kept = self.limit - (newest != best)
        for path in others[: max(len(others) - kept, 0)]:
            logger.info("Removing old checkpoint: %s", path)
            try:
                # Out of its name first: a removal cut short leaves nothing that looks like a checkpoint.
                doomed = path.with_name(f"{_TEMPORARY}{path.name}.removed")
                path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                logger.warning("cannot remove %s: %s", path, error)


def fault_of(path: Path) -> str | None:
    """Why ``path`` is not a complete checkpoint of ours (by its manifest and file sizes); None when it is."""
    if not path.is_dir():
        return "does not exist"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        written = {str(name): int(facts["bytes"]) for name, facts in manifest["files"].items()}
        form = manifest["format"]
    except FileNotFoundError:
        return f"is not a complete checkpoint: it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
    if form != FORMAT:
        return f"has format {form}; this program reads {FORMAT}"
    for name, wanted in written.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != wanted:
            found = "is missing" if size is None else f"has {size} bytes"
            return f"is damaged: {name} {found}, {wanted} were written"
    return None


def _sequence(path: Path) -> int:
    """The place of a complete checkpoint among the saves of its folder."""
    return int(json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("sequence", 0))


def _causes(error: dcp.api.CheckpointException) -> str:
    """What went wrong, once per rank that failed; DCP tells every rank of all of them."""
    failures = sorted(error.failures.items())
    lines = {
        f"{cause}".strip().partition("\n")[0] or type(cause).__name__: rank for rank, (cause, _) in failures
    }
    return "; ".join(f"rank {rank}: {line}" for line, rank in lines.items())


def _verify(path: Path, peers: Peers) -> dict[str, Any]:
    """Sizes of all files, hashes of this rank's share of them; the run state."""
    if fault := fault_of(path):
        raise UserError(f"{path} {fault}")
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    for name in sorted(files)[peers.rank :: peers.size]:
        if _facts(path / name)["sha256"] != files[name]["sha256"]:
            raise UserError(f"{path} is damaged: the content of {name} has changed since it was written")
    return json.loads((path / RUN_STATE).read_text(encoding="utf-8"))


def _saved_tensors(path: Path) -> dict[str, Any]:
    """(shape, dtype) by key; `read_metadata` lets nothing but tensors through."""
    entries: Any = read_metadata(path).state_dict_metadata
    return {key: (tuple(entry.size), entry.properties.dtype) for key, entry in entries.items()}


def _compare(path: Path, wanted: dict[str, Any], held: dict[str, Any]) -> None:
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
        raise UserError(f"{path} was written by another model or set-up: tensors {', '.join(faults)}")


def _hash_own_files(folder: Path, rank: int) -> dict[str, Any]:
    return {path.name: _facts(path) for path in sorted(folder.glob(f"__{rank}_*.distcp"))}


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
