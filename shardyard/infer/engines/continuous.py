"""transformers' continuous batching as an engine: requests join and leave at each step, caches are paged.

Its loop, cache and scheduler are used as they are. Ours are the choice of the next token, which asks each
request's own `Row`, and the way of events to the caller. Both sit where transformers' classes call methods of
their own instances; the test of tokens against `generate` watches over that seam.
"""

from __future__ import annotations

import logging
import math
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

from shardyard.infer.engines.book import Book, Entry
from shardyard.infer.sampler import Row, choose_all
from shardyard.infer.types import Deliver, Finished, Load, Request

logger = logging.getLogger("shardyard.infer")

_PAGE = 64
"""Tokens of a page of the cache: prompts with a common beginning share whole pages."""


class ContinuousEngine:
    """`Engine` over one process's model. ``cache_tokens``: how many tokens all requests together may hold."""

    def __init__(
        self, model: Any, *, context_length: int, max_running: int, cache_tokens: int, prefill_tokens: int
    ) -> None:
        context_length = min(context_length, cache_tokens)
        vocab_size = model.config.get_text_config().vocab_size
        self._book = Book(context_length, vocab_size)
        self.context_length = context_length
        kinds = len(set(getattr(model.config.get_text_config(), "layer_types", None) or [None]))
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            # each request may leave a page half full, of each kind of attention
            num_blocks=math.ceil(cache_tokens / _PAGE) + (max_running + 1) * kinds,
            max_batch_tokens=max(prefill_tokens, max_running),
            max_requests_per_batch=max_running,
            # what a captured graph replays would not ask our rows
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=model.dtype is not torch.float32,
        )
        self._manager = _Manager(model, config, self._book)
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
        self._manager.stop(block=True, timeout=30.0, hard_stop=True)
        self._manager.destroy()


class _Manager(ContinuousBatchingManager):
    """transformers' manager with our choice of tokens and our way of events."""

    closing = False

    def __init__(self, model: Any, config: ContinuousBatchingConfig, book: Book) -> None:
        super().__init__(model, GenerationConfig(eos_token_id=-1, do_sample=False), config)
        self._book = book
        self.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
        self.output_router = _Router(book)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        chooser = _Chooser(processor, self._book, self.cancel_request)
        processor.model_runner._sample = chooser  # type: ignore[method-assign]
        return processor


class _Router(OutputRouter):
    """Takes the ends of requests; their tokens have gone out when they were chosen."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book

    def deliver(self, output: GenerationOutput) -> None:
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


class _Chooser:
    """Stands for transformers' ``_sample``: the scores of a step -> the next token of each request."""

    def __init__(self, processor: ContinuousBatchProcessor, book: Book, cancel: Any) -> None:
        self._processor, self._book, self._cancel = processor, book, cancel
        self._most = 2 * (processor.cb_config.max_requests_per_batch or 1)
        self._rows: dict[str, Row] = {}

    def __call__(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """``scores`` [1, R, V] of the R requests that get a token now; ids go into ``output_ids`` [1, *]."""
        in_batch: Any = self._processor.inputs_and_outputs.requests_in_batch  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]
        names = [future.state.request_id for future in in_batch if future.has_new_token]
        entries = [self._book.get(name) for name in names]
        live = [(index, entry) for index, entry in enumerate(entries) if entry is not None]
        for name in (name for name, entry in zip(names, entries, strict=True) if entry is None):
            self._cancel(name)  # it may have been cancelled before the loop knew of it
        ids = [0] * len(names)  # nobody reads those of cancelled requests
        if live:
            kept = scores[0] if len(live) == len(names) else scores[0][[index for index, _ in live]]
            rows = [self._row(entry, scores.device) for _, entry in live]
            for (index, entry), token in zip(live, choose_all(rows, kept), strict=True):
                self._book.give(entry, token)
                if isinstance(token, Exception):
                    self._cancel(entry.id)
                else:
                    ids[index] = token.id
        output_ids[0, : len(ids)] = torch.tensor(ids, dtype=output_ids.dtype)
        self._forget()

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
