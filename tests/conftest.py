"""Shared by all tests: the path to ``support``, the soak option and the pool of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from support.models import ModelZoo  # noqa: E402  (needs the path above)
from support.ranks import RankPool  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the full counts (marked soak) as well")


_LONGEST_FIRST = ("launch", "examples", "checkpoint", "train", "parallel")
"""Folders whose files take longest: the rest behind them fills both workers to the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave soak tests out (deselected, so that nothing reads as skipped) unless they are asked for."""
    places = {folder: place for place, folder in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).parts[0], len(places)))
    if config.getoption("--soak"):
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """``ranks.run(world_size, fn, *args)``: see support/ranks.py."""
    return RankPool()


@pytest.fixture(scope="session")
def model_zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelZoo]:
    """``model_zoo.folder(family, dtype)``: tiny random Hugging Face model folders, see support/models.py."""
    yield ModelZoo(tmp_path_factory.mktemp("models"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The soak's table: cases and seconds of each test file."""
    if not config.getoption("--soak"):
        return
    counts: dict[str, list[float]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if getattr(report, "when", "call") == "call" or outcome in ("error", "skipped"):
                row = counts.setdefault(report.nodeid.split("::")[0], [0, 0, 0.0])
                row[0 if outcome == "passed" else 1] += 1
                row[2] += getattr(report, "duration", 0.0)  # a file that cannot be read has none
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{'soak':<52} {'passed':>7} {'not':>5} {'seconds':>8}")
    for file, (passed, other, seconds) in sorted(counts.items()):
        terminalreporter.write_line(f"{file:<52} {int(passed):>7} {int(other):>5} {seconds:>8.1f}")
