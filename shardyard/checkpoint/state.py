"""Model and optimizer as one flat mapping of tensors, keyed by parameter name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardyard.checkpoint.blocked import tensors_of
from shardyard.optim import first_state
from shardyard.optim.low_bit import LowBitAdamW
from shardyard.parallel.pipeline import PipelineModel, parts_of


def any_stage(model: Any) -> Any:
    """The model itself; of the stages that a pipeline rank holds, the first: it has the config of all."""
    return parts_of(model)[0]


def names_of_whole(model: Any) -> tuple[str, ...]:
    """The order of a model's tensors that a pipeline rank, which holds a part of them, does not see."""
    return model.whole.names if isinstance(model, PipelineModel) else ()


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's files hold: parameters, tied ones under their first name, and persistent buffers."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            named[name] = buffer
    return named


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent tensors of the model: ``model.<name>``."""
    return {f"model.{name}": tensor.detach() for name, tensor in persistent_tensors(model).items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: ``optimizer.<name>.<what>``. Group options are the config's.

    Raises:
        TypeError: a state is no tensor, or is a rank's own plain tensor beside a sharded parameter: it would
            be taken for a replica, and one rank's copy would become everybody's.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        for what, value in state.items():
            key = f"optimizer.{names[parameter]}.{what}"
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{key} is a {type(value).__name__}; only tensors are checkpointed")
            if value.ndim > 0 and isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                raise TypeError(f"{key} is a plain tensor beside a sharded parameter")
            if isinstance(optimizer, LowBitAdamW) and value.ndim:
                found |= tensors_of(key, value, optimizer.form)
            else:
                found[key] = value.detach()
    return found


@torch.no_grad()
def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that its first step would make, all zero, where it has none.

    A checkpoint is read into it, and one is written with it: parameters that no gradient has reached yet are
    then in every checkpoint, as a resumed run expects.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                state.update(first_state(optimizer, parameter, group))
