"""AdamW whose moments are kept in 8 or 4 bits: torchao's types and its update, over this rank's parts.

Elements that lie one behind the other in a rank's part share a scale in fp32, 256 of them in 8 bits and 128
in 4 (Dettmers et al. 2022, arXiv:2110.02861; Li et al. 2023, arXiv:2309.01507). A part of fewer than 4,096
elements, or one that blocks do not divide, keeps its moments in fp32. So blocks depend on the layout, and
numbers on it in their third digit or so.

Each update is computed in fp32 and moves the weights by what it computed. On an accelerator torchao's update
is compiled, which makes one kernel of it and needs a C++ compiler (not run here: no accelerator at hand). On
a CPU it runs eagerly, a piece at a time, as compiling there takes minutes.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardyard.errors import UserError
from shardyard.optim.algorithms import Setup
from shardyard.optim.groups import Group, torch_groups
from shardyard.optim.stepping import Stepping
from shardyard.parallel import beside, local

_LEAST = 4096
"""Elements of a part that has blocks."""
_PIECE = 2**20
"""Elements that an eager update computes at a time; whole blocks."""


@dataclass(frozen=True)
class Form:
    """How a moment is kept, and torchao's update of one parameter."""

    name: str
    block: int
    per_byte: int
    state: Any
    """torchao's tensor with ``codes`` (uint8), ``scale`` (fp32 [blocks]), ``qmap`` and ``signed``."""
    update: Callable[..., None]

    def zeros(self, part: torch.Tensor, *, signed: bool) -> torch.Tensor:
        """A moment for this rank's ``part`` of a parameter."""
        if part.numel() < _LEAST or part.numel() % self.block:
            return torch.zeros_like(part, memory_format=torch.contiguous_format)
        return self.state.zeros(part.shape, signed, self.block, part.device, dtype=part.dtype)

    def is_in_blocks(self, moment: torch.Tensor) -> bool:
        return isinstance(moment, self.state)

    def piece(self, moment: Any, begin: int, end: int) -> Any:
        """A view of the elements ``begin`` to ``end``, whole blocks, in one dimension."""
        if not self.is_in_blocks(moment):
            return moment.view(-1)[begin:end]
        codes = moment.codes.view(-1)[begin // self.per_byte : end // self.per_byte]
        scale = moment.scale[begin // self.block : end // self.block]
        shape = ((end - begin,),) if self.per_byte > 1 else ()
        return self.state(codes, scale, moment.qmap, moment.signed, *shape)

    def values(
        self, codes: torch.Tensor, scale: torch.Tensor, shape: Sequence[int], *, signed: bool
    ) -> torch.Tensor:
        """What ``codes`` and ``scale`` of a part of ``shape`` stand for, in fp32."""
        moment = self.state.zeros(tuple(shape), signed, math.prod(shape) // len(scale), codes.device)
        moment.codes.copy_(codes)
        moment.scale.copy_(scale)
        return moment.dequantize()


@functools.cache
def form_of(name: str) -> Form:
    """ "int8" or "int4".

    Raises:
        UserError: torchao is not installed.
    """
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of kernels for other machines
    try:
        update = importlib.import_module("torchao.optim.adam").single_param_adam
        bits = {"int8": "8bit", "int4": "4bit"}[name]
        module = importlib.import_module(f"torchao.optim.subclass_{bits}")
    except ImportError as error:
        raise UserError(
            f"training.optimizer_state_dtype: {name} needs torchao ({error}): "
            "pip install -c constraints.txt 'shardyard[low_bit]'"
        ) from error
    finally:
        logger.setLevel(level)
    per_byte = 2 if name == "int4" else 1
    return Form(name, 256 // per_byte, per_byte, getattr(module, f"OptimState{bits}"), update)


def build(groups: Sequence[Group], setup: Setup) -> LowBitAdamW:
    training = setup.training
    return LowBitAdamW(
        torch_groups(groups, training.lr),
        form_of(training.optimizer_state_dtype),
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    )


class LowBitAdamW(Stepping):
    """A moment is a DTensor like its parameter, whose local part is ``form``'s."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        form: Form,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.form = form

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A count of updates and two moments, all zero."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": self._moment(parameter, signed=True),
            "exp_avg_sq": self._moment(parameter, signed=False),
        }

    def _moment(self, parameter: torch.Tensor, *, signed: bool) -> torch.Tensor:
        own = self.form.zeros(local(parameter.detach()), signed=signed)
        return beside(parameter, own) if isinstance(parameter, DTensor) else own

    def _step(self) -> None:
        for parameter, group in self.trained():
            self._update(parameter, self.state_of(parameter, group), group)

    def _update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state["step"] += 1
        weights, gradient = local(parameter), local(parameter.grad)
        moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
        (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]
        lr = torch.tensor(float(group["lr"]))
        options = (None, lr, beta1, beta2, decay, eps, True, False)
        if not weights.is_cpu:
            with torch._dynamo.utils.disable_cache_limit():  # as torchao does: one shape, one kernel
                update = torch.compile(self.form.update, fullgraph=True, dynamic=False)
                update(weights, gradient, state["step"], *moments, *options)
            return
        flat = weights.view(-1), gradient.reshape(-1)
        for begin in range(0, len(flat[0]), _PIECE):
            end = min(begin + _PIECE, len(flat[0]))
            pieces = [tensor[begin:end] for tensor in flat]
            self.form.update(
                *pieces, state["step"], *(self.form.piece(moment, begin, end) for moment in moments), *options
            )
