"""The dimension on which FSDP splits each tensor of the experts.

transformers' reader gives each rank its slice of every tensor of a file and builds the model's from these.
Most checkpoints hold each expert's gate, up and down apart; transposed families (gpt-oss) hold what the model
holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal

import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from shardyard.config.shares import leaves_a_rank_empty
from shardyard.errors import UserError
from shardyard.parallel.ownership import local

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
        UserError: a tensor that ``shards`` ranks cannot share as asked.
    """
    held = {
        parameter: (module, name)
        for module in experts
        for name, parameter in module.named_parameters(recurse=False)
    }
    return lambda parameter: Shard(_dimension(*held[parameter], shards, wish)) if parameter in held else None


def _dimension(module: nn.Module, name: str, shards: int, wish: Wish) -> int:
    parameter = module.get_parameter(name)
    shape = tuple(local(parameter).shape)
    stored_apart = not getattr(module, "is_transposed", False)
    # Gate and up are read apart too. Split on the dimension that joins them, each rank would join its part of
    # gate to its part of up, which is no part of the whole.
    joined = 1 if stored_apart and name.startswith("gate_up") else None
    if wish == "shard_by_dim_1":
        return _first_but_experts(name, shape, shards, joined)
    dim = 0 if wish == "shard_by_dim_0" else least_waste(shape, shards, joined)
    # What the file has as the model holds it can be read in no rows, but not if ep has cut the rows before.
    read_in_rows = stored_apart or isinstance(parameter, DTensor)
    if dim == 0 and read_in_rows and leaves_a_rank_empty(shape[0], shards):
        other = "take auto, or " if wish == "shard_by_dim_0" else ""
        raise UserError(
            f"{_KEY}: {wish} splits {name} {list(shape)} over {shards} ranks by its {shape[0]} experts, and "
            f"one rank would hold none; {other}change parallel.fsdp_size or parallel.ep_size: the ranks that "
            "share them have to divide the experts of an ep rank, or the hidden size"
        )
    return dim


def least_waste(shape: tuple[int, ...], shards: int, joined: int | None = None) -> int:
    """The dimension of a stack [local experts, ...] that ``shards`` ranks split with least padding.

    FSDP2 pads dimension 0 to a multiple of ``shards`` (a rank without an expert still holds room for one) and
    splits other dimensions evenly or not at all; ``joined`` is none of them. So: 0 if it divides, else the
    first other one that does, else 0.
    """
    even = [dim for dim, size in enumerate(shape) if dim != joined and size % shards == 0]
    return even[0] if even else 0


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
