"""Weights in fp8 with a scale per block, as DeepSeek-V3 is published: whole tensors back to plain floats.

What the blocks and scales are, and what a value is, stands in `models.block_fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardyard.models import block_fp8
from shardyard.models.block_fp8 import SCALE, BlockFp8

__all__ = ["SCALE", "block_size", "blocks_of", "dequantise"]


def block_size(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a block of a block-fp8 model; None for a model that is not quantised.

    Raises:
        UserError: it is quantised in another way.
    """
    stated = config.get("quantization_config")
    return block_fp8.block_size(stated, where) if stated else None


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """[R, C] in ``dtype``, a row of blocks at a time: two of these at most exist in fp32."""
    result = torch.empty(weight.shape, dtype=dtype)
    values = BlockFp8(weight, scale, block)
    for begin in range(0, weight.shape[0], block[0]):
        rows = slice(begin, begin + block[0])
        result[rows] = values[rows].to(dtype)
    return result


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight [R, C]."""
    return tuple(block_fp8.blocks_of(shape, block))
