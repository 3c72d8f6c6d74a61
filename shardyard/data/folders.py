"""Folders of prepared data: complete or absent, with a manifest that tells what they were made of."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardyard.durable import remove_leftovers, sync, temporary_name
from shardyard.errors import UserError

MANIFEST = "manifest.json"


class NewFolder:
    """A folder that is written under a temporary name beside ``path``; ``finish`` gives it its name.

    Use as a context manager: leaving it without ``finish`` removes the temporary folder. One that a killed
    process left behind is removed by the next writer of the same path on the same machine.

    Raises:
        UserError: the folder cannot be made or written (``OSError`` of the file system, in one line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = temporary_name(path)
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
            self.temporary.mkdir()

    def __enter__(self) -> NewFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove what was written, unless it is finished."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def finish(self, manifest: dict[str, Any], *, replace: bool = False) -> None:
        """Write the manifest with the sizes of all files, make all of it durable, and give the folder its
        name.

        A finished folder that another process has put there meanwhile is kept instead (other ranks may be
        reading it), unless ``replace``.
        """
        with file_errors(self.path):
            files = sorted(self.temporary.iterdir())
            sizes = {file.name: file.stat().st_size for file in files}
            for file in files:
                sync(file)
            text = json.dumps({**manifest, "sizes": sizes}, ensure_ascii=False)
            (self.temporary / MANIFEST).write_text(text, encoding="utf-8")
            sync(self.temporary / MANIFEST)
            sync(self.temporary)
            _give_name(self.temporary, self.path, replace=replace)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the folder at ``path``; None where there is none or it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("sizes"), dict) else None


def check_folder(path: Path, format_version: int) -> dict[str, Any]:
    """The manifest of a complete and undamaged folder.

    Raises:
        UserError: it is not one, is one of another format, or a file of it has another size than written.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise UserError(f"{path} is not a folder of tokenised samples (it has no readable {MANIFEST})")
    if manifest.get("format") != format_version:
        raise UserError(
            f"{path} has format {manifest.get('format')}, this program reads {format_version}; set "
            f"data.overwrite_cache to true to build it again"
        )
    for name, size in manifest["sizes"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else "no file"
        if found != size:
            raise UserError(
                f"{file} is damaged: {size} bytes were written, found {found}; set data.overwrite_cache "
                f"to true to build it again"
            )
    return manifest


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns ``OSError`` while writing prepared data to ``path`` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the tokenised samples to {path}: {error.strerror or error}; free space there, or "
            f"set model.cache_dir or data.tokenized_path to a folder that can be written"
        ) from error


def _give_name(temporary: Path, path: Path, *, replace: bool) -> None:
    old = None
    if path.is_dir() and any(path.iterdir()):
        if not replace and read_manifest(path) is not None:
            return
        old = temporary_name(path)
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was quicker
            raise
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
