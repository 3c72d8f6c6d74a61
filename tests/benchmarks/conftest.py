"""The benchmarks' folder on the path, and the quick start's assets to run them on."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model, tokenizer and rows."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "examples" / "quickstart"))
        importlib.import_module("make_assets").main([str(folder)])
    return folder


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script() -> Script:
    """``script("mfu.py", *words)`` runs it as a user does, with one thread, and returns what it printed."""

    def start(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / name), *words], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=REPOSITORY,
        )  # fmt: skip

    return start
