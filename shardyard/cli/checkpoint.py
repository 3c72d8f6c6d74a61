"""``shardyard checkpoint list | verify | prune``: look at the checkpoints of a run, and make room."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.checkpoint.folder import (
    BEST,
    LATEST,
    age_s,
    complete,
    leftovers,
    named,
    pointed,
    remove,
    step_of,
)
from shardyard.checkpoint.manifest import MANIFEST, Manifest, ManifestError, fault_of, read_manifest, verify
from shardyard.checkpoint.retention import expired
from shardyard.checkpoint.space import in_bytes
from shardyard.cli.words import take_flag, take_number
from shardyard.errors import UserError

CHECKPOINT_HELP = """\
usage: shardyard checkpoint list DIR
       shardyard checkpoint verify DIR
       shardyard checkpoint prune DIR --keep N [--incomplete] [--dry-run]

DIR is a run's output_dir, its folder `checkpoints`, or (list, verify) one checkpoint global_step_N.

list:    what is there, in the order in which it was saved; incomplete ones with the reason
verify:  read every file and compare it with what was written; names each damaged file, exit code 2
prune:   remove all but the N newest complete checkpoints and the best one; asks nothing
  --incomplete  also what is not complete, and what a killed save has left, if nothing in it was written
                within the last hour
  --dry-run     say what would go, and remove nothing
"""
_IDLE_S = 3600.0
"""Something under a temporary name that was written to more recently may belong to a run that is saving."""
_TELL_S = 0.5
_TELL_QUIETLY_S = 30.0


def checkpoint(argv: Sequence[str]) -> int:
    """Run the verb.

    Raises:
        UserError: a wrong option, no checkpoint, or a damaged one.
    """
    words = list(argv)
    if not words or {"-h", "--help"}.intersection(words):
        print(CHECKPOINT_HELP, end="")
        return 0 if words else 2
    job = {"list": _list, "verify": _verify, "prune": _prune}.get(words[0])
    if job is None:
        raise UserError(f"shardyard checkpoint: {words[0]!r} is not list, verify or prune; --help tells more")
    job(words[1:])
    return 0


@dataclass(frozen=True)
class _Found:
    folder: Path
    checkpoints: list[Path]
    is_one: bool = False
    """One was named, not its folder."""


def _list(words: list[str]) -> None:
    found = _find(_only_word("list", words))
    marks = {name: pointed(found.folder, name) for name in (LATEST, BEST)}
    rows = [("checkpoint", "save", "size", "when", "ranks", "")]
    order = {path: place for place, path in enumerate(complete(found.folder))}
    for path in sorted(found.checkpoints, key=lambda path: (order.get(path, len(order)), step_of(path) or 0)):
        notes = [name for name, target in marks.items() if target == path]
        notes += ["hf"] if (path / "hf").is_dir() else []
        try:
            manifest = read_manifest(path)
        except ManifestError as error:
            rows.append((path.name, "", "", "", "", _printable(f"incomplete: {error}")))
            continue
        fault = fault_of(path)
        rows.append((
            path.name,
            str(manifest.sequence),
            in_bytes(manifest.bytes),
            _when(path, manifest),
            str(manifest.ranks or ""),
            f"incomplete: {fault}" if fault else " ".join(["complete", *notes]),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for path in leftovers(found.folder):
        print(f"{path.name}: left behind by a save, or one is under way")


def _verify(words: list[str]) -> None:
    found = _find(_only_word("verify", words))
    progress = _Progress(found.checkpoints)
    damaged: list[str] = []
    for path in found.checkpoints:
        faults = verify(path, progress.tell)
        progress.clear()
        if faults:
            damaged += [f"{path}: {_printable(fault)}" for fault in faults]
        else:
            manifest = read_manifest(path)
            others = f"; {len(manifest.elsewhere)} more are on other nodes" if manifest.elsewhere else ""
            files = len(manifest.files)
            print(
                f"{path}: {files} files, {in_bytes(manifest.bytes)}, as they were written{others}", flush=True
            )
    if damaged:
        raise UserError("\n  ".join(["damaged or incomplete:", *damaged]))


def _prune(words: list[str]) -> None:
    dry, unfinished = take_flag(words, "--dry-run"), take_flag(words, "--incomplete")
    keep = take_number(words, "--keep", default=0)
    found = _find(_only_word("prune", words))
    if not keep:
        raise UserError("shardyard checkpoint prune: --keep N says how many of the newest checkpoints stay")
    if found.is_one:
        raise UserError("shardyard checkpoint prune takes the folder of a run, not one checkpoint of it")
    going = expired(found.folder, keep)
    left = len(complete(found.folder)) - len(going)
    if unfinished:
        for path in [path for path in named(found.folder) if fault_of(path)] + leftovers(found.folder):
            if (age := age_s(path)) < _IDLE_S:
                print(f"kept {path}: written to {age:.0f} s ago, a run may be saving")
            else:
                going.append(path)
    for path in going:
        size = in_bytes(_size(path))
        if not dry:
            _remove(path)
        print(f"{'would remove' if dry else 'removed'} {path} ({size})", flush=True)
    print(f"{len(going)} {'would go' if dry else 'gone'}, {left} complete left in {found.folder}")


def _size(path: Path) -> int:
    """Bytes that go with it; a link has none."""
    return 0 if path.is_symlink() else sum(one.lstat().st_size for one in path.rglob("*") if one.is_file())


def _remove(path: Path) -> None:
    try:
        if path.is_dir() or path.is_symlink():
            remove(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be removed: {error.strerror}") from error


def _only_word(verb: str, words: list[str]) -> Path:
    wrong = next((word for word in words if word.startswith("--")), None)
    if wrong is not None:
        raise UserError(f"shardyard checkpoint {verb}: {wrong} is unknown; see shardyard checkpoint --help")
    if len(words) != 1:
        raise UserError(f"shardyard checkpoint {verb} takes one folder, not {len(words)}")
    return Path(words[0]).expanduser()


def _find(path: Path) -> _Found:
    """The checkpoints that a user's folder means.

    Raises:
        UserError: there is nothing of the kind.
    """
    if path.is_file() and path.name in (LATEST, BEST):
        target = pointed(path.parent, path.name)
        if target is None:
            raise UserError(f"{path} names no complete checkpoint")
        path = target
    if not path.is_dir():
        raise UserError(f"{path} is no folder")
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return _Found(path.parent, [path], is_one=True)
    for folder in (path / "checkpoints", path):
        if checkpoints := named(folder):
            return _Found(folder, checkpoints)
    raise UserError(f"{path} holds no checkpoints: neither global_step_N nor a folder `checkpoints` of such")


def _when(path: Path, manifest: Manifest) -> str:
    saved = manifest.saved_at or (path / MANIFEST).stat().st_mtime
    try:
        return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(saved))} ({_ago(time.time() - saved)})"
    except (OverflowError, ValueError, OSError):
        return ""


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


class _Progress:
    """Says on stderr how far reading is: on a terminal in one line, elsewhere every half minute."""

    def __init__(self, checkpoints: list[Path]) -> None:
        self._total = 0
        for path in checkpoints:
            try:
                self._total += read_manifest(path).bytes
            except ManifestError:
                continue
        self._done, self._started = 0, time.monotonic()
        self._told = self._started
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def tell(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._told < (_TELL_S if self._terminal else _TELL_QUIETLY_S):
            return
        self._told = now
        rate = self._done / (now - self._started)
        left = max(self._total - self._done, 0) / rate
        line = (
            f"{in_bytes(self._done)} of {in_bytes(self._total)} read, {in_bytes(rate)}/s, {left:.0f} s left"
        )
        print(
            f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Names from a manifest may be anyone's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
