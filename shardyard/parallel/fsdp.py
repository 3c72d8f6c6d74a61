"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered unit by unit."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shardyard.config import ParallelConfig
from shardyard.device import Device
from shardyard.parallel.blocks import Blocks, outermost, select_blocks, wrappable
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.patterns import select_modules

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """dtypes of forward and backward (``compute``) and of gradient sums; storage is always fp32."""

    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, parallel: ParallelConfig, device: Device) -> Precision:
        compute = DTYPES[parallel.param_dtype] if parallel.param_dtype else device.default_param_dtype
        return cls(compute, DTYPES[parallel.reduce_dtype])

    @property
    def policy(self) -> MixedPrecisionPolicy:
        compute = None if self.compute is torch.float32 else self.compute
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=self.reduce)


def apply_fsdp(model: nn.Module, parallel: ParallelConfig, meshes: Meshes, device: Device) -> None:
    """Shard each matched module on its own, the rest with the root; ignored modules stay whole."""
    precision = Precision.of(parallel, device)
    # Offloaded parameters are pinned for the copy to an accelerator; pinning raises without one.
    offload = CPUOffloadPolicy(pin_memory=device.is_accelerator) if parallel.cpu_offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mp_policy=precision.policy, offload_policy=offload)

    owners = _owners(model)
    chosen = select_modules(model, parallel.ignored_modules, key="parallel.ignored_modules")
    ignored = _groups(owners, outermost(wrappable(chosen)))
    for group in ignored:
        # Whole on every rank, yet FSDP casts them and sums their gradients: replicas cannot drift apart.
        shard(group, mesh=meshes.whole, reshard_after_forward=False)

    whole = {module for group in ignored for member in group for module in member.modules()}
    blocks = [block for block in select_blocks(model, parallel, "fsdp_modules") if block[1] not in whole]
    groups = _groups(owners, blocks, managed={p for module in whole for p in module.parameters()})
    for group in groups:
        shard(group, mesh=meshes.fsdp, reshard_after_forward=parallel.reshard_after_forward)
    shard(model, mesh=meshes.fsdp)
    _sum_gradients(model)
    _set_prefetch([group[0] for group in reversed(groups)], parallel)


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over ranks, not averaged: the loss is normalised by the global token count.

    Both switches are needed: the factor alone makes torch ask NCCL for a pre-multiplied sum, which gloo lacks.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


Owners = dict[nn.Parameter, list[nn.Module]]


def _owners(model: nn.Module) -> Owners:
    """The modules that hold each parameter: several for a tied one."""
    owners: Owners = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return owners


def _groups(owners: Owners, blocks: Blocks, managed: Collection[nn.Parameter] = ()) -> list[list[nn.Module]]:
    """One list of modules per FSDP group, children before parents as fully_shard asks.

    A parameter belongs to the innermost block that holds it, and modules that share a tied one share its
    group, so that
    both see it gathered. A block that is left without a parameter needs no group.
    """
    groups: list[list[nn.Module]] = []
    done = set(managed)
    for _, module in reversed(blocks):
        group, inside = [module], set(module.modules())
        for member in group:  # grows: a partner may share another parameter with a third module
            for parameter in set(member.parameters()) - done:
                partners = [other for other in owners[parameter] if other not in inside]
                group += partners
                inside.update(module for partner in partners for module in partner.modules())
        own = {parameter for member in group for parameter in member.parameters()} - done
        if own:
            groups.append(group)
            done |= own
    return groups


def _set_prefetch(modules: list[nn.Module], parallel: ParallelConfig) -> None:
    """Each wrapped module starts the gather of the next ones while it computes."""
    forward, backward = parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        if ahead := modules[index + 1 : index + 1 + forward]:
            module.set_modules_to_forward_prefetch(ahead)  # pyright: ignore[reportArgumentType]
        if behind := modules[max(0, index - backward) : index][::-1]:
            module.set_modules_to_backward_prefetch(behind)  # pyright: ignore[reportArgumentType]
