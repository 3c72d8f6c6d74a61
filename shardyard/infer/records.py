"""An answer as a row of JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardyard.infer.answers import Answer
from shardyard.infer.plan import Task

Parse = Callable[[str], dict[str, Any]]
"""A chat's reply -> ``text`` (what is said), and ``reasoning`` and ``tool_calls`` where there are some."""


def record(task: Task, answer: Answer, tokenizer: Any, *, number: int = 0, parse: Parse | None = None) -> Any:
    """The row that was asked, with its answer: text, tokens (ids), finish_reason, and what else was wanted.

    ``number``: which of the row's answers it is.
    """
    sampling = task.request.sampling
    found: dict[str, Any] = {**task.row.kept, "text": answer.text}
    if parse is not None:
        found |= parse(answer.text)
    found["tokens"] = [token.id for token in answer.tokens]
    found["finish_reason"] = answer.finish_reason
    found["prompt_tokens"] = len(task.request.prompt_ids)
    if task.n > 1:
        found["answer"] = number
    if not sampling.is_greedy:
        found["seed"] = sampling.seed
    if answer.score is not None:
        found["score"] = answer.score
    if answer.error:
        found["error"] = answer.error
    if sampling.logprobs:
        found["logprobs"] = [
            {
                "id": token.id, "token": tokenizer.decode([token.id]), "logprob": token.logprob,
                "top": [
                    {"id": other, "token": tokenizer.decode([other]), "logprob": value}
                    for other, value in token.top
                ],
            }
            for token in answer.tokens
        ]  # fmt: skip
    elif "logprobs" in found:  # the row said false or null
        del found["logprobs"]
    return found
