"""Data files: their type, and their bytes as a stream, decompressed on the way."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path, PurePath
from typing import BinaryIO, cast

import zstandard

from shardyard.errors import UserError

TYPES = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt")
"""The types that are read, all but parquet and arrow also with ``.gz`` or ``.zst`` behind them."""

ACCEPTED = (
    "json, jsonl, csv, parquet and arrow files (txt too for pretraining; json, jsonl, csv and txt also as "
    ".gz and .zst)"
)

CHUNK = 2**20
"""Bytes of a read. No reader holds more of a file than a few of these and the row it is at."""

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESS_THEMSELVES = (".parquet", ".arrow")

_ZSTD_INPUT = 256
"""Compressed bytes taken at a time. zstd turns 4 bytes into at most 128 KiB, so this bounds the output of one
call to 8 MiB, whatever a file was made to expand to."""


def file_type(path: PurePath) -> str:
    """The type that a name stands for, without its compression: ``.jsonl`` of ``a.jsonl.gz``; else ``""``."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSIONS:
        suffix = PurePath(path.stem).suffix.lower()
        return suffix if suffix in TYPES and suffix not in _COMPRESS_THEMSELVES else ""
    return suffix if suffix in TYPES else ""


def open_bytes(file: Path) -> io.BufferedReader:
    """The bytes of a file, those within for ``.gz`` and ``.zst``.

    Opening and reading raise UserError, naming the file, where it cannot be read or is no whole compressed
    file.
    """
    try:
        stream: BinaryIO = file.open("rb")
    except OSError as error:
        raise unreadable(file, error) from error
    return io.BufferedReader(_Checked(file, stream), CHUNK)


def unreadable(file: Path, error: OSError) -> UserError:
    """The message for a file that the system does not give."""
    return UserError(f"{file}: cannot be read: {error.strerror or error}")


class _Checked(io.RawIOBase):
    """The decompressed bytes of a file, with every way that reading fails as one message."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._raw = stream
        self._kind = _COMPRESSIONS.get(file.suffix.lower())
        self._stream: BinaryIO = stream
        if self._kind == "gzip":
            self._stream = cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
        elif self._kind == "zstd":
            self._stream = cast(BinaryIO, _ZstdStream(stream))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            chunk = self._stream.read(len(buffer))
        except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
            raise UserError(
                f"{self._file}: not a whole {self._kind} file ({error}); it is cut off, damaged or misnamed"
            ) from error
        except OSError as error:
            raise unreadable(self._file, error) from error
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._stream.close()
        self._raw.close()
        super().close()


class _ZstdStream(io.RawIOBase):
    """Reads zstd frames one after another. The package's own reader takes a cut-off frame for a whole one."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = b""

    def read(self, size: int = -1) -> bytes:
        while not self._output:
            self._input = self._input or self._stream.read(_ZSTD_INPUT)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return b""
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        chunk, self._output = self._output[:size], self._output[size:]
        return chunk
