"""Forwards of modules whose parameters, or whose tokens, are split over ranks.

All are set on the instance, under the module's call: hooks of FSDP and the recomputation of whole layers stay
outside, and no parameter changes its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardyard.parallel.tensor.collectives import gather_sequence, scatter_sequence

View = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def parameters_seen_as(module: nn.Module, views: Mapping[str, View]) -> Iterator[None]:
    """The module's own forward reads ``views[name](parameter)`` for each named parameter that it has."""
    own = module._parameters
    seen = {name: views[name](p) if name in views and p is not None else p for name, p in own.items()}
    module._parameters = seen  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module._parameters = own


def use_parameters(module: nn.Module, views: Mapping[str, View]) -> None:
    """Every forward of ``module`` sees its parameters through ``views``."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with parameters_seen_as(module, views):
            return inner(*args, **kwargs)

    module.forward = forward


def wrap_region(module: nn.Module, group: dist.ProcessGroup, *, is_split: bool) -> None:
    """Tokens [1, T/n, H] of this rank in and out, the whole sequence inside.

    A split region's output is a partial sum of every token; otherwise each rank has computed every token, and
    the slice's backward leaves zeros for the tokens of others. Either way a whole parameter inside has a
    gradient that misses what the other ranks have: the sum over ranks is the gradient.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (gather_sequence(args[0], group), *args[1:])
        else:
            kwargs["hidden_states"] = gather_sequence(kwargs["hidden_states"], group)
        outputs = inner(*args, **kwargs)
        leave = scatter_sequence if is_split else own_tokens
        if isinstance(outputs, tuple):
            return leave(outputs[0], group), *outputs[1:]
        return leave(outputs, group)

    module.forward = forward


def own_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, T, ...], the same on every rank -> [B, T/n, ...], this rank's tokens."""
    count = x.shape[1] // group.size()
    return x.narrow(1, group.rank() * count, count)


def wrap_embedding(module: nn.Embedding, group: dist.ProcessGroup) -> None:
    """Ids [1, T] of the whole sequence -> vectors [1, T/n, H] of this rank's tokens.

    Each rank looks up the words that it has; the sum over ranks is cut by tokens.
    """
    inner, padding = module.forward, module.padding_idx
    words = module.num_embeddings // group.size()
    first = group.rank() * words

    @functools.wraps(inner)
    def forward(input: torch.Tensor) -> torch.Tensor:
        row = input - first
        mine = (row >= 0) & (row < words)
        # The padding word's row has no gradient; only the rank that has it may know of it.
        module.padding_idx = padding - first if padding is not None and 0 <= padding - first < words else None
        try:
            vectors = inner(row.where(mine, 0))
        finally:
            module.padding_idx = padding
        return scatter_sequence(vectors * mine[..., None], group)

    module.forward = forward


def wrap_body(module: nn.Module, group: dist.ProcessGroup) -> None:
    """The body of a model gives the head the whole sequence."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        outputs.last_hidden_state = gather_sequence(outputs.last_hidden_state, group)
        return outputs

    module.forward = forward


def rank_0_only(group: dist.ProcessGroup) -> View:
    """The bias of a partial sum, which one rank adds; the others add zeros, so that all have a gradient."""
    factor = 1.0 if group.rank() == 0 else 0.0
    return lambda bias: bias * factor


def own_rows(group: dist.ProcessGroup) -> View:
    """This rank's slice of a whole vector, [N] -> [N/n]: a bias of split outputs, a number per head.

    Small as they are, vectors stay whole: of the few rows that a split leaves, FSDP would give many ranks
    none, and the reader of weights fails on those.
    """

    def view(vector: torch.Tensor) -> torch.Tensor:
        count = vector.shape[0] // group.size()
        return vector.narrow(0, group.rank() * count, count)

    return view
