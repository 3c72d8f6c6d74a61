"""The dimension on which FSDP splits an expert's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shardyard.errors import UserError

Wish = Literal["auto", "shard_by_dim_0", "shard_by_dim_1"]


def expert_placement(shape: Sequence[int], shards: int, wish: Wish) -> int:
    """The dimension of a stack of experts that FSDP splits over ``shards`` ranks.

    ``shape`` is what one ep rank holds: [local experts, ...]. FSDP2 pads dimension 0 to a multiple of
    ``shards`` (ranks without a row still hold one) and splits the others evenly or not at all. "auto" takes
    dimension 0 when it divides, then the first other dimension that does, and dimension 0 when none does.

    Raises:
        UserError: shard_by_dim_1, and the size does not divide by ``shards``.
    """
    if wish == "shard_by_dim_0":
        return 0
    if wish == "shard_by_dim_1":
        if len(shape) < 2 or shape[1] % shards:
            raise UserError(
                f"parallel.efsdp_shard_placement_fn: shard_by_dim_1 splits size {shape[1]} of the experts "
                f"evenly only, and {shards} ranks share each expert; take shard_by_dim_0 or auto"
            )
        return 1
    if shape[0] % shards == 0:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % shards == 0), 0)
