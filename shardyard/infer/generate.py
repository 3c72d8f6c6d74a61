"""Many prompts through an opened model, on all of its ranks: rank 0 reads, asks and writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardyard.device import agree
from shardyard.errors import UserError
from shardyard.infer.answers import Answer, answers
from shardyard.infer.beams import beam_search
from shardyard.infer.engines import with_engine
from shardyard.infer.model import Opened
from shardyard.infer.plan import Planner, Task
from shardyard.infer.prompts import Row, Wanted
from shardyard.infer.types import Engine
from shardyard.progress import Bar

logger = logging.getLogger("shardyard.infer")

_TELL_S = 30.0
_NO_ROW = Row("")
Emit = Callable[[Task, Answer, int], object]
"""Takes an answer and its number in its row; in order, on rank 0."""


def generate(
    opened: Opened,
    read: Callable[[], Sequence[Row]],
    wanted: Wanted,
    emit: Emit,
    *,
    max_running: int = 32,
    on_text: Callable[[str], object] | None = None,
    section: dict[str, Any] | None = None,
    key: str = "",
) -> None:
    """Answer what ``read`` gives; every rank calls it. Rank 0 reads, and gets the answers by ``emit``, in
    order. ``on_text`` gets the text of a single answer as it comes. ``key`` tells calls of one run apart.

    Raises:
        UserError: a prompt or setting that cannot be used; nothing was generated then. On every rank.
        RuntimeError: the engine has stopped.
    """
    tasks: list[Task] = []

    def prepare() -> str:
        tasks.extend(Planner(opened, wanted, section=section)(read()))
        _check_ids(tasks, opened.config.get_text_config().vocab_size)
        kind = "beams" if tasks[0].num_beams > 1 else "engine"
        return f"{kind} {min(max_running, len(tasks))}"

    kind, running = agree(opened.group, f"infer/generate/{key}", prepare).split()
    if kind == "beams":
        _by_beams(opened, tasks, emit)
        return
    single = on_text if len(tasks) == 1 else None

    def work(engine: Engine) -> None:
        _check_room(engine, tasks)
        found = answers(engine, tasks, opened.tokenizer, ahead=4 * max_running, on_text=single)
        for task, answer in told(tasks, found):
            emit(task, answer, task.number)

    with_engine(opened, work, max_running=int(running))  # the same on every rank


def _check_ids(tasks: Sequence[Task], vocab_size: int) -> None:
    """A tokenizer may know more tokens than the model has rows for."""
    for task in tasks:
        if (largest := max(task.request.prompt_ids)) >= vocab_size:
            raise UserError(
                f"{task.row.where}: the tokenizer makes token {largest} of it, and the model's vocabulary "
                f"has {vocab_size} tokens; name the model's own tokenizer in --tokenizer"
            )


def _check_room(engine: Engine, tasks: Sequence[Task]) -> None:
    """The memory may hold less than the model's context."""
    for task in tasks:
        if len(task.request.prompt_ids) >= engine.context_length:
            raise UserError(
                f"{task.row.where}: the prompt has {len(task.request.prompt_ids)} tokens; the free memory "
                f"has room for {engine.context_length}, with the answer. Use a smaller --dtype or more ranks"
            )


def _by_beams(opened: Opened, tasks: list[Task], emit: Emit) -> None:
    group = opened.group
    if group.world_size > 1:
        # rows may hold anything, and formats are no concern of the others
        asked = [Task(_NO_ROW, 0, task.request, (), task.num_beams, task.n) for task in tasks]
        shared = group.gather_objects(asked)[0]
    else:
        shared = tasks

    def search() -> Iterator[list[Answer]]:
        for task in tasks if group.is_main else shared:
            yield beam_search(opened.model, opened.tokenizer, task, context_length=opened.context_length)

    if not group.is_main:
        for _ in search():
            pass
        return
    for task, found in told(tasks, search()):
        for number, answer in enumerate(found):
            emit(task, answer, number)


def told(tasks: Sequence[Task], found: Iterator[Any]) -> Iterator[tuple[Task, Any]]:
    """Each task with what was found, and how far it is: a bar on a terminal, else a line now and then."""
    last = time.monotonic()
    with Bar("answers", len(tasks)) if len(tasks) > 1 else _Silent() as bar:
        for number, (task, one) in enumerate(zip(tasks, found, strict=True), 1):
            yield task, one
            bar.show(number, f"{number} of {len(tasks)} answers")
            if not bar.is_shown and len(tasks) > 1 and time.monotonic() - last > _TELL_S:
                last = time.monotonic()
                logger.info("%d of %d answers", number, len(tasks))


class _Silent(Bar):
    """Of a single answer, whose text is its own progress."""

    def __init__(self) -> None:
        super().__init__("", 1)

    def __enter__(self) -> Bar:
        return self
