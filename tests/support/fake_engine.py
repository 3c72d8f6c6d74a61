"""An engine without a model: it answers by a script, and tells what it was asked and what was cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shardyard.infer.types import Deliver, Finished, Load, Request, Sampling, Token

Script = Callable[[Request], Iterable[Token | Finished | None]]
"""The events of a request; None waits until the test lets it go on (`FakeEngine.go`)."""


class FakeEngine:
    """`Engine`: each request is answered by a thread of its own."""

    def __init__(self, script: Script, *, context_length: int = 512, vocab_size: int = 400) -> None:
        self.context_length, self._vocab_size = context_length, vocab_size
        self.script = script
        self.fault: str | None = None
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.go = threading.Event()
        self._open: dict[str, tuple[Request, Deliver]] = {}
        self._lock = threading.Lock()
        self._prompt_tokens = self._new_tokens = 0

    def submit(self, request: Request, deliver: Deliver) -> str:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        wrong = [i for i in (*request.prompt_ids, *request.sampling.logit_bias) if i >= self._vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is not in the vocabulary of {self._vocab_size}")
        if not 0 < len(request.prompt_ids) < self.context_length:
            raise ValueError("no room")
        with self._lock:
            name = f"request-{len(self.asked)}"
            self.asked.append(request)
            self._open[name] = (request, deliver)
            self._prompt_tokens += len(request.prompt_ids)
        threading.Thread(target=self._answer, args=(name, request), daemon=True).start()
        return name

    def _answer(self, name: str, request: Request) -> None:
        for event in self.script(request):
            if event is None:
                self.go.wait(30)
            elif not self._give(name, event) or isinstance(event, Finished):
                return

    def _give(self, name: str, event: Token | Finished) -> bool:
        with self._lock:
            if name not in self._open:
                return False
            _, deliver = self._open[name]
            if isinstance(event, Finished):
                del self._open[name]
                self.finished.append(name)
            else:
                self._new_tokens += 1
            deliver(event)
            return True

    def cancel(self, request_id: str) -> None:
        if self._give(request_id, Finished("cancelled")):
            self.cancelled.append(request_id)

    def die(self, fault: str, *, silently: bool = False) -> None:
        """Stop for good. ``silently``: without a last event for anyone."""
        self.fault = fault
        for name in [] if silently else list(self._open):
            self._give(name, Finished("error", fault))

    def load(self) -> Load:
        return Load(len(self._open), 0, self._prompt_tokens, self._new_tokens)

    def close(self) -> None:
        for name in list(self._open):
            self.cancel(name)


@dataclass(frozen=True)
class FakeSide:
    """What a service needs of an opened model."""

    tokenizer: Any
    stop_ids: frozenset[int]
    context_length: int = 512
    run: dict[str, Any] | None = None
    defaults: Sampling = field(default_factory=Sampling)
    choice: Any = None


def says(tokenizer: Any, text: str, *, stop: bool = True, wait_after: int | None = None) -> Script:
    """Answers ``text``, then the stop token, or as much as is asked for; logprobs are -1, -2, ..."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def script(request: Request) -> Iterable[Token | Finished | None]:
        sampling = request.sampling
        ending = [min(sampling.stop_ids)] if stop else []
        for place, token in enumerate([*ids, *ending]):
            if place == wait_after:
                yield None
            if not sampling.logprobs:
                yield Token(token)
            else:
                top = tuple(
                    (ids[number % len(ids)], -1.0 - number) for number in range(sampling.top_logprobs)
                )
                yield Token(token, -1.0 - place, top)
            if place + 1 == sampling.max_new_tokens and token not in sampling.stop_ids:
                yield Finished("length")
        yield Finished("stop" if stop else "length")

    return script
