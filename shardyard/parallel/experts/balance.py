"""The loss that keeps the load of experts even, as a gradient at the router.

For a document d of n_d tokens in a layer with E experts, of which each token chooses K:

    L_d = E sum_e f_de P_de,   f_de = (choices of e by d's tokens) / n_d,   P_de = (sum of p_te over d) / n_d

where p_te is the router's probability of expert e for token t: the softmax of its logits, or its sigmoid
scores divided by their sum. L_d is K when the load is even. The loss of a step is the mean of L_d, weighted
by n_d, over the documents of the global batch (N tokens) and the layers:

    L = 1 / (N layers) sum_layers sum_d n_d L_d = E / (N layers) sum_layers sum_t sum_e f_d(t)e p_te

f is a count, so dL/dp_te = E f_d(t)e / (N layers). A document is what it is in every layout; only its counts
must be summed over the ranks that share it. transformers' `load_balancing_loss_func` (Switch Transformer,
eq. 4 to 6) takes f and P over all tokens of the micro-batch and all layers at once: it asks for an even load
of the micro-batch, so it depends on how a batch is cut, and lets one layer make up for another. For one
document and one layer the two are equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

Probabilities = Callable[[torch.Tensor], torch.Tensor]
"""Logits [N, E] -> fp32 [N, E], rows sum to 1."""


def softmax_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1)


def sigmoid_probabilities(logits: torch.Tensor) -> torch.Tensor:
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def probabilities_of(router: nn.Module) -> Probabilities:
    """How ``router`` makes scores of its logits: its own code tells, no config field does everywhere."""
    own = inspect.getsource(type(router).forward)
    return sigmoid_probabilities if "sigmoid" in own else softmax_probabilities


class Coefficients:
    """dL/dp of one layer's tokens in one forward: ``table`` [D, E], and which row is each token's.

    The table is filled when the forward is over and the counts of all ranks are known; the backward reads it.
    """

    def __init__(self, table: torch.Tensor, documents: torch.Tensor, probabilities: Probabilities) -> None:
        self.table, self.documents, self.probabilities = table, documents, probabilities


class AddBalanceGradient(torch.autograd.Function):
    """The chosen weights as they are; in the backward, the gradient of the loss is added at the logits.

    An activation checkpoint runs this twice. The graph of the first run is the one that is walked back, with
    the logits of the second, so ``coefficients`` may be None in the second.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, logits: torch.Tensor, coefficients: Coefficients | None
    ) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.coefficients = coefficients
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        if ctx.coefficients is None:
            return grads[0], torch.zeros_like(logits), None
        return grads[0], balance_gradient(logits, ctx.coefficients), None


def balance_gradient(logits: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """dL/dlogits [N, E]; zero for a token of no document (-1)."""
    rows = coefficients.documents
    per_token = coefficients.table[rows.clamp(min=0)] * (rows >= 0)[:, None]
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        probabilities = coefficients.probabilities(leaf)
    (gradient,) = torch.autograd.grad(probabilities, leaf, per_token)
    return gradient
