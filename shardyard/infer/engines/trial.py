"""Which ways of batching give this model's own numbers; found by trying, as families differ."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from shardyard.device import ProcessGroup
from shardyard.errors import first_line
from shardyard.infer.engines.continuous import quiet
from shardyard.infer.types import Engine, Event, Finished, Request, Sampling, Token

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Of a log-probability: rounding in each dtype; a mistake in positions or masks is larger by far."""
_TOKENS, _PROMPTS = 3, (5, 9)
_SECONDS = 600.0


def scores_of_continuous(model: Any, make: Callable[[], Engine | None], group: ProcessGroup) -> str | None:
    """Why the engine that ``make`` builds does not answer as the model's plain forward; None if it does.

    Every rank calls it; ``make`` gives rank 0 the engine, and follows it on the others.
    """
    prompts = [_prompt(model, length) for length in _PROMPTS]
    fault, answers = "", []
    try:
        with quiet():
            engine = make()
            if engine is not None:
                try:
                    answers = _ask(engine, prompts)
                finally:
                    engine.close()
    except Exception as error:  # of every type: transformers' paged caches know some families only
        fault = first_line(error)
    told = group.gather_objects((fault, answers))
    if faults := [text for text, _ in told if text]:
        return f"transformers' continuous batching does not carry this model: {faults[0]}"
    for prompt, answer in zip(prompts, told[0][1], strict=True):
        difference = _difference(model, prompt, answer)
        if not difference <= _TOLERANCE[model.dtype]:
            return f"continuous batching gives other log-probabilities, by {difference:.1e}"
    return None


def pads_exactly(model: Any) -> bool:
    """Whether a prompt's scores are the same alone and behind padding on its left."""
    short, long = (_prompt(model, length) for length in _PROMPTS)
    alone = _scores(model, torch.tensor([short]), torch.ones(1, len(short), dtype=torch.long))
    gap = len(long) - len(short)
    ids = torch.tensor([[0] * gap + short, long])
    mask = torch.ones_like(ids)
    mask[0, :gap] = 0
    batched = _scores(model, ids, mask)[:1]
    return bool((alone - batched).abs().max() <= _TOLERANCE[model.dtype])


def _prompt(model: Any, length: int) -> list[int]:
    size = model.config.get_text_config().vocab_size
    return [(7 * place * place + 3 * place + length) % size for place in range(length)]


def _ask(engine: Engine, prompts: list[list[int]]) -> list[list[Token]]:
    sampling = Sampling(max_new_tokens=_TOKENS, logprobs=True)
    answers = []
    queues: list[queue.Queue[Event]] = [queue.Queue() for _ in prompts]
    for prompt, events in zip(prompts, queues, strict=True):
        engine.submit(Request(tuple(prompt), sampling), events.put)
    for events in queues:
        tokens: list[Token] = []
        while not isinstance(event := events.get(timeout=_SECONDS), Finished):
            tokens.append(event)
        if event.reason != "length":
            raise RuntimeError(event.error or event.reason)
        answers.append(tokens)
    return answers


@torch.no_grad()
def _difference(model: Any, prompt: list[int], answer: list[Token]) -> float:
    """The largest of the answer's log-probabilities, against one forward over prompt and answer."""
    chosen = [token.id for token in answer]
    ids = torch.tensor([[*prompt, *chosen]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    plain = torch.log_softmax(logits, -1).gather(1, torch.tensor(chosen, device=logits.device)[:, None])
    told = torch.tensor([token.logprob for token in answer], device=logits.device)
    return float((plain[:, 0] - told).abs().max())


@torch.no_grad()
def _scores(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the first two tokens of an answer, fp32 [B, 2, V]."""
    config = GenerationConfig(
        max_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    told = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
    )
    return torch.log_softmax(torch.stack(told.logits, 1).float(), -1)
