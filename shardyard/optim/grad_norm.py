"""The gradient norm and clipping, right for any sharding.

torch's own refuses parameters of different meshes. Here each rank adds up the squares of what it alone
answers for;
the sum over all ranks is the square of the norm, whatever the mesh of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from shardyard.parallel import local


def owned_square_sum(owned: Iterable[torch.nn.Parameter]) -> float:
    """The squares of the gradient elements that this rank answers for; one read-back from the device.

    A shard belongs to the rank that holds it; of equal replicas the first one counts, so ``owned`` are the
    parameters for which `parallel.answers_for` holds. Norms of tensors are fp32 on the device (not every
    device has fp64), their squares are added in fp64 here.

    Raises:
        RuntimeError: a gradient is still a partial sum.
    """
    norms = [
        torch.linalg.vector_norm(local(gradient).float())
        for parameter in owned
        if (gradient := parameter.grad) is not None and _is_summed(gradient)
    ]
    return float(torch.stack(norms).cpu().double().square().sum()) if norms else 0.0


def _is_summed(gradient: torch.Tensor) -> bool:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        raise RuntimeError("a gradient is still a partial sum when its norm is taken")
    return True


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm when the norm is larger; ``max_norm`` 0 clips nothing."""
    if max_norm <= 0 or norm <= max_norm:
        return
    scale = max_norm / (norm + 1e-6)  # the same guard as torch.nn.utils.clip_grad_norm_
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(scale)
