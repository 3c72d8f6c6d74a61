"""A talk with a model: its history, and one answer after another through an engine."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.data.types import Conversation, Message
from shardyard.errors import UserError
from shardyard.infer.chat_format import ChatFormat, Prompt
from shardyard.infer.openai_messages import to_openai
from shardyard.infer.replies import Delta, Reply, ReplyParser
from shardyard.infer.replies.parser import joined
from shardyard.infer.text import TextStream
from shardyard.infer.types import Engine, Event, Finished, Request, Sampling

_LOOK_S = 0.5
"""How often Ctrl-C, and an engine that has stopped, are looked for."""
_LEAST_ROOM = 64
"""Tokens that history leaves to an answer, or ``max_new_tokens`` if that is less."""


@dataclass(frozen=True)
class Answered:
    """An answer and how it came to be."""

    reply: Reply
    reason: str
    """``stop``, ``length``, ``interrupted`` or ``error``."""
    error: str
    tokens: int
    seconds: float
    first_token: float
    """Seconds to the first token."""
    dropped: int
    """Messages at the history's beginning that were left out for want of room."""


class Talk:
    """The history of a talk, which `ask` and `retry` go on with.

    What is dropped for want of room is dropped for good: ``turns`` is always what the model is shown.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        form: ChatFormat,
        sampling: Sampling,
        *,
        stop: tuple[str, ...] = (),
        system: str | None = None,
        tools: tuple[dict[str, Any], ...] = (),
        enable_thinking: bool | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._form = form
        self._sampling = replace(sampling, stop_ids=sampling.stop_ids | form.stop_ids)
        self._stop = (*stop, *form.stop_texts)
        self._tools = tools
        self._enable_thinking = enable_thinking
        self._asked = 0
        self.system = system
        self.turns: list[Message] = []

    def conversation(self) -> Conversation:
        return Conversation(tuple(self.turns), self.system, self._tools)

    @property
    def open_calls(self) -> int:
        """How many calls of the last reply have no result."""
        for behind, turn in enumerate(reversed(self.turns)):
            if turn.role != "tool":
                return len(turn.tool_calls) - behind if turn.role == "assistant" else 0
        return 0

    def clear(self) -> None:
        """Forget the history; the system message stays."""
        self.turns = []

    def result(self, text: str) -> bool:
        """Give the result of a call; whether all of the reply's have theirs.

        Raises:
            UserError: no call waits for one.
        """
        if self.open_calls < 1:
            raise UserError("no call of the last answer waits for a result")
        self.turns.append(Message("tool", text))
        return self.open_calls == 0

    def ask(self, text: str, show: Callable[[Delta], object]) -> Answered:
        """The answer to a question, which joins the history with it.

        Raises:
            UserError: the question cannot be shown to the model; the history is as it was.
        """
        before = list(self.turns)
        self.turns.append(Message("user", text))
        try:
            return self.go_on(show)
        except UserError:
            self.turns = before
            raise

    def retry(self, show: Callable[[Delta], object]) -> Answered:
        """Another answer in the place of the last one.

        Raises:
            UserError: there is none.
        """
        before, kept = self.turns, list(self.turns)
        while kept and kept[-1].role == "assistant":
            kept.pop()
        if not kept:
            raise UserError("there is nothing to answer yet")
        self.turns = kept
        try:
            return self.go_on(show)
        except UserError:
            self.turns = before
            raise

    def go_on(self, show: Callable[[Delta], object]) -> Answered:
        """The answer to the history as it stands."""
        prompt, dropped = self._fitting()
        sampling = self._sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + self._asked)
        self._asked += 1
        answer = _Answer(self._tokenizer, self._form, prompt, self._stop, self._tools, show)
        try:
            answer.run(self._engine, Request(tuple(prompt.ids), sampling))
        except ValueError as error:
            raise UserError(str(error)) from error
        reply = joined(answer.deltas)
        if reply.content or reply.tool_calls or reply.reasoning:
            self.turns.append(Message("assistant", reply.content, reply.reasoning, reply.tool_calls))
        return Answered(
            reply, answer.reason, answer.error, answer.tokens, answer.seconds, answer.first_token, dropped
        )

    def save(self, path: Path) -> int:
        """Add the talk to a file as one line of JSON, as rows of chats are trained; its messages.

        Raises:
            UserError: there is nothing to save, or the file cannot be written.
        """
        if not self.turns:
            raise UserError("there is nothing to save yet")
        row: dict[str, Any] = {"messages": to_openai(self.conversation())}
        if self._tools:
            row["tools"] = list(self._tools)
        try:
            with path.open("a", encoding="utf-8", errors="surrogatepass") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error
        return len(row["messages"])

    def _fitting(self) -> tuple[Prompt, int]:
        """The prompt of as much history as leaves room for an answer, and how many messages were dropped."""
        room = min(self._sampling.max_new_tokens, _LEAST_ROOM, max(1, self._engine.context_length // 4))
        turns, dropped = list(self.turns), 0
        while True:
            shown = Conversation(tuple(turns), self.system, self._tools)
            prompt = self._form.prompt(shown, enable_thinking=self._enable_thinking)
            if len(prompt.ids) + room <= self._engine.context_length:
                self.turns = turns
                return prompt, dropped
            later = next((n for n, turn in enumerate(turns) if n and turn.role == "user"), None)
            if later is None:
                raise UserError(
                    f"the message and what stands before it are {len(prompt.ids)} tokens; the model's "
                    f"context holds {self._engine.context_length}, the answer's included. Shorten it"
                )
            turns, dropped = turns[later:], dropped + later


class _Answer:
    """One request: its events -> deltas, which are shown as they come."""

    def __init__(
        self,
        tokenizer: Any,
        form: ChatFormat,
        prompt: Prompt,
        stop: tuple[str, ...],
        tools: tuple[dict[str, Any], ...],
        show: Callable[[Delta], object],
    ) -> None:
        self._stream = TextStream(tokenizer, stop, keep=form.replies.marks)
        self._parser = ReplyParser(
            form.replies, tools=tools, in_thought=prompt.in_thought, reads_calls=bool(tools)
        )
        self._show = show
        self._stop_ids: frozenset[int] = frozenset()
        self.deltas: list[Delta] = []
        self.reason, self.error = "", ""
        self.tokens, self.seconds, self.first_token = 0, 0.0, 0.0

    def run(self, engine: Engine, request: Request) -> None:
        """To the end, or to Ctrl-C, after which what has come counts."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop_ids = request.sampling.stop_ids
        start = time.monotonic()
        request_id = engine.submit(request, events.put)
        try:
            while not self.reason:
                self._take(_next(events, engine), start)
        except KeyboardInterrupt:
            self.reason = "interrupted"
        finally:
            engine.cancel(request_id)
        self.seconds = time.monotonic() - start
        self._add(self._stream.flush())
        self._tell(self._parser.flush())

    def _take(self, event: Event, start: float) -> None:
        if isinstance(event, Finished):
            self.reason, self.error = event.reason, event.error
            return
        self.tokens += 1
        if self.tokens == 1:
            self.first_token = time.monotonic() - start
        if event.id not in self._stop_ids:
            self._add(self._stream.feed(event.id))
        if self._stream.finished:
            self.reason = "stop"

    def _add(self, text: str) -> None:
        self._tell(self._parser.feed(text))

    def _tell(self, deltas: list[Delta]) -> None:
        self.deltas += deltas
        for delta in deltas:
            self._show(delta)


def _next(events: queue.SimpleQueue[Event], engine: Engine) -> Event:
    while True:
        try:
            return events.get(timeout=_LOOK_S)
        except queue.Empty:
            if engine.fault is not None and events.empty():
                raise RuntimeError(engine.fault) from None
