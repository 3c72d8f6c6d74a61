"""What a model's routers are told and asked: their load, its balance, and a routing that is fixed.

Nothing of this is known to a family's code. A hook on each router reads its answer (logits, weights,
experts), counts, and puts other weights in their place where a gradient is to be added or the routing is
fixed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardyard.config import OptimizationConfig, TrainingConfig
from shardyard.errors import UserError
from shardyard.parallel.experts.balance import AddBalanceGradient, Coefficients
from shardyard.parallel.experts.load import ForwardCounts, StepLoad
from shardyard.parallel.experts.select import Router, routers
from shardyard.parallel.meshes import Meshes

_BIAS_RATE_OF_PRETRAINING = 0.001
"""DeepSeek-V3's (arXiv 2412.19437, section 4.2)."""


@dataclass(frozen=True)
class RoutingStats:
    """Of one step, over all layers with experts and all ranks; the same on every rank.

    ``aux_loss`` is the loss of balance (see balance.py) without its coefficient, None when that is 0.
    ``max_load`` is the largest load of any expert in units of its layer's mean, NaN without a token;
    ``unused_experts`` counts the experts of all layers that no token reached, of ``experts`` in all.
    """

    aux_loss: float | None
    max_load: float
    unused_experts: int
    experts: int


@dataclass(frozen=True)
class RoutingOptions:
    """What the user asks of the routers."""

    aux_coefficient: float = 0.0
    bias_rate: float = 0.0
    fixed: bool = False
    asked_for_bias: bool = False
    """Whether the rate is the user's own and not that of the stage."""

    @classmethod
    def of(cls, training: TrainingConfig, optimization: OptimizationConfig) -> RoutingOptions:
        rate, asked = training.router_bias_update_rate, bool(training.router_bias_update_rate)
        if rate is None:
            rate = _BIAS_RATE_OF_PRETRAINING if training.stage == "pt" else 0.0
        return cls(training.router_aux_loss_coef, rate, optimization.fix_router, asked)


def build_routing(models: Sequence[nn.Module], meshes: Meshes, options: RoutingOptions) -> Routing | None:
    """The routing of ``models``, this rank's stages (one without pp); None when no stage has experts.

    Called on every rank, once the models are parallelised and before their first training forward.

    Raises:
        UserError: an option for routers that the model lacks, or that its routers have no place for.
    """
    found = [router for model in models for router in routers(model)]
    every = [(router.name, router.bias is not None, router.experts) for router in found]
    if meshes.layout.pp > 1:
        stages: list[Any] = [None] * meshes.layout.pp
        dist.all_gather_object(stages, every, group=meshes.pp.get_group())
        every = [entry for stage in stages for entry in stage]
    if not every and (options.aux_coefficient or options.fixed):
        key = "optimization.fix_router" if options.fixed else "training.router_aux_loss_coef"
        raise UserError(f"{key} is set, but this model has no routers that are known; leave it out")
    if options.asked_for_bias and not any(has_bias for _, has_bias, _ in every):
        raise UserError(
            f"training.router_bias_update_rate: {options.bias_rate}, but this model's routers have no "
            "correction bias (those of DeepSeek-V3 and GLM-4.5 have one); leave it out"
        )
    if not every:
        return None
    names = sorted((name for name, _, _ in every), key=_by_layer)
    return Routing(found, names, max(experts for _, _, experts in every), meshes, options)


def _by_layer(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class Routing:
    """Hooks on the routers of this rank's part of the model."""

    def __init__(
        self, found: Sequence[Router], names: list[str], experts: int, meshes: Meshes, options: RoutingOptions
    ) -> None:
        """``names`` are those of all stages' routers, by layer; ``experts`` is the most that any has."""
        self._options, self._num_layers = options, len(names)
        self._routers = {names.index(router.name): router for router in found}
        self._sharers = [mesh.get_group() for mesh in (meshes.cp, meshes.tp) if mesh.size() > 1]
        self._load = StepLoad(len(names), experts)
        self._share, self._scale = 0.0, 1.0
        self._open: ForwardCounts | None = None
        for layer, router in self._routers.items():
            router.module.register_forward_hook(functools.partial(self._answer, layer))

    def begin_step(self, num_tokens: int, scale: float = 1.0) -> None:
        """Before the forwards of a step; ``num_tokens`` are the real tokens of the global batch, ``scale`` is
        what the loss is multiplied by before the backward pass.
        """
        self._load.clear()
        self._share, self._scale = 1.0 / (num_tokens * self._num_layers), scale

    @contextmanager
    def forward(self, documents: torch.Tensor | None = None, num_documents: int = 1) -> Iterator[None]:
        """Around each training forward, without its backward; entered by the same ranks of cp and tp.

        ``documents`` [N] int64: which document of the micro-batch each token that this rank routes belongs
        to, in the order of its residual stream (after the cuts by cp and tp); -1 for padding and fillers.
        None: all tokens are real and of document 0. ``num_documents`` is that of the whole micro-batch, the
        same on all ranks that share it. A forward outside is not counted and gets no gradient of balance.
        """
        balanced = self._options.aux_coefficient > 0
        self._open = counts = ForwardCounts(documents, num_documents, balanced=balanced)
        try:
            yield
        finally:
            self._open = None
        coefficient = self._options.aux_coefficient * self._scale
        aux_loss = counts.finish(self._share, coefficient, self._sharers) if balanced else None
        self._load.add(counts, aux_loss)

    def pending(self) -> list[torch.Tensor]:
        """What `finish_step` reads of the device, so that it can be read together with other results."""
        return self._load.tensors()

    def arrived(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take what `pending` named, now on the host."""
        self._load.take(tensors)

    def finish_step(self, *, applied: bool) -> RoutingStats:
        """After the optimizer, on every rank of the run; a step that was skipped moves no bias."""
        load, aux_loss = self._load.over_all_ranks()
        if applied and self._options.bias_rate:
            for layer, router in self._routers.items():
                if router.bias is not None:
                    move_bias(router.bias, load[layer, : router.experts], self._options.bias_rate)
        counted = load[load.sum(1) > 0]
        return RoutingStats(
            aux_loss=aux_loss if self._options.aux_coefficient else None,
            max_load=float((counted.max(1).values / counted.mean(1)).max()) if len(counted) else math.nan,
            unused_experts=int((load == 0).sum()),
            experts=load.numel(),
        )

    def _answer(self, layer: int, module: nn.Module, _inputs: Any, answer: Any) -> Any:
        """The hook: a router's (logits [N, E], weights [N, K], experts [N, K], ...), as it goes on."""
        logits, weights, index, *rest = answer
        if self._options.fixed:
            weights, index = fixed_routing(weights, index, self._routers[layer].experts)
        coefficients = self._count(layer, logits, index) if self._open is not None else None
        if self._options.aux_coefficient and logits.requires_grad and torch.is_grad_enabled():
            weights = AddBalanceGradient.apply(weights, logits, coefficients)
        return (logits, weights, index, *rest)

    @torch.no_grad()
    def _count(self, layer: int, logits: torch.Tensor, index: torch.Tensor) -> Coefficients | None:
        assert self._open is not None
        router = self._routers[layer]
        documents = self._open.add(layer, index, router.experts)
        if not self._options.aux_coefficient:
            return None
        self._open.add_probabilities(layer, router.probabilities(logits), documents)
        return Coefficients(self._open.tables[layer], documents, router.probabilities)


def fixed_routing(
    weights: torch.Tensor, index: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot k of the t-th token that a rank routes goes to expert (t + k) mod E with weight 1 / K.

    For measuring speed without a skewed load. The router stays in the graph, with a gradient of zero.
    """
    tokens, top_k = index.shape
    slots = torch.arange(top_k, device=index.device)
    numbers = torch.arange(tokens, device=index.device)[:, None] + slots
    return weights * 0 + 1 / top_k, (numbers % experts).to(index.dtype)


@torch.no_grad()
def move_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> None:
    """One step towards even load: the bias [E] of an expert with less than the mean of ``load`` [E] grows.

    As DeepSeek-V3 does it (arXiv 2408.15664): by ``rate`` whatever the distance; at the mean it stays.
    """
    step = rate * torch.sign(load.mean() - load)
    bias.add_(step.to(bias).view_as(bias))
