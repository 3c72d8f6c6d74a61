"""From the scores of the next token to the token: one row of an engine's batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shardyard.infer.types import Finished, Request, Sampling, Token

_LEAST_TEMPERATURE = 1e-30
"""Below it fp32 has no room for the divided scores; the likeliest token is drawn long before."""


class NotFiniteError(RuntimeError):
    """The scores hold NaN, or infinities by the request's penalties: no token can be chosen."""


class Row:
    """What is remembered of one request while its answer grows: its tokens, and its own random numbers.

    So an answer depends on its own prompt and seed alone, whatever shares the batch.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        sampling = request.sampling
        self.sampling = sampling
        self.prompt = request.prompt_ids
        self.answer: list[int] = []
        self._plain = _is_plain(sampling)
        self._counts: Counter[int] = Counter()
        self._generator: torch.Generator | None = None
        if not sampling.is_greedy:
            self._generator = torch.Generator(device)
            self._generator.seed() if sampling.seed is None else self._generator.manual_seed(sampling.seed)
        self._penalise, self._narrow = _processors(sampling)

    @property
    def finished(self) -> Finished | None:
        """Why the answer ends with its last token; None while it goes on."""
        if self.answer and self.answer[-1] in self.sampling.stop_ids:
            return Finished("stop")
        if len(self.answer) >= self.sampling.max_new_tokens:
            return Finished("length")
        return None

    def choose(self, logits: torch.Tensor, likeliest: int) -> Token:
        """The next token by ``logits``, fp32 [V], of which ``likeliest`` is the largest.

        Raises:
            NotFiniteError: the logits hold NaN, or the sampling leaves nothing that can be drawn.
        """
        if torch.isnan(logits[likeliest]):  # argmax takes NaN for the largest
            raise NotFiniteError("the model's logits hold NaN")
        chosen = likeliest if self._plain else self._draw(logits)
        self.answer.append(chosen)
        self._counts[chosen] += 1
        if not self.sampling.logprobs:
            return Token(chosen)
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = logprobs.topk(min(self.sampling.top_logprobs, len(logprobs)))
        top = zip(ids.tolist(), values.tolist(), strict=True)
        return Token(chosen, float(logprobs[chosen]), tuple(top))

    def _draw(self, logits: torch.Tensor) -> int:
        scores = logits[None].clone()  # transformers' processors work on [B, V]
        if self._penalise:
            ids = torch.tensor([[*self.prompt, *self.answer]], device=logits.device)
            scores = self._penalise(ids, scores)  # pyright: ignore[reportArgumentType]
        self._add_openai(scores[0])
        if self._generator is None:
            return int(scores[0].argmax())
        none = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        scores = self._narrow(none, scores)  # pyright: ignore[reportArgumentType]
        chances = scores[0].softmax(-1)
        if not torch.isfinite(chances[0]):  # of one infinity or NaN every chance is NaN
            raise NotFiniteError("the penalties or biases leave no finite scores to draw a token from")
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def _add_openai(self, scores: torch.Tensor) -> None:
        sampling = self.sampling
        changes = dict(sampling.logit_bias)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in self._counts.items():
                penalty = sampling.presence_penalty + count * sampling.frequency_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if changes:
            ids = torch.tensor(list(changes), device=scores.device)
            scores[ids] += torch.tensor(list(changes.values()), dtype=scores.dtype, device=scores.device)


def choose_all(rows: Sequence[Row], logits: torch.Tensor) -> list[Token | NotFiniteError]:
    """The next token of each row, by ``logits`` [R, V] of any float dtype; a row's fault is its own."""
    logits = logits.float()
    found: list[Token | NotFiniteError] = []
    for row, scores, likeliest in zip(rows, logits, logits.argmax(-1).tolist(), strict=True):
        try:
            found.append(row.choose(scores, likeliest))
        except NotFiniteError as error:
            found.append(error)
    return found


def _is_plain(sampling: Sampling) -> bool:
    """Whether the likeliest token by the model's own scores is taken."""
    changed = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
    )
    return sampling.is_greedy and not changed


def _processors(sampling: Sampling) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """transformers' own, in the order in which its generate applies them: penalties, then what narrows."""
    penalise, narrow = LogitsProcessorList(), LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        penalise.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.is_greedy:
        return penalise, narrow
    if sampling.temperature != 1.0:
        narrow.append(TemperatureLogitsWarper(max(sampling.temperature, _LEAST_TEMPERATURE)))
    if sampling.top_k:
        narrow.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        narrow.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        narrow.append(MinPLogitsWarper(sampling.min_p))
    return penalise, narrow
