"""Ranks that write or read one folder together: what fails on one of them fails on all, with one message."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

T = TypeVar("T")


class Peers:
    """The ranks of ``group`` (None: all ranks; a process without torch.distributed is alone).

    ``group`` has to carry CPU tensors (gloo, or a mixed backend with gloo in it).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's small picklable value, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank and return all results, by rank.

        Raises:
            UserError: ``work`` raised UserError or OSError somewhere (no space left, no permission); every
                rank raises it, with the first failing rank's message.
            RuntimeError: ``work`` raised anything else; it is the cause on the rank where it happened.
        """
        mine: BaseException | None = None
        value: Any = None
        try:
            value = work()
        except Exception as error:
            mine = error
            logger.debug("%s failed on rank %d", what, self.rank, exc_info=True)
        answers = self.gather((value, mine is not None, _describe(mine), _is_users(mine)))
        failures = [(rank, *answer[2:]) for rank, answer in enumerate(answers) if answer[1]]
        if not failures:
            return [answer[0] for answer in answers]
        if all(users for _, _, users in failures):
            where = f" (rank {failures[0][0]})" if self.size > 1 and not isinstance(mine, UserError) else ""
            text = failures[0][1]
            raise UserError(text if text.startswith(what) else f"{what}: {text}{where}") from mine
        rank, text, _ = next(failure for failure in failures if not failure[2])
        raise RuntimeError(f"{what} failed on rank {rank}: {text}") from mine

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and return its result on every rank; raises as `agree` does."""
        return self.agree(what, work if self.is_first else _nothing)[0]  # type: ignore[return-value]


def _nothing() -> Any:
    return None


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _is_users(error: BaseException | None) -> bool:
    return isinstance(error, (UserError, OSError))
