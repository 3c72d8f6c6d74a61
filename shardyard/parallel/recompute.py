"""Recompute: activations inside a module are dropped and computed again in the backward pass.

``full`` keeps what enters the module and nothing else. ``selective`` also keeps what matrix products and
attention gave, which are nearly all of the work; norms, activations and rotary embeddings run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from shardyard.config import ParallelConfig
from shardyard.parallel.blocks import select_blocks
from shardyard.parallel.kept import keep_and_reuse, kept_operators
from shardyard.parallel.patterns import matches

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def apply_recompute(model: nn.Module, parallel: ParallelConfig) -> None:
    """Drop the activations inside each matched module and compute them again in the backward pass.

    Raises:
        UserError: the patterns match nothing.
    """
    if parallel.recompute_mode == "none":
        return
    for name, module in select_blocks(model, parallel, "recompute_modules"):
        mode = mode_of(name, parallel)
        if mode == "none":
            continue
        options: dict[str, Any] = {"use_reentrant": False}
        if mode == "selective":
            options["context_fn"] = _contexts(parallel)
        # On the instance, under the module's call: FSDP's hooks stay outside, and no parameter changes its
        # name.
        module.forward = functools.partial(_recomputed, module.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Inputs go in as they come again in the backward: tensors alone, without what others noted on them."""
    args, kwargs = tensors_alone(None, args, kwargs)
    return checkpoint(forward, *args, **kwargs, **options)


def tensors_alone(_: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a module without what others noted on their tensors (ops/norm_linear.py)."""
    return tuple(map(_bare, args)), {name: _bare(value) for name, value in kwargs.items()}


def _bare(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and vars(value) else value


def mode_of(name: str, parallel: ParallelConfig) -> str:
    """How the module ``name`` recomputes: by the last entry that matches and has a mode of its own."""
    for entry in reversed(parallel.recompute_modules):
        if isinstance(entry, str):
            if matches(entry, name):
                return parallel.recompute_mode
        elif matches(entry["pattern"], name):
            return entry["mode"]
    return parallel.recompute_mode


def _contexts(parallel: ParallelConfig) -> Contexts:
    operators = kept_operators(frozenset(parallel.recompute_operators or ()))
    return functools.partial(keep_and_reuse, operators)
