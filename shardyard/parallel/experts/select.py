"""Which modules of a model are experts, and which routers feed them."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from shardyard.config.sections.parallel import EXPERTS
from shardyard.errors import UserError
from shardyard.parallel.experts.balance import Probabilities, probabilities_of
from shardyard.parallel.patterns import matches, select_modules

logger = logging.getLogger("shardyard.parallel")

ALL_EXPERTS = "num_experts_of_all_ranks"
"""The attribute that keeps what ``num_experts`` was before expert parallelism."""

CORRECTION_BIAS = "e_score_correction_bias"

NamedModules = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Router:
    """A module that chooses K of ``experts`` experts for each token."""

    name: str
    module: nn.Module
    experts: int
    probabilities: Probabilities
    bias_holder: nn.Module | None
    """The router or the block around it, in families that add a correction bias [E] to choose experts."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The correction bias, a buffer."""
        return self.bias_holder._buffers[CORRECTION_BIAS] if self.bias_holder is not None else None


def expert_modules(
    model: nn.Module, patterns: Sequence[str], *, key: str = "parallel.ep_modules"
) -> NamedModules:
    """The experts that ``patterns`` name; when the default names none, all that look like experts.

    A dense model has none: the list is empty, and the caller decides whether that is a mistake.

    Raises:
        UserError: the user's own patterns match nothing in a model with experts, or something else.
    """
    fused = list(fused_experts(model))
    if not fused:
        return []
    if tuple(patterns) == EXPERTS and not any(matches(p, name) for p in patterns for name, _ in fused):
        logger.info("%s: %d modules of class %s", key, len(fused), type(fused[0][1]).__name__)
        return fused
    chosen = select_modules(model, patterns, key=key)
    known = {module for _, module in fused}
    if strangers := [name for name, module in chosen if module not in known]:
        raise UserError(
            f"{key}: {strangers[0]} holds no experts as fused tensors [experts, ., .]; "
            f"those that do: {', '.join(name for name, _ in fused[:3]) or 'none in this model'}"
        )
    return chosen


def fused_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules whose own parameters are stacks of one row per expert, at least one of them of matrices."""
    for name, module in model.named_modules():
        shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
        # Both sizes are those of the whole model also after the split: of a DTensor, and as noted there.
        experts = getattr(module, ALL_EXPERTS, getattr(module, "num_experts", None))
        if any(len(shape) == 3 for shape in shapes) and all(shape[:1] == (experts,) for shape in shapes):
            yield name, module


def takes_routed_tokens(module: nn.Module) -> bool:
    """Whether its forward is (hidden [N, H], index [N, K], weights [N, K]), as nearly everywhere."""
    return len(inspect.signature(type(module).forward).parameters) == 4  # with self


def routers(model: nn.Module) -> list[Router]:
    """The module beside each experts module (``gate`` or ``router``) that chooses among its experts.

    Known are those whose forward ends in ``return logits, weights, indices`` (or more): nearly all.
    """
    modules = dict(model.named_modules())
    found: list[Router] = []
    for name, experts in fused_experts(model):
        parent = name.rpartition(".")[0]
        for child in ("gate", "router"):
            path = f"{parent}.{child}" if parent else child
            if path in modules and _answers_in_three(modules[path]):
                count = getattr(experts, ALL_EXPERTS, experts.num_experts)
                holders = filter(_holds_correction_bias, (modules[path], modules[parent]))
                scores = probabilities_of(modules[path])
                found.append(Router(path, modules[path], count, scores, next(holders, None)))
                break
    return found


def _answers_in_three(router: nn.Module) -> bool:
    last = inspect.getsource(type(router).forward).rstrip().rpartition("return ")[2]
    return bool(re.match(r"\w*logits, ", last)) and last.count(",") >= 2


def _holds_correction_bias(module: nn.Module) -> bool:
    return module._buffers.get(CORRECTION_BIAS) is not None
