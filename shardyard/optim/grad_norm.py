"""The gradient norm and clipping, right for any sharding.

torch's own refuses parameters of different meshes. Here each rank adds up the squares of what it alone
answers for;
the sum over all ranks is the square of the norm, whatever the mesh of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from shardyard.parallel import local


def owned_square_sum(
    owned: Iterable[torch.nn.Parameter], measured: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> float:
    """The squares of the gradient elements that this rank answers for; one read-back from the device.

    A shard belongs to the rank that holds it; of equal replicas the first one counts, so ``owned`` are the
    parameters for which `parallel.answers_for` holds. Norms of tensors are fp32 on the device (not every
    device has fp64), their squares are added in fp64 here. ``measured``: norms of gradients that are gone.

    Raises:
        RuntimeError: a gradient is still a partial sum.
    """
    gone = measured or {}
    norms = [
        gone[parameter] if parameter in gone else gradient_norm(parameter.grad)
        for parameter in owned
        if parameter in gone or parameter.grad is not None
    ]
    return float(torch.stack(norms).cpu().double().square().sum()) if norms else 0.0


@torch.no_grad()
def gradient_norm(gradient: torch.Tensor | None) -> torch.Tensor:
    """Of this rank's part, fp32 [] on its device.

    Raises:
        RuntimeError: it is still a partial sum.
    """
    assert gradient is not None
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        raise RuntimeError("a gradient is still a partial sum when its norm is taken")
    return torch.linalg.vector_norm(local(gradient).float())


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this ``norm`` are multiplied by; ``max_norm`` 0 clips nothing."""
    if max_norm <= 0 or norm <= max_norm:
        return 1.0
    return max_norm / (norm + 1e-6)  # the same guard as torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float, scale: float = 1.0
) -> None:
    """Multiply all gradients by `clip_factor`, and free them of ``scale``, which ``norm`` does not have."""
    factor = clip_factor(norm, max_norm) / scale
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
