from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_verb.runs import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder for one test; the log handlers that the verb sets up are gone after it."""
    package = logging.getLogger("shardyard")
    before = (package.handlers[:], package.level, package.propagate)
    yield Folder(tmp_path)
    package.handlers[:], package.propagate = before[0], before[2]
    package.setLevel(before[1])
