"""The ranks that answer a benchmark's requests. Rank 0 asks; the others follow until it lets them go.

Between requests rank 0 reads files, builds prompts and runs programs, for as long as that takes: the others
wait on the store, not in a collective. Each rank has the whole model and takes a share of the requests, or
all share it and compute the same batches in step.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardyard.device import ProcessGroup
from shardyard.errors import UserError, first_line
from shardyard.evaluate.likelihood import Pair, log_likelihoods
from shardyard.infer.engines import with_engine
from shardyard.infer.model import Opened
from shardyard.infer.types import Engine, Finished, Request, Sampling
from shardyard.progress import Bar

logger = logging.getLogger("shardyard.evaluate")

Score = tuple[float, bool]
"""The log-probability of a continuation, and whether greedy decoding would have written it."""


@dataclass(frozen=True)
class Prompt:
    """What to go on from, how, and the texts that end the answer, of which none is part of it."""

    ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()


class Crew:
    """Rank 0's side, and by `follow` that of the others.

    ``opened`` is shared by the ranks of ``group``, or each has its own (``opened.parallel`` is none).
    """

    def __init__(self, opened: Opened, group: ProcessGroup, *, batch_size: int) -> None:
        self._opened, self._group = opened, group
        self._batch_size = batch_size
        self._calls = 0

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The scores of pairs of (context ids, continuation ids), in their order."""
        order = sorted(range(len(pairs)), key=lambda at: -sum(map(len, pairs[at])))
        size = 64 * self._batch_size * self._group.world_size
        scores: list[Any] = [None] * len(pairs)
        with Bar("log-likelihoods", len(pairs)) as bar:
            for start in range(0, len(order), size):
                now = order[start : start + size]
                for at, score in zip(now, self._call("score", [pairs[at] for at in now]), strict=True):
                    scores[at] = score
                bar.show(start + len(now), f"log-likelihoods {start + len(now)} of {len(pairs)}")
        return scores

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """The answers, in the order of the prompts."""
        order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at].ids))
        answers = [""] * len(prompts)
        for at, text in zip(order, self._call("generate", [prompts[at] for at in order]), strict=True):
            answers[at] = text
        return answers

    def dismiss(self) -> None:
        """Let the other ranks go, whether all went well or not."""
        self._group.publish(f"crew/{self._calls}", "leave")
        self._calls += 1
        self._group.leave_together()  # this rank may hold the store that tells them

    def follow(self) -> None:
        """What the other ranks do until rank 0 dismisses them."""
        while True:
            kind = self._group.wait(f"crew/{self._calls}")
            self._calls += 1
            if kind == "leave":
                self._group.leave_together()
                return
            self._share(kind, None)

    def _call(self, kind: str, work: list) -> list:
        if not work:
            return []
        self._group.publish(f"crew/{self._calls}", kind)
        self._calls += 1
        return self._share(kind, work)

    def _share(self, kind: str, work: list | None) -> list:
        """This rank's part of the work; on rank 0 the results of all of it."""
        world, rank = self._group.world_size, self._group.rank
        if world > 1:
            held: list[Any] = [work]
            dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
            work = held[0]
        assert work is not None
        do = self._score if kind == "score" else self._generate
        if world == 1 or self._opened.parallel != "none":
            return do(work)
        fault, results = None, []
        try:
            results = do(work[rank::world])
        except UserError as error:
            fault = error
        except Exception as error:  # the others are waiting for this rank's part
            logger.exception("benchmarks have failed")
            fault = RuntimeError(f"rank {rank}: {type(error).__name__}: {first_line(error)}")
        parts = self._group.gather_objects((fault, results))
        if faults := [fault for fault, _ in parts if fault is not None]:
            raise faults[0]
        merged: list[Any] = [None] * len(work)
        for other, (_, results) in enumerate(parts):
            merged[other::world] = results
        return merged

    def _score(self, pairs: list[Pair]) -> list[Score]:
        return log_likelihoods(self._opened.model, pairs) if pairs else []

    def _generate(self, prompts: list[Prompt]) -> list[str]:
        if not prompts:
            return []
        found = with_engine(
            self._opened, lambda engine: self._answers(engine, prompts), max_running=self._batch_size
        )
        return found or []

    def _answers(self, engine: Engine, prompts: list[Prompt]) -> list[str]:
        """All prompts through the engine; an answer is cut short once a stop text has come."""
        events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        stop_ids = self._opened.stop_ids
        names = []
        for at, prompt in enumerate(prompts):
            request = Request(prompt.ids, replace(prompt.sampling, stop_ids=stop_ids))
            try:
                names.append(engine.submit(request, lambda event, at=at: events.put((at, event))))
            except ValueError as error:
                raise UserError(f"a prompt of {len(prompt.ids)} tokens: {error}") from error
        tokens: list[list[int]] = [[] for _ in prompts]
        left = len(prompts)
        with Bar("answers", left) as bar:
            while left:
                at, event = events.get()
                if isinstance(event, Finished):
                    left -= 1
                    bar.show(len(prompts) - left, f"answers {len(prompts) - left} of {len(prompts)}")
                    if event.reason == "error":
                        raise RuntimeError(f"generation has failed: {event.error}")
                elif not self._has_stopped(tokens[at], prompts[at].stop):
                    tokens[at].append(event.id)
                    if self._has_stopped(tokens[at], prompts[at].stop):
                        engine.cancel(names[at])
        return [self._text(ids, prompt.stop) for ids, prompt in zip(tokens, prompts, strict=True)]

    def _has_stopped(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the last tokens hold a stop text; a token has at least one byte of text."""
        if not ids or not stop:
            return False
        longest = max(len(text.encode()) for text in stop)
        tail = self._opened.tokenizer.decode(ids[-longest - 4 :], skip_special_tokens=False)
        return any(text in tail for text in stop)

    def _text(self, ids: list[int], stop: tuple[str, ...]) -> str:
        text = self._opened.tokenizer.decode(ids, skip_special_tokens=True)
        return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]
