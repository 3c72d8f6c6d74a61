"""Batches of transformers' `generate` as an engine: for every family, and for a model that ranks share.

Requests that wait begin together and the next ones when all of them have ended. A batch whose longest prompt
reaches the context's end is over too, and who is left goes on in the next one. Ranks run each batch in step:
rank 0 tells the others its requests and, at each step, which tokens were chosen and who was cancelled.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shardyard.infer.engines.book import Book, Entry
from shardyard.infer.sampler import Row, choose_all
from shardyard.infer.types import Deliver, Finished, Load, Request

logger = logging.getLogger("shardyard.infer")

_HEARTBEAT_S = 60.0
"""How often idle ranks hear from rank 0, well within a collective's time limit."""
_GONE = -1
"""In the place of a token: the request was cancelled or is at fault."""


class BatchEngine:
    """`Engine` of rank 0; the other ranks `follow`. ``padded``: prompts of unequal length share a batch."""

    def __init__(
        self, model: Any, *, context_length: int, max_running: int, padded: bool, ranks: int = 1
    ) -> None:
        self.context_length = context_length
        self._book = Book(context_length, model.config.get_text_config().vocab_size)
        self._runner = _Runner(model, ranks, context_length)
        self._device = model.device
        self._max_running, self._padded, self._ranks = max_running, padded, ranks
        self._waiting: queue.Queue[Entry | None] = queue.Queue()
        self._held: list[Entry] = []
        """Those of another length than the batch that runs, and those that it left unfinished."""
        self._rows: dict[str, Row] = {}
        self._thread = threading.Thread(target=self._work, name="shardyard-generate", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str | None:
        return self._book.fault

    def submit(self, request: Request, deliver: Deliver) -> str:
        entry = self._book.add(request, deliver)
        self._waiting.put(entry)
        return entry.id

    def cancel(self, request_id: str) -> None:
        entry = self._book.get(request_id)
        if entry is not None:
            self._book.give(entry, Finished("cancelled"))

    def load(self) -> Load:
        return self._book.load()

    def close(self) -> None:
        if self._book.close():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                if batch:
                    self._run(batch)
                elif self._ranks > 1:
                    _tell([])
            if self._ranks > 1:
                _tell(None)
        except Exception as error:
            logger.exception("generation has stopped")
            self._book.fail(f"generation has stopped: {type(error).__name__}: {error}")

    def _next(self) -> list[Entry] | None:
        """Requests that begin together; [] after a while without any, None at the end."""
        found, self._held = self._held, []
        try:
            wait = not found
            while True:
                entry = self._waiting.get(block=wait, timeout=_HEARTBEAT_S)
                if entry is None:
                    return None
                found.append(entry)
                wait = False
        except queue.Empty:
            pass
        found = [entry for entry in found if not entry.done]
        batch = [entry for entry in found if self._padded or self._length(entry) == self._length(found[0])]
        batch = batch[: self._max_running]
        self._held = [entry for entry in found if entry not in batch]
        return batch

    def _run(self, batch: list[Entry]) -> None:
        for entry in batch:
            self._book.start(entry)
        rows = [self._rows.get(entry.id) or Row(entry.request, self._device) for entry in batch]
        if self._ranks > 1:
            _tell([_rest(row) for row in rows])
        self._runner.run(rows, _Choice(batch, self._book))
        left = {entry.id: row for entry, row in zip(batch, rows, strict=True) if not entry.done}
        self._rows = {name: row for name, row in self._rows.items() if self._book.get(name)} | left
        self._held = [entry for entry in batch if entry.id in left] + self._held

    def _length(self, entry: Entry) -> int:
        row = self._rows.get(entry.id)
        return len(entry.request.prompt_ids) + (len(row.answer) if row else 0)


def _rest(row: Row) -> Request:
    """What is still to be answered of a row."""
    left = replace(row.sampling, max_new_tokens=row.sampling.max_new_tokens - len(row.answer))
    return Request((*row.prompt, *row.answer), left)


def follow(model: Any, context_length: int) -> None:
    """What the other ranks do until rank 0's engine is closed."""
    runner = _Runner(model, dist.get_world_size(), context_length)
    while (requests := _told()) is not None:
        if requests:
            runner.run([Row(request, model.device) for request in requests], None)


def _tell(requests: list[Request] | None) -> None:
    dist.broadcast_object_list([requests], src=0, device=torch.device("cpu"))


def _told() -> list[Request] | None:
    held: list[Any] = [None]
    dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
    return held[0]


class _Choice:
    """Rank 0's side of a batch: its entries get their events as tokens are chosen."""

    def __init__(self, entries: Sequence[Entry], book: Book) -> None:
        self._entries, self._book = entries, book

    def tokens(self, rows: Sequence[Row], going: Sequence[int], logits: torch.Tensor) -> list[int]:
        """The next token of each row of ``going``, by ``logits`` [B, V]; -1 ends the row."""
        going = [index for index in going if not self._entries[index].done]
        found = {index: _GONE for index in range(len(rows))}
        chosen = choose_all([rows[index] for index in going], logits[going]) if going else []
        for index, token in zip(going, chosen, strict=True):
            self._book.give(self._entries[index], token)
            if isinstance(token, Exception):
                continue
            found[index] = token.id
            if end := rows[index].finished:
                self._book.give(self._entries[index], end)
        return list(found.values())


class _Runner:
    """One batch after another through `generate`, the same on every rank."""

    def __init__(self, model: Any, ranks: int, context_length: int) -> None:
        self._model, self._ranks, self._context_length = model, ranks, context_length

    @torch.no_grad()
    def run(self, rows: list[Row], choice: _Choice | None) -> None:
        """To the end of all, or of the context. ``choice`` is rank 0's; the others take its tokens."""
        device = self._model.device
        known = [_rest(row) for row in rows]
        longest = max(len(request.prompt_ids) for request in known)
        ids = torch.zeros(len(known), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, request in enumerate(known):  # on the left, so that answers begin at one place
            ids[index, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[index, longest - len(request.prompt_ids) :] = 1
        # rows that have ended are carried along, and learned positions end with the context
        steps = max(request.sampling.max_new_tokens for request in known)
        steps = min(steps, self._context_length - longest)
        step = _Step(rows, choice, self._ranks)
        self._model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device),
            generation_config=GenerationConfig(max_new_tokens=steps, do_sample=False, pad_token_id=0),
            logits_processor=LogitsProcessorList([step]),
            stopping_criteria=StoppingCriteriaList([_Ended(step)]),
        )  # fmt: skip


class _Step(LogitsProcessor):
    """Leaves of each row's scores the chosen token alone, which the greedy loop then takes."""

    def __init__(self, rows: list[Row], choice: _Choice | None, ranks: int) -> None:
        self._rows, self._choice, self._ranks = rows, choice, ranks
        self.ended = [False] * len(rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` [B, V]."""
        going = [index for index, ended in enumerate(self.ended) if not ended]
        tokens = [_GONE] * len(self._rows)
        if self._choice is not None:
            tokens = self._choice.tokens(self._rows, going, scores)
        if self._ranks > 1:
            told = torch.tensor(tokens)
            dist.broadcast(told, src=0)
            tokens = told.tolist()
        for index in going:
            if self._choice is None and tokens[index] != _GONE:
                self._rows[index].answer.append(tokens[index])
            self.ended[index] = tokens[index] == _GONE or self._rows[index].finished is not None
        only = torch.full_like(scores, -torch.inf)
        columns = torch.tensor(tokens, device=scores.device).clamp(min=0)
        return only.scatter(1, columns[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Which rows have had their last token."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor(self._step.ended, device=input_ids.device)
