"""The dimension on which FSDP splits each tensor of the experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal

import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from shardyard.errors import UserError

logger = logging.getLogger("shardyard.parallel")

Wish = Literal["auto", "shard_by_dim_0", "shard_by_dim_1"]
_KEY = "parallel.efsdp_shard_placement_fn"


def expert_placement(
    experts: Iterable[nn.Module], shards: int, wish: Wish
) -> Callable[[nn.Parameter], Shard | None]:
    """What ``fully_shard(shard_placement_fn=...)`` asks for: where to split each parameter of ``experts``.

    ``experts`` are experts modules after expert parallelism, ``shards`` the size of the mesh dimension that
    splits them. Other parameters get None, FSDP's own choice.

    Raises (when it is called):
        UserError: shard_by_dim_1, and a tensor has no such dimension that ``shards`` divides.
    """
    held = {
        parameter: (module, name)
        for module in experts
        for name, parameter in module.named_parameters(recurse=False)
    }
    return lambda parameter: Shard(_dimension(*held[parameter], shards, wish)) if parameter in held else None


def _dimension(module: nn.Module, name: str, shards: int, wish: Wish) -> int:
    parameter = module.get_parameter(name)
    shape = tuple((parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape)
    joined = _joined_dimension(module, name)
    if wish == "shard_by_dim_1":
        return _first_but_experts(name, shape, shards, joined)
    return 0 if wish == "shard_by_dim_0" else least_waste(shape, shards, joined)


def least_waste(shape: tuple[int, ...], shards: int, joined: int | None = None) -> int:
    """The dimension of a stack [local experts, ...] that ``shards`` ranks split with least padding.

    FSDP2 pads dimension 0 to a multiple of ``shards`` (a rank without an expert still holds room for one) and
    splits other dimensions evenly or not at all; ``joined`` is none of them. So: 0 if it divides, else the
    first other one that does, else 0.
    """
    even = [dim for dim, size in enumerate(shape) if dim != joined and size % shards == 0]
    return even[0] if even else 0


def _joined_dimension(module: nn.Module, name: str) -> int | None:
    """Where a tensor is put together, when it is read, from tensors that ranks have split already.

    Checkpoints hold gate and up apart, per expert. Split on the dimension that joins them, each rank would
    join its part of gate to its part of up, which is no part of the whole. Transposed families store them
    joined.
    """
    return 1 if name.startswith("gate_up") and not getattr(module, "is_transposed", False) else None


def _first_but_experts(name: str, shape: tuple[int, ...], shards: int, joined: int | None) -> int:
    """Dimension 1, or where that is a joined one the next."""
    dim = 2 if joined == 1 else 1
    if len(shape) <= dim or shape[dim] % shards:
        raise UserError(
            f"{_KEY}: shard_by_dim_1 splits dimension {dim} of {name} {list(shape)} evenly only, and "
            f"{shards} ranks share it; take shard_by_dim_0 or auto"
        )
    if joined == 1:
        logger.info("%s: dimension 1 of %s joins gate and up; dimension 2 is split", _KEY, name)
    return dim
