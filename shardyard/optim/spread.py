"""Whole matrices out of their shards, each on one rank, and their results back to whoever holds a piece.

In each round of the plan (`matrix_plan`), the pieces go to the owners in one all-to-all (of equal pieces that
of the nearest rank), and the results go back to all holders, replicas too. Where nothing has to travel, as
with experts that lie whole on one rank, there is no collective. Who holds what ranks tell each other once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardyard.optim.matrices import Matrix
from shardyard.optim.matrix_plan import Box, Piece, Plan, Round, box_of

Read = Callable[[Piece], torch.Tensor]
Write = Callable[[Piece, torch.Tensor], None]


class Spread:
    """Moves the ``matrices`` of each of ``parameters`` over the ranks of ``group`` (None: alone), each of
    which builds it. ``budget`` is that of the plan.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        matrices: Sequence[Sequence[Matrix]],
        group: dist.ProcessGroup | None,
        *,
        budget: int,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self.plan = Plan(matrices, _boxes_of_all(parameters, group), self._rank, budget=budget)

    def gather(self, turn: Round, read: Read, like: torch.Tensor) -> dict[int, torch.Tensor]:
        """The matrices that this rank owns, by task, in the dtype and on the device of ``like``."""
        whole = {number: like.new_empty(self.plan.tasks[number][1].shape) for number in turn.tasks}

        def place(piece: Piece, values: torch.Tensor) -> None:
            whole[piece.task][piece.whole] = values

        self._move(turn.gives, turn.gets, read, place, like, travels=turn.travels)
        return whole

    def deliver(
        self, turn: Round, results: dict[int, torch.Tensor], write: Write, like: torch.Tensor
    ) -> None:
        """Hand the results, as `gather` gave the matrices, to all who hold a piece; ``write`` is called for
        each of this rank's, or for parts of it.
        """

        def read(piece: Piece) -> torch.Tensor:
            return results[piece.task][piece.whole]

        for part in range(turn.parts):
            back, home = (
                [[piece.part(part, turn.parts) for piece in pieces] for pieces in side]
                for side in (turn.back, turn.home)
            )
            self._move(back, home, read, write, like, travels=turn.travels)

    def _move(
        self,
        out: Sequence[Sequence[Piece]],
        back: Sequence[Sequence[Piece]],
        read: Read,
        write: Write,
        like: torch.Tensor,
        *,
        travels: bool,
    ) -> None:
        for piece in out[self._rank]:
            write(piece, read(piece))
        if not travels:
            return
        sent = [[] if rank == self._rank else out[rank] for rank in range(len(out))]
        due = [[] if rank == self._rank else back[rank] for rank in range(len(back))]
        parts = [read(piece).reshape(-1).to(like) for pieces in sent for piece in pieces]
        send = torch.cat(parts) if parts else like.new_empty(0)
        del parts
        receive = like.new_empty(sum(map(_elements, due)))
        dist.all_to_all_single(
            receive, send, [*map(_elements, due)], [*map(_elements, sent)], group=self._group
        )
        place = 0
        for piece in (piece for pieces in due for piece in pieces):
            rows, cols = piece.shape
            write(piece, receive[place : place + rows * cols].view(rows, cols))
            place += rows * cols


def _boxes_of_all(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[list[Box]]:
    """Rank -> parameter -> what it holds of it."""
    own = [box_of(parameter) for parameter in parameters]
    if group is None or dist.get_world_size(group) == 1:
        return [own]
    everyone: list[list[Box]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    if len({len(boxes) for boxes in everyone}) > 1:
        raise RuntimeError("ranks of one pipeline stage hold different numbers of matrices")
    return everyone


def _elements(pieces: Sequence[Piece]) -> int:
    return sum(rows * cols for rows, cols in (piece.shape for piece in pieces))
