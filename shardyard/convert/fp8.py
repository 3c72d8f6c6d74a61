"""Weights in fp8 with a scale per block, as DeepSeek-V3 is published: back to plain floats.

``weight`` float8_e4m3fn [N, K] has beside it ``weight_scale_inv`` fp32 [ceil(N / n), ceil(K / k)]; a value is
weight * scale_inv of its block of n x k values (transformers, integrations/finegrained_fp8.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardyard.errors import UserError

SCALE = "_scale_inv"


def block_size(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a block of a block-fp8 model; None for a model that is not quantised.

    Raises:
        UserError: it is quantised in another way.
    """
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    size = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if method != "fp8" or not isinstance(size, list) or len(size) != 2:
        raise UserError(
            f"{where}: the weights are quantised ({method}); only fp8 with blocks is turned back into plain "
            "weights here. Start from the model's bf16 weights"
        )
    return int(size[0]), int(size[1])


def dequantise(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """[N, K] in ``dtype``, a row of blocks at a time: at most n x K values exist in fp32."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=dtype)
    for number in range(scale.shape[0]):
        part = slice(number * block[0], min((number + 1) * block[0], rows))
        factors = scale[number].float().repeat_interleave(block[1])[:columns]
        result[part] = (weight[part].float() * factors).to(dtype)
    return result


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a weight [N, K]."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
