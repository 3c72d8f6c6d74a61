"""Requests through an engine, and their answers in the order in which they were asked."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardyard.infer.plan import Task
from shardyard.infer.text import TextStream
from shardyard.infer.types import Engine, Event, Finished, Token

_LOOK_S = 5.0
"""How often we look whether an engine that says nothing is still alive."""


@dataclass
class Answer:
    """What came of a task. ``tokens`` end with the stop token, or the one that completed a stop text."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = ""
    """``stop``, ``length`` or ``error``."""
    error: str = ""
    score: float | None = None
    """Of beams: the mean log-probability that they are ordered by."""


def answers(
    engine: Engine,
    tasks: Sequence[Task],
    tokenizer: Any,
    *,
    ahead: int = 128,
    on_text: Callable[[str], object] | None = None,
) -> Iterator[Answer]:
    """The answer of each task, in order; ``ahead`` are asked for at a time. ``on_text`` gets the text as it
    comes, in the order of events: for one task.

    Raises:
        ValueError: a task that the engine refuses.
        RuntimeError: the engine has stopped.
    """
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    open_: dict[int, _Open] = {}
    done: dict[int, Answer] = {}
    asked = 0
    for wanted in range(len(tasks)):
        while wanted not in done:
            while asked < len(tasks) and len(open_) < ahead:
                open_[asked] = _Open(tasks[asked], tokenizer, engine, _deliver(events, asked))
                asked += 1
            number, event = _next(events, engine)
            going = open_.get(number)
            if going is None:  # what comes after a stop text
                continue
            text = going.take(event)
            if on_text is not None and text:
                on_text(text)
            if going.ended:
                done[number] = open_.pop(number).answer
        yield done.pop(wanted)


def _deliver(events: queue.SimpleQueue[tuple[int, Event]], number: int) -> Callable[[Event], None]:
    return lambda event: events.put((number, event))


def _next(events: queue.SimpleQueue[tuple[int, Event]], engine: Engine) -> tuple[int, Event]:
    while True:
        try:
            return events.get(timeout=_LOOK_S)
        except queue.Empty:
            if engine.fault is not None and events.empty():
                raise RuntimeError(engine.fault) from None


def text_stream(task: Task, tokenizer: Any) -> TextStream:
    """For the text of a task's answer: the marks of calls are kept, though they may be special tokens."""
    return TextStream(tokenizer, task.stop, keep=task.chat.replies.marks if task.chat is not None else ())


class _Open:
    """An answer that grows."""

    def __init__(self, task: Task, tokenizer: Any, engine: Engine, deliver: Callable[[Event], None]) -> None:
        self.answer = Answer()
        self.ended = False
        self._stop_ids = task.request.sampling.stop_ids
        self._stream = text_stream(task, tokenizer)
        self._engine = engine
        self._id = engine.submit(task.request, deliver)

    def take(self, event: Event) -> str:
        """Add an event; the text that is new by it."""
        answer = self.answer
        if isinstance(event, Finished):
            if event.reason in ("error", "cancelled") and self._engine.fault is not None:
                raise RuntimeError(self._engine.fault)
            answer.finish_reason, answer.error = event.reason, event.error
            return self._end(self._stream.flush())
        answer.tokens.append(event)
        if event.id in self._stop_ids:  # it may be a token that its tokenizer does not call special
            return ""
        text = self._stream.feed(event.id)
        if self._stream.finished:
            self._engine.cancel(self._id)
            answer.finish_reason = "stop"
            return self._end(text)
        answer.text += text
        return text

    def _end(self, text: str) -> str:
        self.answer.text += text
        self.ended = True
        return text
