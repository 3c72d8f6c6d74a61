"""What attention is told of the ranks that share its sequence."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist


class ContextShare(Protocol):
    """A rank among those that share a sequence; ``shardyard.parallel.sequence`` makes it."""

    @property
    def method(self) -> str: ...

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...
