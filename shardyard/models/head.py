"""The output layer of a model: from hidden states to the loss, without logits of more than a few rows.

The layer's own module computes the loss, called once a forward. So FSDP gathers its weight and reduces its
gradient as for any module, tensor parallelism shows it its part of the weight, and recomputation wraps it.
What a family does to logits after the layer is read from its config by one table. At start the built model
is asked whether that is all: a family whose own logits are others keeps its own forward, whole logits of the
labelled positions included.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardyard.config import OptimizationConfig, TrainingConfig
from shardyard.errors import UserError
from shardyard.models.probe import probing
from shardyard.ops.linear_cross_entropy import HeadLoss, Tail, linear_cross_entropy_sum, linear_token_scores
from shardyard.ops.vocabulary import PLAIN, LossTerms
from shardyard.parallel.pipeline import parts_of

logger = logging.getLogger("shardyard.models")

_CAP = "final_logit_softcapping"
_SCALES: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1 / value,
    "logit_scale": float,
    "lm_head_multiplier": float,
    "output_multiplier": float,
}
"""Name of a number in a family's config -> what its logits are multiplied by."""
_OTHER_SCALES: dict[str, dict[str, Callable[[float], float]]] = {"hyperclovax": {"logits_scaling": float}}

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_PROBE_TOKENS = 8
"""The hidden states of the k-th are taken 2^k-fold, so that a bound on logits shows, and an addend too."""


@dataclass(frozen=True)
class LossOptions:
    """``terms`` are added to the cross entropy in training; ``chunk``: as `HeadLoss`."""

    terms: LossTerms = PLAIN
    chunk: int | None = None

    @classmethod
    def of(cls, training: TrainingConfig, optimization: OptimizationConfig) -> LossOptions:
        terms = LossTerms(training.z_loss_coef, training.label_smoothing)
        return cls(terms, optimization.chunk_loss_size)


def tail_of(config: Any) -> Tail:
    """What the family of ``config``, the part about text, does to its logits."""
    scale, own = 1.0, _OTHER_SCALES.get(config.model_type, {})
    for name, factor in (_SCALES | own).items():
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            scale *= factor(value)
    return Tail(scale, getattr(config, _CAP, None) or None)


class LossHead:
    """The loss of one model. ``unsuited``: why its family's own logits are used instead; None if not."""

    def __init__(
        self, tail: Tail, options: LossOptions, group: dist.ProcessGroup | None, unsuited: str | None
    ) -> None:
        self.tail, self.options, self.group, self.unsuited = tail, options, group, unsuited
        self.checking = False
        """Whether the model's forward compares its logits with ours instead of computing a loss."""
        self.scoring = False
        """Whether the model's forward scores each token instead of summing the loss: see `scoring`."""

    @classmethod
    def of(cls, model: Any, options: LossOptions, group: dist.ProcessGroup | None) -> LossHead:
        """Of a model before any transformation; its output layer learns to compute the loss."""
        layer = model.get_output_embeddings()
        unsuited = None
        if model.base_model is model:
            unsuited = "its body is no module of its own"
        elif not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            unsuited = f"its output layer is a {type(layer).__name__}"
        else:
            _take_targets(layer)
        return cls(tail_of(model.config.get_text_config()), options, group, unsuited)

    def terms(self, *, training: bool) -> LossTerms:
        """A validation loss is the plain cross entropy."""
        return self.options.terms if training else PLAIN

    def loss_sum(
        self, layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, *, training: bool
    ) -> torch.Tensor:
        """``hidden`` [L, H], ``targets`` [L] -> the sum of the loss, fp32 []: `linear_cross_entropy_sum`."""
        how = HeadLoss(self.tail, self.terms(training=training), self.options.chunk, self.group)
        return layer(hidden, targets, how)

    def scores(self, layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[L, 2], of the same arguments: `token_scores_`."""
        return layer(hidden, targets, HeadLoss(self.tail, PLAIN, self.options.chunk, self.group), True)

    def difference(self, layer: nn.Module, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Of our logits to the family's ``own`` [1, T, V/n], fp32 []: the worst row's, relative to it.

        Rows that `amplified` took out of fp16's range, in both, say nothing.
        """
        own = own.float()
        ours = self.tail(layer(hidden).float())
        worst = (ours - own).abs().amax(-1) / own.abs().amax(-1).clamp_min(1e-12)
        silent = ~(own.isfinite().all(-1) | ours.isfinite().all(-1))
        silent[:, 0] = False  # the first is as it came
        return worst.masked_fill(silent, 0.0).max()


def _take_targets(layer: nn.Linear) -> None:
    """Called with targets besides hidden states, the layer gives the loss instead of logits.

    On the instance, before anything else is set there: tensor parallelism wraps it, so that ``weight`` and
    ``bias`` are this rank's words.
    """
    logits = layer.forward

    def forward(
        input: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: HeadLoss | None = None,
        scores: bool = False,
    ) -> torch.Tensor:
        if targets is None:
            return logits(input)
        compute = linear_token_scores if scores else linear_cross_entropy_sum
        return compute(input, layer.weight, targets, layer.bias, loss)

    layer.forward = forward


@contextmanager
def amplified(layer: nn.Module) -> Iterator[None]:
    """Inside, the hidden states [1, T, H] of the k-th token enter the output layer 2^(k mod 8)-fold."""

    def amplify(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args
        power = torch.arange(hidden.shape[1], device=hidden.device) % _PROBE_TOKENS
        return hidden * (2.0**power)[:, None].to(hidden.dtype), *others

    handle = layer.register_forward_pre_hook(amplify)
    try:
        yield
    finally:
        handle.remove()


def check_head(
    model: Any, config: Any, options: LossOptions, dtype: torch.dtype, device: torch.device, *, packed: bool
) -> None:
    """Compare our logits with the family's own on the live model; where they differ it keeps its own.

    Every rank calls it, with the same verdict for all. ``dtype``: of compute; ``packed``: whether the model
    takes the lengths of documents.

    Raises:
        UserError: they differ, and a chunk size was set.
    """
    difference, reason = _difference(model, config.get_text_config().vocab_size, device, packed=packed)
    if difference <= _TOLERANCE[dtype]:
        return
    reason = reason or f"its logits differ from those of its output layer by {difference:.1e}"
    if options.chunk is not None:
        raise UserError(
            f"optimization.chunk_loss_size: {options.chunk} needs the output layer of the model, and a "
            f"{config.model_type!r} model has a forward of its own around it ({reason}); leave it out"
        )
    logger.info("the loss takes whole logits of the labelled positions from the model's own code: %s", reason)
    for head in heads_of(model):
        head.unsuited = reason


def _difference(
    model: Any, vocab_size: int, device: torch.device, *, packed: bool
) -> tuple[float, str | None]:
    """The worst difference of any rank, and what this rank knows of the reason."""
    heads = heads_of(model)
    reason = next((head.unsuited for head in heads if head.unsuited), None)
    worst = torch.full((), math.inf, device=device)
    if reason is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab_size, (1, _PROBE_TOKENS), generator=generator).to(device)
        positions = torch.arange(_PROBE_TOKENS, device=device)[None]
        lengths = {"doc_lens": (_PROBE_TOKENS,)} if packed else {}
        try:
            with probing(model), _checking(heads):
                worst = model(input_ids=tokens, position_ids=positions, labels=tokens, **lengths).float()
        except (
            TypeError,
            AttributeError,
            NotImplementedError,
            ValueError,
        ) as error:  # a family's own forward
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    worst = worst.nan_to_num(nan=math.inf, posinf=math.inf)
    if dist.is_initialized():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item(), reason


@contextmanager
def scoring(model: Any) -> Iterator[None]:
    """Inside, a forward with labels gives fp32 [T, 2] on every rank that shares the micro-batch, of a
    pipeline on those of the last stage: the log-probability of each label, and 1 where no word is likelier;
    zeros where there is no label.
    """
    heads = heads_of(model)
    for head in heads:
        head.scoring = True
    try:
        yield
    finally:
        for head in heads:
            head.scoring = False


@contextmanager
def _checking(heads: list[LossHead]) -> Iterator[None]:
    for head in heads:
        head.checking = True
    try:
        yield
    finally:
        for head in heads:
            head.checking = False


def heads_of(model: Any) -> list[LossHead]:
    """Of this rank: none where only earlier stages of a pipeline are."""
    return [part.loss_head for part in parts_of(model) if part.loss_head is not None]
