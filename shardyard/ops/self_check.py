"""Does an implementation give the numbers of its eager twin, here, on these shapes? Value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardyard.errors import first_line
from shardyard.ops.registry import Example, Implementation, Operation, Site, Situation

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Of a difference relative to the largest value. Half precision rounds in other places than the twin does."""

_SEED = 20


def fault_of(
    operation: Operation, implementation: Implementation, site: Site, situation: Situation
) -> str | None:
    """Why the implementation may not take this site's place; None where it gives the twin's numbers."""
    # Built under no ambient device or gradient mode: this runs while a model is being made on meta.
    with torch.device(situation.device), torch.enable_grad():
        try:
            example = operation.example(site, situation)
            difference = greatest_difference(example, implementation.run(site))
        except Exception as error:  # a kernel that does not compile here fails in its own way
            return f"its self-check failed: {type(error).__name__}: {first_line(error)}"
    tolerance = TOLERANCE[situation.dtype]
    if difference <= tolerance:  # not so of NaN
        return None
    return f"it differs from the family's own code by {difference:.1e} ({tolerance:.0e} would be rounding)"


def greatest_difference(example: Example, candidate: Callable[..., Any]) -> float:
    """Over outputs and gradients of all inputs, each relative to the largest of the twin's."""
    expected = _results(example.eager, example.inputs)
    found = _results(lambda *inputs: candidate(*inputs, *example.more), example.inputs)
    differences = [
        ((have.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)).item()
        for want, have in zip(expected, found, strict=True)
    ]
    return float("nan") if any(d != d for d in differences) else max(differences)


def _results(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(
        outputs, wanted, [random_like(out, _SEED + i) for i, out in enumerate(outputs)], allow_unused=True
    )
    return [*(out.detach() for out in outputs), *(grad for grad in grads if grad is not None)]


def tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a family's code gives for ``arguments`` on the CPU, without gradients; None where it raises, in
    whatever way it has for what it does not expect: it is no code that we know then, and keeps its place.
    """
    try:
        with torch.device("cpu"), torch.no_grad():
            return function(*arguments)
    except Exception:
        return None


def random_like(tensor: torch.Tensor, seed: int = _SEED) -> torch.Tensor:
    """Normal numbers that no generator of the run gives, of a tensor's shape, dtype and device."""
    return random(tensor.shape, seed, tensor.dtype, tensor.device)


def random(
    shape: tuple[int, ...] | torch.Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Normal numbers from a generator of their own, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
