"""Tokenised samples on disk: flat memory-mapped arrays in a folder that is complete or absent.

Legend: N samples, T tokens of all samples, D documents (attention segments) of all samples.

    input_ids.bin  int32 [T]      labels.bin     int32 [T]      offsets.bin      int64 [N+1]  where a sample's
    tokens begin doc_lens.bin   int32 [D]      manifest.json                 doc_offsets.bin  int64 [N+1]
    where its documents begin
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardyard.data.types import Sample
from shardyard.errors import UserError

FORMAT = 1
"""Layout of the folder; a store of another layout is not read."""

MANIFEST = "manifest.json"
_DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "labels.bin": np.dtype("<i4"),
    "offsets.bin": np.dtype("<i8"),
    "doc_lens.bin": np.dtype("<i4"),
    "doc_offsets.bin": np.dtype("<i8"),
}


@dataclass(frozen=True)
class SampleBlock:
    """Several samples as flat arrays, all int32: what tokenising processes send and the store appends."""

    input_ids: np.ndarray
    """[T of the block]"""
    labels: np.ndarray
    """[T of the block]"""
    lengths: np.ndarray
    """Tokens of each sample."""
    doc_lens: np.ndarray
    """Tokens of each document."""
    doc_counts: np.ndarray
    """Documents of each sample."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleBlock:
        empty = [np.empty(0, np.int32)]
        return cls(
            input_ids=np.concatenate([*empty, *(sample.input_ids for sample in samples)], dtype=np.int32),
            labels=np.concatenate([*empty, *(sample.labels for sample in samples)], dtype=np.int32),
            lengths=np.array([len(sample.input_ids) for sample in samples], np.int32),
            doc_lens=np.array([n for sample in samples for n in sample.doc_lens], np.int32),
            doc_counts=np.array([len(sample.doc_lens) for sample in samples], np.int32),
        )


class StoreWriter:
    """Appends blocks to a store under a temporary name beside ``path``; ``finish`` gives it its name.

    Use as a context manager: leaving it without ``finish`` removes the temporary folder. One that a killed
    process left behind is removed by the next writer of the same path on the same machine. Memory does not
    grow with what is written.

    Raises:
        UserError: the folder cannot be made or written (``OSError`` of the file system, in one line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_samples = 0
        self._tokens = 0
        self._docs = 0
        self._temporary = _temporary_name(path)
        with _file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path)
            self._temporary.mkdir()
        self._files: dict[str, BinaryIO] = {}
        try:
            for name in _DTYPES:
                self._files[name] = (self._temporary / name).open("wb")
            self._append("offsets.bin", np.zeros(1, np.int64))
            self._append("doc_offsets.bin", np.zeros(1, np.int64))
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._discard()

    def add(self, block: SampleBlock) -> None:
        """Append the block's samples."""
        if not len(block.input_ids) == len(block.labels) == block.lengths.sum() == block.doc_lens.sum():
            raise ValueError("the arrays of a sample block do not fit together")
        with _file_errors(self.path):
            self._append("input_ids.bin", block.input_ids)
            self._append("labels.bin", block.labels)
            self._append("doc_lens.bin", block.doc_lens)
            self._append("offsets.bin", self._tokens + np.cumsum(block.lengths, dtype=np.int64))
            self._append("doc_offsets.bin", self._docs + np.cumsum(block.doc_counts, dtype=np.int64))
        self.num_samples += len(block.lengths)
        self._tokens += len(block.input_ids)
        self._docs += len(block.doc_lens)

    def finish(self, manifest: dict[str, Any], *, replace: bool = False) -> SampleStore:
        """Write the manifest, make all of it durable, and give the store its name.

        A finished store that another process has put there meanwhile is kept and opened instead (other ranks
        may be reading it), unless ``replace``.
        """
        sizes = {name: file.tell() for name, file in self._files.items()}
        counts = {"samples": self.num_samples, "tokens": self._tokens, "documents": self._docs}
        text = json.dumps(
            {**manifest, "format": FORMAT, "counts": counts, "sizes": sizes}, ensure_ascii=False
        )
        with _file_errors(self.path):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            with (self._temporary / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self._temporary)
            _give_name(self._temporary, self.path, replace=replace)
        return SampleStore.open(self.path)

    def _append(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.astype(_DTYPES[name], copy=False).tobytes())

    def _discard(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


class SampleStore:
    """The finished store: ``store[i]`` is sample i, its arrays views into memory-mapped files.

    Sending one to another process sends its path only.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._input_ids = _mapped(path, "input_ids.bin")
        self._labels = _mapped(path, "labels.bin")
        self._offsets = _mapped(path, "offsets.bin")
        self._doc_lens = _mapped(path, "doc_lens.bin")
        self._doc_offsets = _mapped(path, "doc_offsets.bin")

    @classmethod
    def open(cls, path: Path) -> SampleStore:
        """Open the store at ``path``.

        Raises:
            UserError: it is not a store, is one of another format, or a file of it has another size than
            written.
        """
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(f"{path} is not a folder of tokenised samples (it has no readable {MANIFEST})")
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {manifest.get('format')}, this program reads {FORMAT}; set "
                f"data.overwrite_cache to true to build it again"
            )
        for name in _DTYPES:
            file, size = path / name, manifest["sizes"].get(name)
            found = file.stat().st_size if file.is_file() else "no file"
            if found != size:
                raise UserError(
                    f"{file} is damaged: {size} bytes were written, found {found}; set data.overwrite_cache "
                    f"to true to build it again"
                )
        return cls(path, manifest)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        docs = slice(int(self._doc_offsets[index]), int(self._doc_offsets[index + 1]))
        return Sample(self._input_ids[tokens], self._labels[tokens], tuple(self._doc_lens[docs].tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleStore.open, (self.path,)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the store at ``path``; None where there is none or it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("sizes"), dict) else None


def _mapped(path: Path, name: str) -> np.ndarray:
    if (path / name).stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, _DTYPES[name])
    # A plain array over the map: np.memmap's own slicing costs more than reading a sample.
    return np.asarray(np.memmap(path / name, dtype=_DTYPES[name], mode="r"))


@contextlib.contextmanager
def _file_errors(path: Path):
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
        old = _temporary_name(path)
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was quicker
            raise
    _sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{_here()}-{os.getpid()}-{secrets.token_hex(4)}")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _here() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())


def _remove_leftovers(path: Path) -> None:
    """Remove temporary folders of this path whose process, on this machine, is gone."""
    marker = f"{path.name}.tmp-{_here()}-"
    for folder in path.parent.iterdir():
        if not folder.name.startswith(marker):
            continue
        pid = folder.name[len(marker) :].split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
