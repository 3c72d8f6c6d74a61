"""Units whose parameters no other rank shares: used where they lie, instead of gathered from one rank.

FSDP2 copies the parameters of a unit for each forward and each backward, and its gradients three times, also
on a mesh of one. Where nothing is cast or moved, the gathered parameter can be the sharded one's own memory,
and its gradient the sharded one's gradient. All else (units, hooks, names, DTensors) stays FSDP's.

torch keeps what this needs private; it was written for torch 2.13 and tests compare it with FSDP's own way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def use_in_place(model: nn.Module) -> None:
    """Let each unit that one rank holds alone compute on its own memory; call it after the last fully_shard.

    Units that cast (a compute or reduce dtype of their own), that live on the host while a device computes,
    or that have replicas, keep FSDP's way.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if group.mesh_info.mesh.size() == 1:
                    _use_in_place(group)


def _use_in_place(group: Any) -> None:
    unshard, post_backward = group.unshard, group.post_backward

    @functools.wraps(unshard)
    def lend_then_unshard(async_op: bool = False) -> None:
        if not group.is_unsharded and _is_plain(group):
            for parameter in group.fsdp_params:
                _lend(parameter)
        unshard(async_op)

    @functools.wraps(post_backward)
    def hand_over_then_finish(*unused: Any) -> None:
        if group.reduce_grads and _is_plain(group):
            for parameter in group.fsdp_params:
                _hand_over(parameter)
        post_backward(*unused)  # finds no gradient left to reduce

    group.unshard, group.post_backward = lend_then_unshard, hand_over_then_finish


def _is_plain(group: Any) -> bool:
    return all(
        not parameter.offload_to_cpu
        and parameter.param_dtype is None
        and parameter.reduce_dtype in (None, parameter.orig_dtype)
        for parameter in group.fsdp_params
    )


def _lend(parameter: Any) -> None:
    """Make the shard's memory the output of the gather, which then has nothing to copy.

    A shard that is part of a larger tensor's memory is gathered as ever: FSDP would resize that memory.
    """
    shard = parameter._sharded_param_data
    lent = parameter.all_gather_outputs
    if (lent and lent[0] is shard) or shard.untyped_storage().nbytes() != shard.nbytes:
        return
    parameter.all_gather_outputs = [shard]
    parameter.free_unsharded_param = _keep
    if hasattr(parameter, "_unsharded_param"):  # it lay elsewhere, before the shard moved
        del parameter._unsharded_param


def _keep() -> None:
    """What is freed after use elsewhere is the parameter itself here."""


@torch.no_grad()
def _hand_over(parameter: Any) -> None:
    """The gathered parameter's gradient becomes, or is added to, the sharded one's; its hooks run."""
    gathered = getattr(parameter, "_unsharded_param", None)
    if gathered is None or gathered.grad is None:
        return
    gradient = parameter.unsharded_grad_data.contiguous()
    gathered.grad = None
    sharded = parameter.sharded_param
    if isinstance(sharded.grad, DTensor):
        sharded.grad._local_tensor += gradient
    else:
        sharded.grad = parameter.to_sharded_dtensor(gradient)
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        hook(sharded)
