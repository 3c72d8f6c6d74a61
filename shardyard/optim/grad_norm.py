"""The gradient norm and clipping, right for any sharding.

torch's own refuses parameters of different meshes. Here each rank adds up the squares of what it alone
answers for;
the sum over all ranks is the square of the norm, whatever the mesh of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def owned_square_sum(parameters: Iterable[torch.nn.Parameter], rank: int) -> float:
    """The squares of the gradient elements that this rank answers for; one read-back from the device.

    A shard belongs to the rank that holds it; of equal replicas the first one counts. Norms of tensors are
    fp32 on the
    device (not every device has fp64), their squares are added in fp64 here.
    """
    norms = [
        torch.linalg.vector_norm(local(parameter.grad).float())
        for parameter in parameters
        if parameter.grad is not None and _answers_for(parameter.grad, rank)
    ]
    return float(torch.stack(norms).cpu().double().square().sum()) if norms else 0.0


def _answers_for(grad: torch.Tensor, rank: int) -> bool:
    if not isinstance(grad, DTensor):
        return rank == 0
    if any(placement.is_partial() for placement in grad.placements):
        raise RuntimeError("a gradient is still a partial sum when its norm is taken")
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        c == 0 for c, placement in zip(coordinate, grad.placements, strict=True) if placement.is_replicate()
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm when the norm is larger; ``max_norm`` 0 clips nothing."""
    if max_norm <= 0 or norm <= max_norm:
        return
    scale = max_norm / (norm + 1e-6)  # the same guard as torch.nn.utils.clip_grad_norm_
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(scale)
