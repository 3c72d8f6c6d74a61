"""Each parameter is updated in the backward pass, as soon as its gradient is reduced, and the gradient freed.

So the gradients of one unit are alive at a time, instead of all of them. FSDP2 calls the hooks that autograd
would call for a sharded parameter (`register_post_accumulate_grad_hook`) once it has reduced its gradient
(torch 2.13, ``foreach_reduce``), on an accelerator in the stream in which the gradient was reduced.

A global norm is known only after the backward, so clipping, and skipping what is not finite, take two passes:
the first one measures each gradient and frees it, the second one computes it again and applies it.

Gradients that something has still to be added to (``late``: of parameters that tensor parallelism leaves
whole) are kept, and their parameters updated after the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from shardyard.optim.grad_norm import gradient_norm
from shardyard.parallel import local

Mode = Literal["idle", "measure", "apply"]


class InBackward:
    """Hooks on the parameters of ``optimizer``; outside of a pass they do nothing.

    The optimizer must update each parameter by itself: it is stepped with one parameter at a time.

    Args:
        late: parameters whose gradient is not complete when it is reduced.
        two_passes: whether the first pass of a step only measures.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, late: Iterable[torch.Tensor] = (), two_passes: bool
    ) -> None:
        self.two_passes = two_passes
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        """Parameter -> the norm of its gradient in the last pass, fp32 [] on its device; this rank's part."""
        self._optimizer = optimizer
        waiting = frozenset(late)  # a list would compare elements
        self._mode: Mode = "idle"
        self._factor = 1.0
        self._group_of: dict[torch.Tensor, tuple[dict[str, Any], int]] = {
            parameter: (group, place)
            for group in optimizer.param_groups
            for place, parameter in enumerate(group["params"])
            if parameter not in waiting
        }
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._take)

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Around the first forward and backward of a step."""
        with self._pass("measure" if self.two_passes else "apply", 1.0):
            yield

    @contextmanager
    def second_pass(self, factor: float) -> Iterator[None]:
        """Around the second one, which applies the gradients times ``factor``."""
        with self._pass("apply", factor):
            yield

    @contextmanager
    def _pass(self, mode: Mode, factor: float) -> Iterator[None]:
        self.norms.clear()
        self._mode, self._factor = mode, factor
        try:
            yield
        finally:
            self._mode = "idle"

    def _take(self, parameter: torch.Tensor) -> None:
        """The hook: ``parameter.grad`` is complete."""
        if self._mode == "idle" or parameter.grad is None:
            return
        if parameter in self.norms:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was reduced twice in one backward pass, and "
                "has been updated after the first time; set training.optimizer_in_backward: false"
            )
        self.norms[parameter] = gradient_norm(parameter.grad)
        if self._mode == "apply":
            self._update(parameter)
        parameter.grad = None

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor) -> None:
        if self._factor != 1.0:
            assert parameter.grad is not None
            local(parameter.grad).mul_(self._factor)
        group, place = self._group_of[parameter]
        one = {**group, "params": [parameter]}
        if "param_names" in group:
            one["param_names"] = [group["param_names"][place]]
        everything, self._optimizer.param_groups = self._optimizer.param_groups, [one]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = everything
