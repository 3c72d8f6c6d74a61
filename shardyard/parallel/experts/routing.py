"""What a model's routers are told and asked: load, its balance, and a routing that is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn

from shardyard.parallel.meshes import Meshes


@dataclass(frozen=True)
class RoutingStats:
    """Of one step, over all layers with experts and all ranks; the same on every rank.

    ``aux_loss`` is the loss of balance without its coefficient, None when that is 0. ``max_load`` is the
    largest load of any expert in units of its layer's mean; ``unused_experts`` counts the experts of all
    layers that no token reached, of ``experts`` in all.
    """

    aux_loss: float | None
    max_load: float
    unused_experts: int
    experts: int


class Routing:
    """Hooks on the routers of one model (of one stage's model, with pp)."""

    def begin_step(self, num_tokens: int) -> None:
        """Before the forwards of a step; ``num_tokens`` are the real tokens of the global batch."""
        raise NotImplementedError

    @contextmanager
    def forward(self, documents: torch.Tensor | None = None, num_documents: int = 1) -> Iterator[None]:
        """Around each training forward, without its backward; entered by the same ranks of cp and tp.

        ``documents`` [N] int64: which document of the micro-batch each token that this rank routes belongs
        to, in the order of its residual stream (after the cuts by cp and tp); -1 for padding and fillers.
        None: all tokens are real and of document 0. ``num_documents`` is that of the whole micro-batch.
        """
        raise NotImplementedError
        yield

    def finish_step(self, *, applied: bool) -> RoutingStats:
        """After the optimizer, on every rank of the run; a step that was skipped moves no bias."""
        raise NotImplementedError


def build_routing(
    model: nn.Module, meshes: Meshes, *, aux_coefficient: float, bias_rate: float, fixed: bool
) -> Routing | None:
    """The routing of ``model``, on every rank of the run; None when no rank's model has experts.

    Call it once the model is parallelised and before its first forward. ``aux_coefficient`` is
    training.router_aux_loss_coef, ``bias_rate`` training.router_bias_update_rate resolved, ``fixed``
    optimization.fix_router.

    Raises:
        UserError: a coefficient, a rate or a fixed routing for a model whose routers have no place for it.
    """
    raise NotImplementedError
