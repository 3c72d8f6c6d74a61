"""Asking an engine in a rank, and the plain loop that its answers are compared with."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 100.0


def open_here(model: Path | str, **choice: Any) -> Any:
    """The opened model, with a process group of this rank's own."""
    from shardyard.cli.rank import _convert
    from shardyard.device import detect_device, start_process_group
    from shardyard.infer.model import open_model
    from shardyard.infer.opening import Choice

    device = detect_device()
    return open_model(Choice(str(model), **choice), start_process_group(device), device, convert=_convert)


def ask(engine: Any, requests: Sequence[Any]) -> list[tuple[list[Any], Any]]:
    """(tokens, last event) of each request, all submitted at once."""
    from shardyard.infer.types import Finished

    queues: list[queue.Queue] = [queue.Queue() for _ in requests]
    for request, events in zip(requests, queues, strict=True):
        engine.submit(request, events.put)
    answers = []
    for events in queues:
        tokens = []
        while not isinstance(event := events.get(timeout=SECONDS), Finished):
            tokens.append(event)
        answers.append((tokens, event))
    return answers


def answers_in_rank(
    model: Path, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], **choice: Any
) -> tuple[str, str, list[tuple[list[int], str]]] | None:
    """(engine's class, how ranks share the model, ids and finish reason of each prompt), on rank 0."""
    from shardyard.infer.engines import with_engine
    from shardyard.infer.types import Request, Sampling

    opened = open_here(model, **choice)

    def work(engine: Any) -> Any:
        told = ask(engine, [Request(tuple(prompt), Sampling(**sampling)) for prompt in prompts])
        found = [([token.id for token in tokens], end.reason) for tokens, end in told]
        return type(engine).__name__, opened.parallel, found

    return with_engine(opened, work, max_running=4, cache_tokens=512)


def greedy_by_hand(
    model: Path, prompts: Sequence[Sequence[int]], count: int, stop: Sequence[int] = ()
) -> list[list[int]]:
    """The likeliest token after a forward over prompt and answer, ``count`` times or to a stop token."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                ids.append(int(loaded(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                if ids[-1] in stop:
                    break
        answers.append(ids[len(prompt) :])
    return answers
