"""Small results of a device, read by this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_back(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values on the host, whatever their types: one transfer, and one wait, for each device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    found: dict[int, torch.Tensor] = {}
    for group in places.values():
        flat = [tensors[place].detach().reshape(-1).contiguous().view(torch.uint8) for place in group]
        parts = torch.cat(flat).cpu().split([part.numel() for part in flat])
        for place, part in zip(group, parts, strict=True):
            tensor = tensors[place]
            # A copy begins where its type asks it to; a piece of the bytes need not.
            found[place] = part.clone().view(tensor.dtype).view(tensor.shape)
    return [found[place] for place in range(len(tensors))]
