"""Beam search, by transformers' own `generate`: one prompt at a time, on all ranks in step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from shardyard.infer.answers import Answer, text_stream
from shardyard.infer.plan import Task
from shardyard.infer.types import Token


@torch.no_grad()
def beam_search(model: Any, tokenizer: Any, task: Task, *, context_length: int) -> list[Answer]:
    """The ``n`` best of the task's beams, best first. With a temperature beams are drawn, by the seed.

    ``logit_bias`` and the penalties for presence and frequency are none of transformers', and are refused
    before.
    """
    sampling = task.request.sampling
    ids = torch.tensor([task.request.prompt_ids], device=model.device)
    config = GenerationConfig(
        num_beams=task.num_beams, num_return_sequences=task.n,
        max_new_tokens=min(sampling.max_new_tokens, context_length - ids.shape[1]),
        do_sample=not sampling.is_greedy, repetition_penalty=sampling.repetition_penalty,
        eos_token_id=sorted(sampling.stop_ids) or None, pad_token_id=_pad(sampling.stop_ids),
        return_dict_in_generate=True, output_scores=True,
        **({} if sampling.is_greedy else dict(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            min_p=sampling.min_p or None,
        )),
    )  # fmt: skip
    if not sampling.is_greedy:
        torch.manual_seed(sampling.seed or 0)
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    scores = found.sequences_scores.tolist()
    rows = found.sequences[:, ids.shape[1] :].tolist()
    return [_answer(row, score, task, tokenizer) for row, score in zip(rows, scores, strict=True)]


def _pad(stop_ids: frozenset[int]) -> int:
    """Stands behind a stop token, where nobody reads it."""
    return min(stop_ids, default=0)


def _answer(ids: list[int], score: float, task: Task, tokenizer: Any) -> Answer:
    stop_ids, stream, text = task.request.sampling.stop_ids, text_stream(task, tokenizer), ""
    for place, token in enumerate(ids):
        text += "" if token in stop_ids else stream.feed(token)
        if token in stop_ids or stream.finished:  # a stop text is the template's; the user's are refused
            kept = [Token(token) for token in ids[: place + 1]]
            return Answer(text + ("" if stream.finished else stream.flush()), kept, "stop", score=score)
    return Answer(text + stream.flush(), [Token(token) for token in ids], "length", score=score)
