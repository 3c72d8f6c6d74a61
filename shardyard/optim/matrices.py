"""Which parameters are hidden matrices, and which matrices a parameter holds.

A hidden matrix maps one layer's activations to the next one's: what Muon is made for. Embeddings, the head
and vectors are not. A stack of experts holds one or two of them for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from shardyard.optim.groups import is_of_norm
from shardyard.parallel.experts.select import fused_experts
from shardyard.parallel.pipeline import parts_of

_NOT_HIDDEN = ("embed", "lm_head")


@dataclass(frozen=True)
class Matrix:
    """A matrix inside a parameter: all of it, or the rows and columns of one entry of a stack."""

    rows: range
    cols: range
    entry: int | None = None
    """The place in the stack."""
    out_is_cols: bool = False
    """Whether its columns are the outputs, as in families that store experts transposed."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    @property
    def out_and_in(self) -> tuple[int, int]:
        """Sizes as of an nn.Linear's weight."""
        rows, cols = self.shape
        return (cols, rows) if self.out_is_cols else (rows, cols)


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, tuple[Matrix, ...]]:
    """The trained parameters that hold hidden matrices, and these, of this rank's stages; sizes are those of
    the whole model.

    2-D parameters, but not those of embeddings and heads (also tied) nor biases, and experts' stacks of
    matrices. Gate and up, which experts hold joined, are two matrices, as files have them.
    """
    apart = _of_embeddings_and_heads(model)
    found: dict[nn.Parameter, tuple[Matrix, ...]] = {}
    stacks = {p: (n, m) for _, m in fused_experts(model) for n, p in m.named_parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter in apart or any(word in name for word in _NOT_HIDDEN):
            continue
        if parameter in stacks:
            found |= {parameter: _of_stack(parameter, *stacks[parameter])} if parameter.ndim == 3 else {}
        elif parameter.ndim == 2 and not name.endswith("bias") and not is_of_norm(name):
            found[parameter] = (Matrix(range(parameter.shape[0]), range(parameter.shape[1])),)
    return found


def _of_embeddings_and_heads(model: nn.Module) -> set[nn.Parameter]:
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for part in parts_of(model):
        head: Any = getattr(part, "get_output_embeddings", lambda: None)()
        modules += [head] if isinstance(head, nn.Module) else []
    return {parameter for module in modules for parameter in module.parameters()}


def _of_stack(parameter: nn.Parameter, name: str, module: nn.Module) -> tuple[Matrix, ...]:
    entries, rows, cols = parameter.shape
    transposed = bool(getattr(module, "is_transposed", False))
    parts = [(range(rows), range(cols))]
    if name.startswith("gate_up"):
        joined = cols if transposed else rows
        interleaved = not getattr(module, "is_concatenated", True)
        halves = (
            (range(0, joined, 2), range(1, joined, 2))
            if interleaved
            else (range(joined // 2), range(joined // 2, joined))
        )
        parts = [(range(rows), half) if transposed else (half, range(cols)) for half in halves]
    return tuple(Matrix(r, c, entry, transposed) for r, c in parts for entry in range(entries))
