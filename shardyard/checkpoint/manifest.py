"""The manifest of a checkpoint: which files it has, how large they are, and what they hash to.

It is written last, and names its own hash too, so that no byte of a checkpoint can change unseen. Where nodes
have disks of their own, each node's folder has a manifest of the files on that node, and names those of the
others. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shardyard.durable import write_durably
from shardyard.errors import UserError

FORMAT = 2
_READ = (1, FORMAT)
"""Format 1 has no hash of the manifest itself."""
MANIFEST, RUN_STATE, ASSETS, METADATA = "manifest.json", "run_state.json", "assets", ".metadata"
_LARGEST = 2**26
"""Bytes of a JSON file of ours: more than the names and hashes of 100,000 files."""
_CHUNK = 2**22
_SEAL = "sha256"


@dataclass(frozen=True)
class FileFacts:
    """Length and SHA-256 of a file, as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``files`` are those of this folder by their path in it, ``elsewhere`` those on other nodes' disks."""

    files: dict[str, FileFacts]
    sequence: int = 0
    """The place among the saves of its folder; no clock is asked."""
    ranks: int = 0
    saved_at: float = 0.0
    """Seconds since 1970 by the clock of rank 0's machine, for people; 0 where it is not known."""
    torch: str = ""
    elsewhere: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of this folder's files."""
        return sum(facts.bytes for facts in self.files.values())


class ManifestError(ValueError):
    """Why a manifest is not one of ours, as a sentence goes on after the name of its folder."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` durably, sealed with its own hash."""
    facts = {
        "format": FORMAT,
        "sequence": manifest.sequence,
        "ranks": manifest.ranks,
        "saved_at": manifest.saved_at,
        "torch": manifest.torch,
        "files": _listed(manifest.files),
        **({"elsewhere": _listed(manifest.elsewhere)} if manifest.elsewhere else {}),
        _SEAL: "",
    }
    write_durably(folder / MANIFEST, sealed(json.dumps(facts, indent=1)))


def sealed(text: str) -> str:
    """``text`` with the hash of itself where its last ``"sha256": ""`` stands."""
    before, empty, after = text.rpartition(f'"{_SEAL}": "')
    assert empty, "there is no place for the hash"
    return f"{before}{empty}{hashlib.sha256(text.encode()).hexdigest()}{after}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; its files are not looked at.

    Raises:
        ManifestError: there is none, it has changed since it was written, has another format, or names what
            lies outside the folder.
    """
    try:
        text = read_small(folder / MANIFEST)
        held = json.loads(text)
        form = held["format"]
        if form not in _READ:
            raise ManifestError(
                f"has format {form!r:.40}; this program reads {' and '.join(map(str, _READ))}"
            )
        if form != 1 or _SEAL in held:
            _check_seal(text, held)
        return Manifest(
            _files(held["files"]),
            sequence=_count(held.get("sequence", 0)),
            ranks=_count(held.get("ranks", 0)),
            saved_at=float(held.get("saved_at", 0.0)),
            torch=str(held.get("torch", "")),
            elsewhere=_files(held.get("elsewhere", {})),
        )
    except ManifestError:
        raise
    except FileNotFoundError:
        raise ManifestError(f"is not a complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RecursionError) as error:
        text = str(error)
        raise ManifestError(
            f"is not a complete checkpoint: its {MANIFEST} cannot be read ({text:.200})"
        ) from error


def read_small(path: Path) -> str:
    """A text of ours, which is never large.

    Raises:
        ValueError: it is no UTF-8, or too large to be ours.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    return data.decode("utf-8")


def read_run_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors.

    Raises:
        UserError: it is no JSON object.
    """
    path = folder / RUN_STATE
    try:
        state = json.loads(read_small(path))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} is not read: {error!s:.200}") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not read: it is no JSON object")
    return state


def fault_of(path: Path) -> str | None:
    """Why ``path`` is not a complete checkpoint of ours (by its manifest and file sizes); None when it is."""
    if not path.is_dir():
        return "is no folder" if path.exists() else "does not exist"
    try:
        read_complete(path)
    except ManifestError as error:
        return str(error)
    return None


def read_complete(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there, by their sizes.

    Raises:
        ManifestError: as `read_manifest`, or a file is missing or has another size.
    """
    manifest = read_manifest(path)
    for name, facts in manifest.files.items():
        if fault := _size_fault(path / name, facts):
            raise ManifestError(f"is damaged: {name} {fault}")
    return manifest


def verify(path: Path, tell: Callable[[int], None] | None = None) -> list[str]:
    """Read every file of a checkpoint; what is wrong, a line for each damaged file, which it names.

    ``tell`` is called with the bytes that were read since its last call.
    """
    if not path.is_dir():
        return ["it does not exist"]
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return [f"it {error}"]
    return damage(path, manifest.files, manifest.files, tell)


def damage(
    path: Path,
    names: Iterable[str],
    files: Mapping[str, FileFacts],
    tell: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with the files ``names`` of the folder ``path``, a line for each."""
    faults = []
    for name in names:
        if fault := _size_fault(path / name, files[name]):
            faults.append(f"{name} {fault}")
            continue
        try:
            if facts_of(path / name, tell) != files[name]:
                faults.append(f"the content of {name} has changed since it was written")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def facts_of(path: Path, tell: Callable[[int], None] | None = None) -> FileFacts:
    """Length and hash of a file as it is now."""
    digest, length = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)  # lets go of the interpreter: other threads go on
            length += len(chunk)
            if tell is not None:
                tell(len(chunk))
    return FileFacts(length, digest.hexdigest())


def _size_fault(path: Path, facts: FileFacts) -> str | None:
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError:
        size = None
    if size == facts.bytes:
        return None
    found = "is missing" if size is None else f"has {size} bytes"
    return f"{found}, {facts.bytes} were written"


def _check_seal(text: str, held: dict[str, Any]) -> None:
    seal = held[_SEAL]
    before, found, after = text.rpartition(f'"{seal}"')
    if not found or hashlib.sha256(f'{before}""{after}'.encode()).hexdigest() != seal:
        raise ManifestError(f"is damaged: {MANIFEST} has changed since it was written")


def _listed(files: Mapping[str, FileFacts]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": facts.bytes, "sha256": facts.sha256} for name, facts in sorted(files.items())}


def _files(held: dict[str, Any]) -> dict[str, FileFacts]:
    return {
        _inside(name): FileFacts(_count(facts["bytes"]), str(facts.get("sha256", "")))
        for name, facts in held.items()
    }


def _inside(name: str) -> str:
    """A path within the folder, as we write them."""
    parts = PurePosixPath(name).parts
    if not parts or "/".join(parts) != name or name[0] == "/" or ".." in parts or not name.isprintable():
        raise ManifestError(f"is not read: its {MANIFEST} names {name!r:.200}, which is no file inside it")
    return name


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:  # True is no count
        raise ValueError(f"{number!s:.40} is no count")
    return number
