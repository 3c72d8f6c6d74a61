"""The modules that a pattern list of the config means: FSDP units, recomputed and chunked modules."""

from __future__ import annotations

import logging

import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.parallel.patterns import select_modules
from shardyard.parallel.pipeline.stages import ForeignModule

logger = logging.getLogger("shardyard.parallel")

Blocks = list[tuple[str, nn.Module]]


def select_blocks(model: nn.Module, parallel: ParallelConfig, field: str) -> Blocks:
    """The modules of a pattern list; families that its default does not fit name their blocks themselves.

    Raises:
        UserError: the patterns match nothing.
    """
    entries = getattr(parallel, field)
    patterns = tuple(entry if isinstance(entry, str) else entry["pattern"] for entry in entries)
    modules = dict(model.named_modules())
    default = type(parallel).model_fields[field].get_default(call_default_factory=True)
    if patterns == default and not any(name.startswith("model.layers.") for name in modules):
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        found = [(name, module) for name, module in modules.items() if type(module).__name__ in blocks]
        if found:
            logger.info("parallel.%s: %d modules of class %s", field, len(found), ", ".join(sorted(blocks)))
            return found
    return wrappable(select_modules(model, patterns, key=f"parallel.{field}"))


def wrappable(blocks: Blocks) -> Blocks:
    """Without what cannot or need not be wrapped: a list of modules has no forward of its own, the root is
    wrapped in any case, and what another pipeline stage has is only stood for.
    """
    kinds = (nn.ModuleList, nn.ModuleDict, ForeignModule)
    return [(name, module) for name, module in blocks if name and not isinstance(module, kinds)]


def outermost(blocks: Blocks) -> Blocks:
    """Those that stand in no other one of the list."""
    inner = {module for _, block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block[1] not in inner]
