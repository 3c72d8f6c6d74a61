"""transformers' continuous batching as an engine: requests join and leave at each step, caches are paged.

Its loop, cache and scheduler are used as they are. Ours are the choice of the next token, which asks each
request's own `Row`, and the way of events to the caller. Both sit where transformers' classes call methods of
their own instances; the test of tokens against `generate` watches over that seam.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.continuous_batching.utils import logger as transformers_logger

from shardyard.infer.engines.book import Book, Entry
from shardyard.infer.sampler import Row, choose_all
from shardyard.infer.types import Deliver, Finished, Load, Request

logger = logging.getLogger("shardyard.infer")

_PAGE = 64
"""Tokens of a page of the cache: prompts with a common beginning share whole pages."""


@dataclass(frozen=True)
class Room:
    """What an engine may hold at a time."""

    context_length: int
    max_running: int
    """Requests."""
    cache_tokens: int
    """Tokens of all running requests together."""
    prefill_tokens: int
    """Tokens of one step."""

    def config(self, model: Any) -> ContinuousBatchingConfig:
        kinds = len(set(getattr(model.config.get_text_config(), "layer_types", None) or [None]))
        return ContinuousBatchingConfig(
            page_size=_PAGE,
            # each request may leave a page half full, of each kind of attention
            num_blocks=math.ceil(self.cache_tokens / _PAGE) + (self.max_running + 1) * kinds,
            max_batch_tokens=max(self.prefill_tokens, self.max_running),
            max_requests_per_batch=self.max_running,
            # what a captured graph replays would not ask our rows
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=model.dtype is not torch.float32,
        )


class ContinuousEngine:
    """`Engine` of one process, or of rank 0 of those that share each layer; the others `follow`."""

    def __init__(self, model: Any, room: Room) -> None:
        self.context_length = min(room.context_length, room.cache_tokens)
        self._book = Book(self.context_length, model.config.get_text_config().vocab_size)
        self._manager = _Manager(model, room.config(model), self._book)
        with torch.inference_mode():  # which the loop takes over from whoever starts it
            self._manager.start()

    @property
    def fault(self) -> str | None:
        if self._book.fault is None and not self._manager.is_running() and not self._manager.closing:
            self._book.fail(f"generation has stopped: {self._manager.background_thread_status.fatal_error}")
        return self._book.fault

    def submit(self, request: Request, deliver: Deliver) -> str:
        entry = self._book.add(request, deliver)
        sampling = entry.request.sampling
        asked = self._manager.add_request(
            list(entry.request.prompt_ids), request_id=entry.id, max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(sampling.stop_ids) or [-1],
        )  # fmt: skip
        if asked is None:
            self._book.give(entry, Finished("error", "the engine has stopped"))
            raise RuntimeError("the engine has stopped")
        return entry.id

    def cancel(self, request_id: str) -> None:
        entry = self._book.get(request_id)
        if entry is not None:
            self._manager.cancel_request(request_id)
            self._book.give(entry, Finished("cancelled"))

    def load(self) -> Load:
        return self._book.load()

    def close(self) -> None:
        if not self._book.close():
            return
        self._manager.closing = True
        with quiet():  # it warns of a loop that was never asked
            self._manager.stop(block=True, timeout=30.0, hard_stop=True)
            self._manager.destroy()


def follow(model: Any, room: Room) -> None:
    """What the other ranks do until rank 0's engine is closed. Raises RuntimeError for a fault."""
    manager = _Manager(model, room.config(model), None)
    with torch.inference_mode():
        manager.start()
    manager.join(time.perf_counter())
    if fault := manager.background_thread_status.fatal_error:
        raise RuntimeError(f"generation has stopped: {fault}") from fault
    manager.destroy()


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers' loop would log is left to us, who say it in one line."""
    level = transformers_logger.level
    transformers_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logger.setLevel(level)


class _Manager(ContinuousBatchingManager):
    """transformers' manager with our choice of tokens and our way of events; without a book, a follower's."""

    closing = False

    def __init__(self, model: Any, config: ContinuousBatchingConfig, book: Book | None) -> None:
        super().__init__(model, GenerationConfig(eos_token_id=-1, do_sample=False), config)
        self._book = book
        self.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
        self.output_router = _Router(book)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        chooser = None if self._book is None else _Chooser(processor, self._book, self.cancel_request)
        processor.model_runner._sample = _Told(processor, chooser)  # type: ignore[method-assign]
        return processor


class _Router(OutputRouter):
    """Takes the ends of requests; their tokens have gone out when they were chosen."""

    def __init__(self, book: Book | None) -> None:
        super().__init__()
        self._book = book

    def deliver(self, output: GenerationOutput) -> None:
        if self._book is None:
            return
        entry = self._book.get(output.request_id)
        if entry is None or not output.is_finished():
            return
        if output.status == RequestStatus.FAILED:
            self._book.give(entry, Finished("error", output.error or "generation failed"))
            return
        last = output.generated_tokens[-1:]
        stopped = bool(last) and last[0] in entry.request.sampling.stop_ids
        self._book.give(entry, Finished("stop" if stopped else "length"))

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class _Told:
    """Stands for transformers' ``_sample``: the scores of a step -> the next token of each request.

    Rank 0 chooses; what it has chosen is told to the ranks that share the model.
    """

    def __init__(self, processor: ContinuousBatchProcessor, chooser: _Chooser | None) -> None:
        self._processor, self._chooser = processor, chooser

    def __call__(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """``scores`` [1, R, V] of the R requests that get a token now; ids go into ``output_ids`` [1, *]."""
        in_batch: Any = self._processor.inputs_and_outputs.requests_in_batch  # pyright: ignore[reportAttributeAccessIssue]
        names = [future.state.request_id for future in in_batch if future.has_new_token]
        told = output_ids[0, : len(names)]
        if self._chooser is not None:
            rows = scores[0, : len(names)]  # more follow, without meaning, while prompts are read in parts
            told.copy_(torch.tensor(self._chooser.ids(names, rows), dtype=told.dtype))
        self._processor.distributed_helper.tp_broadcast_from_rank_0(told)


class _Chooser:
    """Asks the row of each request, and delivers what it has chosen."""

    def __init__(self, processor: ContinuousBatchProcessor, book: Book, cancel: Any) -> None:
        self._book, self._cancel = book, cancel
        self._most = 2 * (processor.cb_config.max_requests_per_batch or 1)
        self._rows: dict[str, Row] = {}

    def ids(self, names: list[str], scores: torch.Tensor) -> list[int]:
        """The next token of each request of ``names`` [R], by ``scores`` [R, V]; 0 for one that is gone."""
        entries = [self._book.get(name) for name in names]
        live = [(index, entry) for index, entry in enumerate(entries) if entry is not None]
        for name in (name for name, entry in zip(names, entries, strict=True) if entry is None):
            self._cancel(name)  # it may have been cancelled before the loop knew of it
        ids = [0] * len(names)
        if live:
            kept = scores if len(live) == len(names) else scores[[index for index, _ in live]]
            rows = [self._row(entry, scores.device) for _, entry in live]
            for (index, entry), token in zip(live, choose_all(rows, kept), strict=True):
                self._book.give(entry, token)
                if isinstance(token, Exception):
                    self._cancel(entry.id)
                else:
                    ids[index] = token.id
        self._forget()
        return ids

    def _row(self, entry: Entry, device: torch.device) -> Row:
        row = self._rows.get(entry.id)
        if row is None:
            self._book.start(entry)
            row = self._rows[entry.id] = Row(entry.request, device)
        return row

    def _forget(self) -> None:
        """Rows of requests that have ended; not at each step, as the look costs a lock each."""
        if len(self._rows) > self._most:
            self._rows = {name: row for name, row in self._rows.items() if self._book.get(name) is not None}
