"""Rows of prompts -> requests: ids, sampling and seed of each answer, all checked before the first runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardyard.errors import UserError
from shardyard.infer.asked import Asked, sampling_of
from shardyard.infer.chat_format import ChatFormat
from shardyard.infer.opening import Choice
from shardyard.infer.prompts import Row, Wanted
from shardyard.infer.replies import ReplyFormat
from shardyard.infer.types import Request, Sampling


class Side(Protocol):
    """What is needed of a model to ask it: `Opened` has it, and so has an engine of others."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def defaults(self) -> Sampling: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def context_length(self) -> int: ...
    @property
    def choice(self) -> Choice: ...
    @property
    def run(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Chat:
    """How the reply to a chat's prompt is read. ``in_thought``: the prompt has opened a thought."""

    replies: ReplyFormat
    in_thought: bool
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Task:
    """The ``number``-th of the ``n`` answers of a row; with ``num_beams`` above 1 all of one search."""

    row: Row
    number: int
    request: Request
    stop: tuple[str, ...] = ()
    num_beams: int = 1
    n: int = 1
    chat: Chat | None = None
    """None for a raw prompt."""


class TooLongError(UserError):
    """A prompt that leaves no room for an answer."""


class Planner:
    """Makes tasks of rows. ``section``: the YAML's ``inference:``, by default the run's.

    An answer's seed is the row's plus its number in the row, or else the command's plus its number among all
    answers, so that each can be made again alone.

    Raises:
        UserError: settings that contradict, or that the model has no place for.
    """

    def __init__(self, side: Side, wanted: Wanted, *, section: Mapping[str, Any] | None = None) -> None:
        self._side, self._wanted = side, wanted
        self._section = (side.run or {}).get("inference") if section is None else section
        self._encode = _Encoder(side, wanted, (self._section or {}).get("system"))
        self._stop_ids = side.stop_ids | self._encode.stop_ids
        seed = sampling_of(wanted.asked, self._section, side.defaults, self._stop_ids)[1].seed
        self._next_seed = secrets.randbits(31) if seed is None else seed

    def __call__(self, rows: Sequence[Row]) -> list[Task]:
        """The answers to be made, in order.

        Raises:
            UserError: a row that cannot be asked, named by ``file:line``.
        """
        return [task for row in rows for task in self._of(row)]

    def _of(self, row: Row) -> list[Task]:
        side = self._side
        ids, chat = self._encode(row)
        if len(ids) >= side.context_length:
            raise TooLongError(
                f"{row.where}: the prompt has {len(ids)} tokens, which leaves no room for an answer in the "
                f"model's context of {side.context_length}; shorten it"
            )
        try:
            asked, sampling = sampling_of(
                row.asked.over(self._wanted.asked), self._section, side.defaults, self._stop_ids
            )
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from error
        if row.asked.seed is None:
            sampling = replace(sampling, seed=self._next_seed)
        tasks = _of_row(row, ids, asked, sampling, row.n or self._wanted.n)
        self._next_seed += len(tasks)
        return [replace(task, stop=task.stop + self._encode.stop_texts, chat=chat) for task in tasks]


def _of_row(row: Row, ids: tuple[int, ...], asked: Asked, sampling: Sampling, n: int) -> list[Task]:
    stop, beams = asked.stop or (), asked.num_beams or 1
    if beams > 1:
        if fault := _beam_fault(stop, sampling, beams, n):
            raise UserError(f"{row.where}: {fault}")
        return [Task(row, 0, Request(ids, sampling), num_beams=beams, n=n)]
    if sampling.is_greedy and n > 1:
        raise UserError(
            f"{row.where}: n {n}: answers of the likeliest tokens are all the same; sample, as with "
            "--temperature 1, or search with --num-beams"
        )
    assert sampling.seed is not None
    return [
        Task(row, number, Request(ids, replace(sampling, seed=sampling.seed + number)), stop, n=n)
        for number in range(n)
    ]


def _beam_fault(stop: Sequence[str], sampling: Sampling, beams: int, n: int) -> str:
    if stop:
        return "stop with num_beams: beams are compared as whole answers; leave one out"
    if sampling.logprobs:
        return "logprobs with num_beams: the score of an answer is given; leave logprobs out"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "presence_penalty and frequency_penalty are not known to the search of beams"
    if n > beams:
        return f"n {n} is more than num_beams {beams}: a search ends with so many answers"
    return ""


class _Encoder:
    """Row -> token ids of its prompt."""

    def __init__(self, side: Side, wanted: Wanted, system: str | None) -> None:
        self._tokenizer, self._wanted, self._system = side.tokenizer, wanted, system
        self._chat: ChatFormat | None = None
        if side.tokenizer.chat_template and not wanted.raw:
            self._chat = ChatFormat.of(side)
        else:
            named = {"--system": wanted.system, "--tools": wanted.tools}
            if used := [name for name, value in named.items() if value]:
                why = "--raw" if wanted.raw else "the model's tokenizer has no chat template"
                raise UserError(f"{used[0]}: a raw prompt has no place for it ({why}); see --template")

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset() if self._chat is None else self._chat.stop_ids

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return () if self._chat is None else self._chat.stop_texts

    def __call__(self, row: Row) -> tuple[tuple[int, ...], Chat | None]:
        ids, chat = (self._raw(row), None) if self._chat is None else self._rendered(self._chat, row)
        if not ids:
            raise UserError(f"{row.where}: the prompt is empty: it has no token")
        return tuple(ids), chat

    def _raw(self, row: Row) -> list[int]:
        if row.prompt is None or row.tools:
            what = "messages need" if row.prompt is None else "tools need"
            why = "--raw is given" if self._wanted.raw else "the model's tokenizer has none; see --template"
            raise UserError(f"{row.where}: {what} a chat template, and {why}")
        return list(self._tokenizer(row.prompt)["input_ids"])

    def _rendered(self, chat: ChatFormat, row: Row) -> tuple[list[int], Chat]:
        messages = row.messages or [{"role": "user", "content": row.prompt}]
        first = messages[0]
        has_system = isinstance(first, dict) and first.get("role") in ("system", "developer")
        if self._wanted.system is not None and has_system:
            raise UserError(f"{row.where}: the row has a system message of its own, beside --system")
        system = self._system if self._wanted.system is None else self._wanted.system
        if system and not has_system:
            messages = [{"role": "system", "content": system}, *messages]
        tools = row.tools if row.tools is not None else list(self._wanted.tools)
        try:
            conversation = chat.from_openai(messages, tools or None)
            prompt = chat.prompt(conversation)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from error
        return prompt.ids, Chat(chat.replies, prompt.in_thought, conversation.tools)
