"""Every transformation of the model, in order, in one function.

The model arrives on the meta device, before its weights are read, and leaves with every parameter a DTensor.
"""

from __future__ import annotations

import functools
import logging
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
from torch.utils.checkpoint import checkpoint

from shardyard.config import ParallelConfig
from shardyard.device import Device
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.patterns import select_modules

logger = logging.getLogger("shardyard.parallel")

Blocks = list[tuple[str, nn.Module]]

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


def apply_parallelism(
    model: nn.Module, parallel: ParallelConfig, meshes: Meshes, device: Device
) -> nn.Module:
    """Recompute, then FSDP2. TP, EP, CP and compile take their places here when they come.

    Raises:
        UserError: a list of patterns that matches nothing.
    """
    apply_recompute(model, parallel)
    apply_fsdp(model, parallel, meshes, device)
    return model


def apply_recompute(model: nn.Module, parallel: ParallelConfig) -> None:
    """Drop the activations inside each matched module and compute them again in the backward pass."""
    if not parallel.recompute:
        return
    for _, module in _select_blocks(model, parallel, "recompute_modules"):
        # On the instance, under the module's call: FSDP's hooks stay outside, and no parameter changes its
        # name.
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def apply_fsdp(model: nn.Module, parallel: ParallelConfig, meshes: Meshes, device: Device) -> None:
    """Shard each matched module on its own, the rest with the root; ignored modules stay whole."""
    precision = Precision.of(parallel, device)
    # Offloaded parameters are pinned for the copy to an accelerator; pinning raises without one.
    offload = CPUOffloadPolicy(pin_memory=device.is_accelerator) if parallel.cpu_offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mp_policy=precision.policy, offload_policy=offload)

    owners = _owners(model)
    chosen = select_modules(model, parallel.ignored_modules, key="parallel.ignored_modules")
    ignored = _groups(owners, _outermost(_wrappable(chosen)))
    for group in ignored:
        # Whole on every rank, yet FSDP casts them and averages their gradients: replicas cannot drift apart.
        shard(group, mesh=meshes.whole, reshard_after_forward=False)

    whole = {module for group in ignored for member in group for module in member.modules()}
    blocks = [block for block in _select_blocks(model, parallel, "fsdp_modules") if block[1] not in whole]
    groups = _groups(owners, blocks, managed={p for module in whole for p in module.parameters()})
    for group in groups:
        shard(group, mesh=meshes.fsdp, reshard_after_forward=parallel.reshard_after_forward)
    shard(model, mesh=meshes.fsdp)
    _set_prefetch([group[0] for group in reversed(groups)], parallel)


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


def _outermost(blocks: Blocks) -> Blocks:
    inner = {module for _, block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block[1] not in inner]


def _wrappable(blocks: Blocks) -> Blocks:
    """A list of modules has no forward of its own to wrap, and the root is wrapped in any case."""
    return [(name, m) for name, m in blocks if name and not isinstance(m, (nn.ModuleList, nn.ModuleDict))]


def _select_blocks(model: nn.Module, parallel: ParallelConfig, field: str) -> Blocks:
    """The modules of a pattern list; families that its default does not fit name their blocks themselves."""
    patterns = getattr(parallel, field)
    modules = dict(model.named_modules())
    default = type(parallel).model_fields[field].get_default(call_default_factory=True)
    if patterns == default and not any(name.startswith("model.layers.") for name in modules):
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        found = [(name, module) for name, module in modules.items() if type(module).__name__ in blocks]
        if found:
            logger.info("parallel.%s: %d modules of class %s", field, len(found), ", ".join(sorted(blocks)))
            return found
    return _wrappable(select_modules(model, patterns, key=f"parallel.{field}"))


def _set_prefetch(modules: list[nn.Module], parallel: ParallelConfig) -> None:
    """Each wrapped module starts the gather of the next ones while it computes."""
    forward, backward = parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        if ahead := modules[index + 1 : index + 1 + forward]:
            module.set_modules_to_forward_prefetch(ahead)  # pyright: ignore[reportArgumentType]
        if behind := modules[max(0, index - backward) : index][::-1]:
            module.set_modules_to_backward_prefetch(behind)  # pyright: ignore[reportArgumentType]
