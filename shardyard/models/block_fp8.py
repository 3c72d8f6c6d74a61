"""Weights in fp8 with one scale for each block of them (DeepSeek-V3's form), read as fp32.

``weight[r, c] = fp8[r, c] * weight_scale_inv[r // 128, c // 128]``, for blocks of 128 x 128; the last block
of a row or column may be smaller. A rank reads the slice that it holds, and the scales of the blocks which
that touches, so a border between ranks may cut a block anywhere. transformers' own way cuts the scales like
the weights, which is right only where each rank holds whole blocks, and refuses sizes that no block divides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardyard.errors import UserError
from shardyard.models.weight_files import Slices, cuts_of

_KEY = "model.model_name_or_path"
SCALE = "_scale_inv"


def take_block_size(config: Any) -> tuple[int, int] | None:
    """The size of a block (rows, columns) of a quantised model's weights, whose config then is that of a
    plain one; None for plain weights.

    Raises:
        UserError: weights that are quantised in another form.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        stated = getattr(part, "quantization_config", None)
        if stated is None:
            continue
        block = block_size(stated if isinstance(stated, dict) else stated.to_dict(), _KEY)
        del part.quantization_config
        return block
    return None


def block_size(stated: Any, where: str) -> tuple[int, int]:
    """The size of a block that the ``quantization_config`` of a config.json states.

    Raises:
        UserError: it is another form of quantisation, of the model that ``where`` names.
    """
    options: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {"quant_method": stated}
    method, size = options.get("quant_method"), options.get("weight_block_size")
    block = tuple(size) if isinstance(size, list | tuple) else ()
    if method != "fp8" or len(block) != 2 or not all(_is_size(count) for count in block):
        raise UserError(
            f"{where}: the weights are quantised ({method}); only fp8 with blocks is read here, and this has "
            f"weight_block_size {size}. Start from the model's bf16 weights"
        )
    return block


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> list[int]:
    """The shape of the scales of a weight [..., R, C]."""
    return [*shape[:-2], *(-(-size // part) for size, part in zip(shape[-2:], block, strict=True))]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class BlockFp8:
    """A tensor [..., R, C] in fp8 and its scales [..., ceil(R / rows), ceil(C / columns)], as one in fp32."""

    def __init__(self, weight: Any, scale: Any, block: tuple[int, int]) -> None:
        self._weight, self._scale, self._block = weight, scale, block

    def get_shape(self) -> Sequence[int]:
        return _shape(self._weight)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part that slices of step 1 (or ``...``) name, fp32."""
        cuts = cuts_of(index, self.get_shape())
        sizes = [max(cut.stop - cut.start, 0) for cut in cuts]
        if 0 in sizes:
            return torch.empty(sizes, dtype=torch.float32)
        part = self._weight[tuple(cuts)].float()
        touched = [
            slice(cut.start // size, (cut.stop - 1) // size + 1)
            for cut, size in zip(cuts[-2:], self._block, strict=True)
        ]
        scales = self._scale[(*cuts[:-2], *touched)].float()
        for dim, cut, size, blocks in zip((-2, -1), cuts[-2:], self._block, touched, strict=True):
            own = torch.arange(cut.start, cut.stop) // size - blocks.start
            scales = scales.index_select(dim, own)
        return part.mul_(scales)


def dequantised(tensors: dict[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """``tensors`` of a model's files, with each pair of fp8 weight and scales as one.

    Raises:
        UserError: a weight without scales, or scales of another size than its blocks.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if not _is_fp8(tensor):
            continue
        if name + SCALE not in tensors:
            raise UserError(f"{_KEY}: {name} is in fp8, and the files hold no {name + SCALE}")
        found[name] = _joined(name, tensor, found.pop(name + SCALE), block)
    return found


def _joined(name: str, weight: Slices, scale: Slices, block: tuple[int, int]) -> BlockFp8:
    shape, blocks = list(_shape(weight)), list(_shape(scale))
    wanted = blocks_of(shape, block)
    if blocks != wanted:
        raise UserError(
            f"{_KEY}: {name} {shape} has scales {blocks}; blocks of {block[0]} x {block[1]} would be {wanted}"
        )
    return BlockFp8(weight, scale, block)


def _shape(tensor: Any) -> Sequence[int]:
    return tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()


def _is_fp8(tensor: Any) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
