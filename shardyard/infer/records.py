"""An answer as a row of JSON."""

from __future__ import annotations

from typing import Any

from shardyard.infer.answers import Answer
from shardyard.infer.openai_messages import call_to_openai
from shardyard.infer.plan import Chat, Task
from shardyard.infer.replies import parse_reply


def record(task: Task, answer: Answer, tokenizer: Any, *, number: int = 0) -> dict[str, Any]:
    """The row that was asked, with its answer: text, tokens (ids), finish_reason, and what else was wanted.

    ``number``: which of the row's answers it is. A chat's reply with a thought or calls is also given in its
    parts: reasoning, content, tool_calls.
    """
    sampling = task.request.sampling
    found: dict[str, Any] = {**task.row.kept, "text": answer.text}
    if task.chat is not None:
        found |= _parts(task.chat, answer.text)
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


def _parts(chat: Chat, text: str) -> dict[str, Any]:
    reply = parse_reply(text, chat.replies, tools=chat.tools, in_thought=chat.in_thought)
    if reply.reasoning is None and not reply.tool_calls:
        return {}
    calls = [call_to_openai(call, f"call_{number}") for number, call in enumerate(reply.tool_calls)]
    parts = {"reasoning": reply.reasoning, "content": reply.content, "tool_calls": calls}
    return {name: value for name, value in parts.items() if value or name == "content"}
