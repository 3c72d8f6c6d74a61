"""The table of optimizers, and what each of them has to be.

To add one, write a module with ``build(groups, setup) -> torch.optim.Optimizer`` and give it a row in
``TABLE``. `algorithm_of` chooses the row from the settings. What the rest of the house expects of it:

- **State is tensors only**, kept in ``optimizer.state[parameter]`` by a short name, so the checkpoint store
  saves it as ``optimizer.<parameter>.<name>`` and reads it on any layout. One that has elements like the
  parameter is a DTensor like it (``torch.zeros_like(parameter)``); a number is a plain tensor of no
  dimension, equal on all ranks.
- ``first_state(parameter, group)`` returns the state that its first step would make. The store calls it
  before it reads or writes a parameter that has had no gradient yet, and sizes of checkpoints come from it.
  (torch's own AdamW has none; `first_state` here knows it.)
- **Groups are torch's**: a group's dict has ``params``, ``param_names``, ``lr``, ``lr_scale``,
  ``weight_decay`` and ``label``. The schedule sets ``lr`` before each step (`set_lr`), as a float. Options
  are the config's and are never saved; state goes by parameter name, so a resumed run may group its
  parameters in another way.
- **A step may use collectives** only if every rank that holds the parameters makes the same ones: which
  parameters there are is the same on all ranks of a pipeline stage, and differs between stages.
- It is built on every rank at the same point, with every parameter in its shards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardyard.config import TrainingConfig
from shardyard.optim.groups import Group
from shardyard.parallel import Meshes, local


@dataclass(frozen=True)
class Setup:
    """What an algorithm may look at besides its groups."""

    training: TrainingConfig
    model: nn.Module
    """For the roles of its modules; a pipeline rank's holds that rank's stages."""
    meshes: Meshes | None = None
    """None in a process that has none: then all ranks hold the same parameters."""


Builder = Callable[[Sequence[Group], Setup], torch.optim.Optimizer]

TABLE: dict[str, str] = {
    "adamw": "shardyard.optim.adamw:build",
    "fused_adamw": "shardyard.optim.adamw:build",
    "adamw bf16": "shardyard.optim.bf16_states:build",
    "adamw int8": "shardyard.optim.low_bit:build",
    "adamw int4": "shardyard.optim.low_bit:build",
    "muon": "shardyard.optim.muon:build",
    "lion": "shardyard.optim.lion:build",
    "adam_mini": "shardyard.optim.adam_mini:build",
}
"""Name -> ``module:function`` of its builder; imported when it is chosen."""


def algorithm_of(training: TrainingConfig) -> str:
    """The row of ``TABLE`` that the settings ask for."""
    if training.optimizer in ("adamw", "fused_adamw") and training.optimizer_state_dtype != "fp32":
        return f"adamw {training.optimizer_state_dtype}"
    return training.optimizer


def builder_of(name: str) -> Builder:
    module, _, function = TABLE[name].partition(":")
    return getattr(importlib.import_module(module), function)


def first_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The state that the first step would make for ``parameter`` of ``group``, all zero."""
    own = getattr(optimizer, "first_state", adamw_state)
    return own(parameter, group)


def adamw_state(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """That of torch's AdamW: a count of updates and two moments like the parameter."""
    home = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=home),
        **{
            moment: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for moment in ("exp_avg", "exp_avg_sq")
        },
    }


@torch.no_grad()
def state_bytes_here(optimizer: torch.optim.Optimizer) -> int:
    """What the state takes on this rank, but for counts of updates, whether made yet or not."""
    return sum(
        bytes_of(local(tensor))
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in first_state(optimizer, parameter, group).values()
        if tensor.ndim
    )


@torch.no_grad()
def state_bytes(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Parameter -> the bytes of its state over all ranks, each element once, whether made yet or not."""
    return {
        parameter: sum(_bytes_of_all_ranks(tensor) for tensor in state.values())
        for group in optimizer.param_groups
        for parameter in group["params"]
        for state in (first_state(optimizer, parameter, group),)
    }


def bytes_of(part: torch.Tensor) -> int:
    """Of a rank's part of a tensor; of the plain tensors that it is made of where it is made of others."""
    if not is_traceable_wrapper_subclass(part):
        return part.numel() * part.element_size()
    return sum(bytes_of(getattr(part, name)) for name in part.__tensor_flatten__()[0])


def _bytes_of_all_ranks(tensor: torch.Tensor) -> int:
    """Judged by this rank's part, if it has one."""
    part = local(tensor)
    one = bytes_of(part) / part.numel() if part.numel() else tensor.element_size()
    return round(tensor.numel() * one)
