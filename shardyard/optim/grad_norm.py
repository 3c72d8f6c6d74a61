"""The gradient norm and clipping, right for any sharding.

torch's own refuses parameters of different meshes. Here each rank adds up the squares of what it alone
answers for; the sum over all ranks is the square of the norm, whatever the mesh of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from shardyard.parallel import local


def owned_norms(
    owned: Iterable[torch.nn.Parameter], measured: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """The norms of the gradients that this rank answers for, fp32 [n] on their device.

    A shard belongs to the rank that holds it; of equal replicas the first one counts, so ``owned`` are the
    parameters for which `parallel.answers_for` holds. ``measured``: norms of gradients that are gone.

    Raises:
        RuntimeError: a gradient is still a partial sum.
    """
    gone = measured or {}
    norms = [
        gone[parameter] if parameter in gone else gradient_norm(parameter.grad)
        for parameter in owned
        if parameter in gone or parameter.grad is not None
    ]
    return torch.stack(norms) if norms else torch.zeros(0)


def square_sum(norms: torch.Tensor) -> float:
    """Their squares, added in fp64, which not every device has: ``norms`` are on the host by now."""
    return float(norms.double().square().sum())


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
