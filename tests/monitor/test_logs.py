"""Who may speak, where, and in which form: seen from outside, in processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys

SPEAK = """
import logging
from shardyard.monitor import setup_logging
setup_logging({rank})
setup_logging({rank})
logger = logging.getLogger("shardyard.train")
logger.info("hello")
logger.warning("careful")
logging.getLogger("shardyard.data").warning("only here")
logging.getLogger("torch.distributed.tensor._redistribute").warning("2 sequential all_gather operations")
"""


def speak(rank: int) -> tuple[list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SPEAK.format(rank=rank)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_rank_0_speaks_once_on_stdout_in_the_known_format() -> None:
    out, err = speak(0)
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
    assert len(out) == 3 and err == []
    assert re.fullmatch(rf"INFO {stamp} >> hello", out[0])
    assert re.fullmatch(rf"WARNING {stamp} >> careful", out[1])


def test_other_ranks_only_warn_of_what_rank_0_may_not_see_with_their_number() -> None:
    out, err = speak(3)
    assert out == [] and len(err) == 1
    assert err[0].endswith(">> rank 3: only here")
