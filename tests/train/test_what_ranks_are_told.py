"""What one rank learns for all: what a disk refuses reaches every rank as one message."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from support.run_data import Rendezvous

from shardyard.device.agreement import _share
from shardyard.errors import UserError


class _Group(Rendezvous):
    is_main = True


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "/runs/a: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (UserError("name another folder"), "name another folder"),
    ],
)
def test_a_disk_that_refuses_is_told_to_every_rank(error: Exception, message: str) -> None:
    group: Any = _Group()

    def work() -> str:
        raise error

    for leads in (True, False):
        with pytest.raises(UserError) as caught:
            _share(group, "run folder", work, leads=leads)
        assert str(caught.value) == message
