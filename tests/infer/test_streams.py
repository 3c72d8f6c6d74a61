"""Standard streams that are closed or cannot be written: one message, or nothing, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAIN = f'{sys.executable} -c "import sys; from shardyard.cli import main; sys.exit(main(sys.argv[1:]))"'


def shell(line: str) -> tuple[int, str]:
    """(exit code, stderr) of a line of the shell."""
    told = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    return told.returncode, told.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_closed_streams_are_empty_ones(closed: str) -> None:
    assert shell(f"{MAIN} schema {closed} {'' if '>' in closed else '> /dev/null'}") == (0, "")


def test_a_chat_without_input_has_an_end_and_no_fault() -> None:
    keyboard = "import shardyard.cli as c; c._open_closed_streams(); from shardyard.cli.chat_screen import *"
    assert shell(f"{sys.executable} -c '{keyboard}; assert Keyboard().read() is None' <&-") == (0, "")


def test_answers_that_a_full_disk_does_not_take_are_one_message() -> None:
    code = "import shardyard.cli as c, shardyard.cli.generate as g; c._dispatch = lambda _: g._print(chr(97))"
    line = f"{sys.executable} -c '{code}; raise SystemExit(c.main([]))' > /dev/full"
    assert shell(line) == (2, "error: standard output: No space left on device\n")
