"""The system is asked for a model's weight files, once each, if they can stay in memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardyard.models.read_ahead import read_ahead


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (
        ("b.safetensors", 600),
        ("a.safetensors", 400),
        ("tokenizer.json", 10**5),
        ("c.distcp", 1),
    ):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "d.safetensors").mkdir()
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    found: list[tuple[str, int, int, int]] = []

    def note(descriptor: int, start: int, length: int, advice: int) -> None:
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", note)
    return found


def _free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size))


def test_each_file_of_weights_is_asked_for_whole(folder, asked, monkeypatch) -> None:
    _free(monkeypatch, 2002)  # the files have 1001 bytes
    thread = read_ahead(folder)
    assert thread is not None and thread.daemon  # it keeps no process from ending
    thread.join()
    names = ["a.safetensors", "b.safetensors", "c.distcp"]
    assert asked == [(name, 0, 0, os.POSIX_FADV_WILLNEED) for name in names]


def test_more_than_half_of_the_free_memory_is_left_on_the_disk(folder, asked, monkeypatch) -> None:
    _free(monkeypatch, 2001)
    assert read_ahead(folder) is None and asked == []


def test_a_folder_without_weights_needs_nothing(tmp_path: Path, asked) -> None:
    assert read_ahead(tmp_path) is None and asked == []


def test_a_file_system_without_advice_ends_it_quietly(folder, monkeypatch) -> None:
    tried: list[int] = []

    def refuse(descriptor: int, *_: int) -> None:
        tried.append(descriptor)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    thread = read_ahead(folder)
    assert thread is not None
    thread.join()
    assert len(tried) == 1 and not Path(f"/proc/self/fd/{tried[0]}").exists()
