"""Model and optimizer as one flat mapping of tensors, keyed by parameter name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers: ``model.<name>``."""
    named = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            named[name] = buffer
    return {f"model.{name}": tensor.detach() for name, tensor in named.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: ``optimizer.<name>.<what>``. Scalars of groups follow from
    the config.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{what}": value.detach()
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
        if torch.is_tensor(value)
    }


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that its first step would make, all zero, for a checkpoint to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                home = (
                    parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
                )
                state["step"] = torch.zeros((), dtype=torch.float32, device=home)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
