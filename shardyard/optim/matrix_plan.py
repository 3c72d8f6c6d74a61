"""Who works on which matrix, and which pieces travel for it.

Each matrix has an owner among the ranks that hold a piece of it; owners are chosen so that all have about
the same work. Matrices are taken in rounds, so that a rank has a bounded amount of them at a time. The plan
follows from who holds what; ranks that know the same boxes make the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardyard.optim.matrices import Matrix

Box = tuple[tuple[int, int], ...]
"""Which part of a parameter a rank holds: (begin, end) of each dimension."""
Task = tuple[int, Matrix]
"""The number of a parameter, and one of its matrices."""


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a matrix: where it lies in the rank's tensor, and in the matrix."""

    task: int
    parameter: int
    local: tuple[Any, ...]
    whole: tuple[slice, slice]
    shape: tuple[int, int]

    def part(self, number: int, count: int) -> Piece:
        """Some of its rows, of ``count`` parts the one with this number."""
        rows = self.shape[0]
        begin, end = number * rows // count, (number + 1) * rows // count
        local, whole = self.local[-2], self.whole[0]
        step = local.step or 1
        some = slice(local.start + begin * step, local.start + end * step, step)
        inside = slice(whole.start + begin, whole.start + end)
        return replace(
            self, local=(*self.local[:-2], some, self.local[-1]), whole=(inside, self.whole[1]),
            shape=(end - begin, self.shape[1]),
        )  # fmt: skip


@dataclass(frozen=True)
class Round:
    """What this rank does of a few matrices: by other rank, the pieces that go each way."""

    tasks: tuple[int, ...]
    """Those that this rank owns."""
    gives: tuple[tuple[Piece, ...], ...]
    """Rank -> what it is given of the matrices that it owns."""
    gets: tuple[tuple[Piece, ...], ...]
    """Rank -> what it gives of the matrices that this rank owns."""
    back: tuple[tuple[Piece, ...], ...]
    """Rank -> all that it holds of the matrices that this rank owns."""
    home: tuple[tuple[Piece, ...], ...]
    """Rank -> all that this rank holds of the matrices that it owns."""
    travels: bool
    """Whether anything goes from rank to rank."""
    parts: int
    """In how many parts the results go back."""


def box_of(parameter: torch.Tensor) -> Box:
    """The part of ``parameter`` that this rank holds."""
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(parameter.to_local().shape):
        raise RuntimeError(f"a shard has the shape {list(parameter.to_local().shape)}, not {list(shape)}")
    return tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def piece_of(number: int, task: Task, box: Box) -> Piece | None:
    """What a rank with ``box`` holds of a matrix; None if it is nothing."""
    parameter, matrix = task
    rows, cols = _overlap(matrix.rows, *box[-2]), _overlap(matrix.cols, *box[-1])
    if rows is None or cols is None:
        return None
    entry: tuple[Any, ...] = ()
    if matrix.entry is not None:
        begin, end = box[0]
        if not begin <= matrix.entry < end:
            return None
        entry = (matrix.entry - begin,)
    shape = (rows[1].stop - rows[1].start, cols[1].stop - cols[1].start)
    return Piece(number, parameter, (*entry, rows[0], cols[0]), (rows[1], cols[1]), shape)


def _overlap(wanted: range, begin: int, end: int) -> tuple[slice, slice] | None:
    """Of ``wanted`` the indices in [begin, end): where they lie from ``begin`` on, and in ``wanted``."""
    first = max(0, -((wanted.start - begin) // wanted.step))
    last = min(len(wanted), -((wanted.start - end) // wanted.step))
    if first >= last:
        return None
    start = wanted[first] - begin
    return slice(start, wanted[last - 1] - begin + 1, wanted.step), slice(first, last)


class Plan:
    """What rank ``rank`` does with the ``matrices`` of each parameter; ``boxes``: rank -> parameter -> what
    the rank holds of it.

    ``budget``: elements of the matrices that a rank owns in a round, and of the results that it sends at a
    time; a matrix that is larger has a round of its own.
    """

    def __init__(
        self, matrices: Sequence[Sequence[Matrix]], boxes: Sequence[Sequence[Box]], rank: int, *, budget: int
    ) -> None:
        self.rank, self._boxes, self._budget = rank, boxes, budget
        self.tasks: list[Task] = [(n, m) for n, held in enumerate(matrices) for m in held]
        self._holders = _holders_of_all(boxes, self.tasks)
        self.owners = self._choose_owners()
        self.rounds = list(self._make_rounds())

    def _choose_owners(self) -> list[int]:
        """Task -> rank. The largest first, each to the holder with the least work so far."""
        load = [0] * len(self._boxes)
        owners = [0] * len(self.tasks)
        for number in sorted(range(len(self.tasks)), key=lambda n: (-_work(self.tasks[n][1]), n)):
            owner = min(self._holders[number].ranks, key=lambda rank: (load[rank], rank))
            owners[number] = owner
            load[owner] += _work(self.tasks[number][1])
        return owners

    def _make_rounds(self) -> Iterator[Round]:
        queues: list[list[int]] = [[] for _ in self._boxes]
        for number, owner in enumerate(self.owners):
            queues[owner].append(number)
        while any(queues):
            taken = [self._take(queue) for queue in queues]
            yield self._round(taken)

    def _take(self, queue: list[int]) -> list[int]:
        """The next matrices of an owner: at least one, as long as they fit the budget."""
        count, elements = 0, 0
        while count < len(queue):
            elements += self._elements(queue[count])
            if count and elements > self._budget:
                break
            count += 1
        taken, queue[:] = queue[:count], queue[count:]
        return taken

    def _round(self, taken: list[list[int]]) -> Round:
        gives, gets, back, home = ([[] for _ in self._boxes] for _ in range(4))
        for owner, number in ((owner, n) for owner, numbers in enumerate(taken) for n in numbers):
            mine = self._piece(number, self.rank)
            if mine is not None:
                home[owner].append(mine)
                if self._gives(number, self.rank, owner):
                    gives[owner].append(mine)
            for rank in self._holders[number].ranks if owner == self.rank else ():
                piece = self._piece(number, rank)
                assert piece is not None
                back[rank].append(piece)
                if self._gives(number, rank, owner):
                    gets[rank].append(piece)
        travels, parts = self._traffic(taken)
        return Round(
            tuple(taken[self.rank]), _frozen(gives), _frozen(gets), _frozen(back), _frozen(home),
            travels=travels, parts=parts,
        )  # fmt: skip

    def _traffic(self, taken: list[list[int]]) -> tuple[bool, int]:
        """Whether anything travels, and in how many parts results do, so that the copies for all replicas
        keep to the budget.
        """
        sent = [sum(self._elements(n) * self._holders[n].copies for n in numbers) for numbers in taken]
        travels = any(
            self._holders[n].ranks != (owner,) for owner, numbers in enumerate(taken) for n in numbers
        )
        replicas = max((self._holders[n].copies for numbers in taken for n in numbers), default=1)
        return travels, min(replicas, -(-max(sent) // self._budget))

    def _gives(self, number: int, rank: int, owner: int) -> bool:
        return self._holders[number].giver(self._boxes[rank][self.tasks[number][0]], owner) == rank

    def _elements(self, number: int) -> int:
        rows, cols = self.tasks[number][1].shape
        return rows * cols

    def _piece(self, number: int, rank: int) -> Piece | None:
        return piece_of(number, self.tasks[number], self._boxes[rank][self.tasks[number][0]])


@dataclass(frozen=True)
class _Holders:
    """Who holds a piece of a task."""

    ranks: tuple[int, ...]
    same: dict[Box, tuple[int, ...]]
    """Those with equal pieces."""

    def giver(self, box: Box, owner: int) -> int:
        """Of the ranks with this piece, the one that is nearest to ``owner``."""
        return min(self.same[box], key=lambda rank: (abs(rank - owner), rank))

    @property
    def copies(self) -> int:
        return max(map(len, self.same.values()))


def _holders_of_all(boxes: Sequence[Sequence[Box]], tasks: Sequence[Task]) -> list[_Holders]:
    """Task -> its holders; tasks of parameters with the same layout share theirs."""
    layouts = [tuple(own[parameter] for own in boxes) for parameter in range(len(boxes[0]))]
    known: dict[tuple[tuple[Box, ...], Matrix], _Holders] = {}
    for number, (parameter, matrix) in enumerate(tasks):
        if (layouts[parameter], matrix) in known:
            continue
        same: dict[Box, tuple[int, ...]] = {}
        for rank, box in enumerate(layouts[parameter]):
            if piece_of(number, (parameter, matrix), box) is not None:
                same[box] = (*same.get(box, ()), rank)
        ranks = tuple(sorted(rank for holders in same.values() for rank in holders))
        known[layouts[parameter], matrix] = _Holders(ranks, same)
    return [known[layouts[parameter], matrix] for parameter, matrix in tasks]


def _frozen(pieces: list[list[Piece]]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(map(tuple, pieces))


def _work(matrix: Matrix) -> int:
    """Multiplications of an iteration, up to a factor."""
    short, long = sorted(matrix.shape)
    return short * short * long
