"""``cloud_file_name`` -> files in the cache: one download for each version of an object."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardyard.data.sources.files import ACCEPTED, file_type
from shardyard.errors import UserError

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""The package that reads each kind of address through fsspec."""


def fetch(url: str, cache_dir: str | None, where: str) -> list[Path]:
    """Download an object, or all data files directly under a prefix, sorted; a version once fetched is kept.

    Raises:
        UserError: no address of a kind that is read, its package is missing, nothing is there, or the store
            cannot be reached.
    """
    kind = urlsplit(url).scheme
    if kind not in _PACKAGES:
        kinds = ", ".join(f"{name}://" for name in _PACKAGES)
        raise UserError(f"{where}: must begin with one of {kinds}; found {url!r}")
    folder = Path(cache_dir or "~/.cache/shardyard").expanduser().absolute() / "cloud"
    try:
        import fsspec.core

        system, path = fsspec.core.url_to_fs(url)
        objects = [path] if system.isfile(path) else _data_objects(system, path)
        files = [_download(system, item, folder) for item in objects]
    except ImportError as error:
        package = _PACKAGES[kind]
        raise UserError(f"{where}: {kind}:// needs the package {package}: pip install {package}") from error
    except Exception as error:  # each store's client raises errors of its own
        raise UserError(f"{where}: {url} cannot be fetched: {one_line(error)}") from error
    if not files:
        raise UserError(f"{where}: {url} holds none of the {ACCEPTED}")
    return files


def one_line(error: BaseException) -> str:
    """An error of a client library, short enough for a message."""
    text = " ".join(str(error).split())
    return (text[:300] + "..." if len(text) > 300 else text) or type(error).__name__


def _data_objects(system: Any, path: str) -> list[str]:
    found = [str(item) for item in system.ls(path, detail=False)]
    return sorted(item for item in found if file_type(Path(item)) and system.isfile(item))


def _download(system: Any, path: str, folder: Path) -> Path:
    version = hashlib.sha256(f"{path}\0{system.ukey(path)}".encode()).hexdigest()[:32]
    target = folder / version / Path(path).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        system.get_file(path, str(partial))
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target
