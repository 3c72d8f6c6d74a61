"""The requests of an engine: who waits, who runs, and that each ends with exactly one event."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass, field, replace

from shardyard.infer.sampler import NotFiniteError
from shardyard.infer.types import Deliver, Finished, Load, Request, Token

logger = logging.getLogger("shardyard.infer")


@dataclass
class Entry:
    """One request; ``done`` once its last event is delivered."""

    id: str
    request: Request
    deliver: Deliver
    running: bool = False
    done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Book:
    """Checks requests, counts them, and hands on their events. Safe to call from any thread."""

    def __init__(self, context_length: int, vocab_size: int) -> None:
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.fault: str | None = None
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._closed = False
        self._prompt_tokens = self._new_tokens = 0

    def add(self, request: Request, deliver: Deliver) -> Entry:
        """The entry of a checked request, whose answer is bounded by the context; as `Engine.submit`."""
        room = self.context_length - len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty: it has no token")
        if room < 1:
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens; prompt and answer share a context of "
                f"{self.context_length}"
            )
        named = (*request.prompt_ids, *request.sampling.logit_bias)
        if wrong := [token for token in named if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token id {wrong[0]} is not in the vocabulary of {self.vocab_size}")
        if request.sampling.max_new_tokens > room:
            request = replace(request, sampling=replace(request.sampling, max_new_tokens=room))
        with self._lock:
            if self._closed or self.fault is not None:
                raise RuntimeError(f"the engine has stopped{f': {self.fault}' if self.fault else ''}")
            entry = Entry(f"request-{next(self._numbers)}", request, deliver)
            self._entries[entry.id] = entry
        return entry

    def get(self, request_id: str) -> Entry | None:
        """The entry of a request that has not finished."""
        with self._lock:
            return self._entries.get(request_id)

    def start(self, entry: Entry) -> None:
        """Count a request as running."""
        with self._lock:
            if not entry.running:
                entry.running = True
                self._prompt_tokens += len(entry.request.prompt_ids)

    def give(self, entry: Entry, event: Token | Finished | NotFiniteError) -> None:
        """Deliver an event, unless the request has had its last one."""
        if isinstance(event, NotFiniteError):
            event = Finished("error", str(event))
        with entry.lock:  # a cancellation comes from another thread than tokens
            if entry.done:
                return
            if isinstance(event, Finished):
                entry.done = True
            try:
                entry.deliver(event)
            except Exception:  # the fault of one caller is not that of the others
                logger.exception("%s: whoever waits for it failed to take an event", entry.id)
                entry.done = True
        with self._lock:
            if entry.done:
                self._entries.pop(entry.id, None)
            if isinstance(event, Token):
                self._new_tokens += 1

    def fail(self, fault: str) -> None:
        """The engine is dead: all requests end with an error, and no new one begins."""
        with self._lock:
            self.fault = self.fault or fault
            entries = list(self._entries.values())
        for entry in entries:
            self.give(entry, Finished("error", fault))

    def close(self) -> bool:
        """Take no more requests and cancel those that there are; False if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            entries = list(self._entries.values())
        for entry in entries:
            self.give(entry, Finished("cancelled"))
        return True

    def load(self) -> Load:
        with self._lock:
            running = sum(entry.running for entry in self._entries.values())
            waiting = len(self._entries) - running
            return Load(running, waiting, self._prompt_tokens, self._new_tokens)
