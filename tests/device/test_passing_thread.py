"""Work in a thread that ends with it."""

from __future__ import annotations

import threading

import pytest

from shardyard.device import Device, in_passing_thread
from shardyard.errors import UserError


def test_the_result_comes_back_and_the_thread_is_gone() -> None:
    before = threading.active_count()
    seen = in_passing_thread(Device("cpu"), lambda: (threading.current_thread(), 7))
    assert seen[1] == 7 and seen[0] is not threading.current_thread()
    assert not seen[0].is_alive() and threading.active_count() == before


def test_a_fault_is_raised_where_it_was_waited_for() -> None:
    def fail() -> None:
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        in_passing_thread(Device("cpu"), fail)
