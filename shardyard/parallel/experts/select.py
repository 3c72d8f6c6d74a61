"""Which modules of a model are experts, and which routers feed them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch.nn as nn

from shardyard.config.sections.parallel import EXPERTS
from shardyard.errors import UserError
from shardyard.parallel.patterns import matches, select_modules

logger = logging.getLogger("shardyard.parallel")

NamedModules = list[tuple[str, nn.Module]]


def expert_modules(
    model: nn.Module, patterns: Sequence[str], *, key: str = "parallel.ep_modules"
) -> NamedModules:
    """The experts that ``patterns`` name; when the default names none, all that look like experts.

    A dense model has none: the list is empty, and the caller decides whether that is a mistake.

    Raises:
        UserError: the user's own patterns match nothing, or a module whose experts are not fused tensors.
    """
    fused = list(fused_experts(model))
    if tuple(patterns) == EXPERTS and not any(matches(p, name) for p in patterns for name, _ in fused):
        if fused:
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


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose own parameters are stacks of ``num_experts`` rows, at least one of them of matrices."""
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        experts = getattr(module, "num_experts", None)
        stacked = all(p.shape[0] == experts for p in parameters if p.dim())
        if experts and stacked and any(p.dim() == 3 for p in parameters):
            yield name, module


def routers(model: nn.Module) -> NamedModules:
    """The module beside each experts module that chooses among them (``gate`` or ``router``)."""
    modules = dict(model.named_modules())
    found: NamedModules = []
    for name, _ in fused_experts(model):
        parent = name.rpartition(".")[0]
        for child in ("gate", "router"):
            router = f"{parent}.{child}" if parent else child
            if router in modules:
                found.append((router, modules[router]))
                break
    return found
