"""Where an export is made, and how it gets to its place.

It is made under a temporary name. A folder that does not exist yet then comes into being by one rename. In a
folder that does exist (a run's output_dir) the files are moved one by one, in an order such that, whenever
the process is killed, what a reader finds by its rule (`model.safetensors`, else the index) is the former
export or the new one, whole, and never a mixture.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path

from shardyard.checkpoint.hf_files import INDEX, WEIGHTS
from shardyard.durable import sync, write_durably

_TEMPORARY = ".export-tmp"
_SWITCH = ".export-index-tmp"
_FORMER = "former-"
"""Before the names of files that stay readable while files of the same names come in."""
_OURS = re.compile(rf"({_FORMER})*model-\d+-of-\d+\.safetensors")


def temporary_folder(out_dir: Path) -> Path:
    """A new, empty folder on the disk of ``out_dir``; what killed exports to it have left behind is removed.

    Raises:
        OSError: it cannot be made.
    """
    remove_leftovers(out_dir)
    parent, prefix = _home(out_dir)
    folder = parent / f"{prefix}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return folder


def remove_leftovers(out_dir: Path) -> None:
    """Remove what killed exports to ``out_dir`` have left behind. Nobody may be exporting to it."""
    parent, prefix = _home(out_dir)
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        if re.fullmatch(re.escape(prefix) + "-[0-9a-f]{8}", path.name):
            shutil.rmtree(path)
    if not out_dir.is_dir():
        return
    (out_dir / _SWITCH).unlink(missing_ok=True)
    read = _files_of(out_dir)
    for path in out_dir.glob(f"{_FORMER}*"):
        if _OURS.fullmatch(path.name) and path not in read:
            path.unlink()


def remove_export_leftovers(output_dir: Path) -> None:
    """The same of all exports of a run: the final one, and those beside checkpoints."""
    for folder in (output_dir, *(path / "hf" for path in output_dir.glob("checkpoints/global_step_*"))):
        remove_leftovers(folder)


def has_weights(out_dir: Path) -> bool:
    """Whether an export stands there: a reader finds all the files that it opens."""
    return bool(_files_of(out_dir))


def _home(out_dir: Path) -> tuple[Path, str]:
    """Where the temporary folder of ``out_dir`` stands, and how its name begins."""
    if out_dir.is_dir():
        return out_dir, _TEMPORARY
    return out_dir.parent, f"{_TEMPORARY}-{out_dir.name}"


def put_in_place(ready: Path, out_dir: Path) -> None:
    """Move the complete export ``ready``, a `temporary_folder` of ``out_dir``, to its place.

    Raises:
        OSError: it cannot be moved.
    """
    for path in sorted(ready.rglob("*")):
        sync(path)
    sync(ready)
    if out_dir.is_dir():
        _replace(ready, out_dir)
    else:
        ready.rename(out_dir)
        sync(out_dir.parent)


def _replace(ready: Path, out_dir: Path) -> None:
    """Side files first, which describe the former weights as well; then the weights, with a single switch."""
    new = {path.name for path in ready.glob("*.safetensors")}
    for path in sorted(path for path in ready.rglob("*") if path.is_file()):
        if path.name not in {*new, INDEX}:
            target = out_dir / path.relative_to(ready)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    _keep_readable(out_dir, new)
    # A reader takes model.safetensors before any index, so the one file is its own switch.
    for name in sorted(new - {WEIGHTS}):
        (ready / name).replace(out_dir / name)
    sync(out_dir)
    if WEIGHTS in new:
        (ready / WEIGHTS).replace(out_dir / WEIGHTS)
        sync(out_dir)
        (out_dir / INDEX).unlink(missing_ok=True)
    else:
        (ready / INDEX).replace(out_dir / INDEX)
        sync(out_dir)
        (out_dir / WEIGHTS).unlink(missing_ok=True)
    for path in sorted(_weights_in(out_dir)):
        if path.name not in new:
            path.unlink()
    shutil.rmtree(ready)
    sync(out_dir)


def _keep_readable(out_dir: Path, new: set[str]) -> None:
    """Where files of the former export have the names of new ones, give them second names, and have the index
    name these: the new files then come in beside the former ones.

    On a disk without links the index goes first instead: a kill then leaves an export that is seen to be
    incomplete.
    """
    former = _files_of(out_dir)
    if not former:  # an index of files that are not all there; new ones must not complete it
        (out_dir / INDEX).unlink(missing_ok=True)
    if (out_dir / WEIGHTS) in former or not any(path.name in new for path in former):
        return
    index = json.loads((out_dir / INDEX).read_text(encoding="utf-8"))
    second = {path.name: f"{_FORMER}{path.name}" for path in former}
    try:
        for name, other in second.items():
            (out_dir / other).unlink(missing_ok=True)
            os.link(out_dir / name, out_dir / other)
    except OSError:
        (out_dir / INDEX).unlink()
        sync(out_dir)
        return
    sync(out_dir)
    index["weight_map"] = {key: second[name] for key, name in index["weight_map"].items()}
    switch = out_dir / _SWITCH
    write_durably(switch, json.dumps(index, indent=2) + "\n")
    switch.replace(out_dir / INDEX)
    sync(out_dir)


def _files_of(out_dir: Path) -> list[Path]:
    """The weight files that a reader of ``out_dir`` opens; none where they are not all there."""
    if (out_dir / WEIGHTS).exists():
        return [out_dir / WEIGHTS]
    try:
        names = set(json.loads((out_dir / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        found = [out_dir / name for name in sorted(names) if _OURS.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return found if len(found) == len(names) and all(path.is_file() for path in found) else []


def _weights_in(out_dir: Path) -> set[Path]:
    """Shards of this or a former export."""
    return {path for path in out_dir.glob("*.safetensors") if _OURS.fullmatch(path.name)}
