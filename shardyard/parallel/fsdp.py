"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered unit by unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from shardyard.config import ParallelConfig
from shardyard.config.shares import leaves_a_rank_empty
from shardyard.device import Device
from shardyard.errors import UserError
from shardyard.parallel.alone import use_in_place
from shardyard.parallel.blocks import Blocks, outermost, select_blocks, wrappable
from shardyard.parallel.experts.placement import expert_placement
from shardyard.parallel.experts.select import expert_modules, fused_experts
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local
from shardyard.parallel.patterns import matches, select_modules
from shardyard.parallel.pipeline.stages import Stage
from shardyard.parallel.recompute import tensors_alone

PlacementFn = Callable[[nn.Parameter], Shard | None]

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
    """Shard each matched module on its own, the rest with the root; ignored modules stay whole.

    Raises:
        UserError: patterns that match nothing, a parameter whose size a placement cannot divide, experts that
            ``ep_size`` splits among the ignored modules.
    """
    # Offloaded parameters are pinned for the copy to an accelerator; pinning raises without one.
    offload = CPUOffloadPolicy(pin_memory=device.is_accelerator) if parallel.cpu_offload else OffloadPolicy()
    policy = Precision.of(parallel, device).policy
    shard = functools.partial(fully_shard, mp_policy=policy, offload_policy=offload)
    # Tokens are in the compute dtype already, and routing weights in fp32 stay so until they are applied.
    as_they_come = replace(policy, cast_forward_inputs=False)
    owners = _owners(model)
    ignored = _groups(owners, _ignored_blocks(model, parallel, meshes))
    for group in ignored:
        # Whole on every rank, yet FSDP casts them and sums their gradients: replicas cannot drift apart.
        shard(group, mesh=meshes.whole, reshard_after_forward=False)

    whole = {module for group in ignored for member in group for module in member.modules()}
    experts = [block for block in _expert_blocks(model, parallel, meshes) if block[1] not in whole]
    on_their_own = {module for _, module in experts}
    blocks = [block for block in select_blocks(model, parallel, "fsdp_modules") if block[1] not in whole]
    names = {name for name, _ in blocks + experts}
    units = [(n, m) for n, m in model.named_modules() if n in names]
    groups = _groups(owners, units, managed={p for module in whole for p in module.parameters()})
    dense = _by_rows(placement(model, parallel, meshes.layout.fsdp), parallel)
    for group in groups:
        reshard = parallel.reshards_to or bool(parallel.reshard_after_forward)
        if group[0] in on_their_own:
            place, reshard = placement(model, parallel, meshes.layout.ep_fsdp), bool(reshard)
            mesh, mp = meshes.expert_fsdp, as_they_come
        else:
            mesh, place, mp = meshes.fsdp, dense, policy
        shard(group, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=place, mp_policy=mp)
    shard(model, mesh=meshes.fsdp, shard_placement_fn=dense)
    _sum_gradients(model)
    use_in_place(model)
    set_prefetch(model, groups, parallel)


def take_notes_off(model: nn.Module) -> None:
    """Let each unit get tensors without notes: FSDP hands on new tensors in a forward, and the same ones
    where it is recomputed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(tensors_alone, with_kwargs=True)


def _ignored_blocks(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> Blocks:
    chosen = select_modules(model, parallel.ignored_modules, key="parallel.ignored_modules")
    chosen += _tied_to_ignored(model, parallel.ignored_modules or ())
    blocks = outermost(wrappable(chosen))
    split = dict(fused_experts(model)) if meshes.layout.ep > 1 else {}
    for block_name, block in blocks:
        for name, module in split.items():
            if module in set(block.modules()):
                raise UserError(
                    f"parallel.ignored_modules: {block_name} holds the experts {name}, which "
                    f"parallel.ep_size {meshes.layout.ep} splits over the ranks; name the modules beside "
                    "them, or set parallel.ep_size: 1"
                )
    return blocks


def _tied_to_ignored(model: nn.Module, patterns: Collection[str]) -> Blocks:
    """Modules of a pipeline stage that share a parameter with an ignored module, which another stage may
    have: both ends of the pipeline add up gradients of the same shape.
    """
    stage: Stage | None = getattr(model, "_pp_stage", None)
    homes: list[str] = []
    for pair in stage.whole.tied.items() if stage is not None else ():
        holders = [name.rsplit(".", cut)[0] for name in pair for cut in range(1, name.count(".") + 1)]
        if any(matches(pattern, holder) for pattern in patterns for holder in holders):
            homes += [name.rpartition(".")[0] for name in pair]
    return [(home, model.get_submodule(home)) for home in homes]


def _expert_blocks(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> Blocks:
    """The experts that are sharded apart from their layer: over other ranks than it, ep_fsdp of them.

    Without ep and tp these are the same ranks, and experts stay in the unit of their layer.
    """
    if meshes.layout.ep == 1 and meshes.layout.tp == 1:
        return []
    chosen = expert_modules(model, parallel.ep_fsdp_modules, key="parallel.ep_fsdp_modules")
    if meshes.layout.ep == 1:
        return chosen
    sharded = {module for _, module in chosen}
    for name, module in expert_modules(model, parallel.ep_modules, key="parallel.ep_modules"):
        if module not in sharded:
            raise UserError(
                f"parallel.ep_fsdp_modules: {name} is split by parallel.ep_modules and not listed here; "
                "its shards live on other ranks than the layer's, so list it here as well"
            )
    return chosen


def placement(model: nn.Module, parallel: ParallelConfig, shards: int) -> PlacementFn:
    """Parameter -> the dimension on which FSDP splits it over ``shards`` ranks; None is the first one."""
    experts = expert_placement(
        (module for _, module in fused_experts(model)), shards, parallel.efsdp_shard_placement_fn
    )
    dense = dense_placement(model, parallel, shards)
    return lambda parameter: experts(parameter) or dense(parameter)


def _by_rows(place: PlacementFn, parallel: ParallelConfig) -> PlacementFn:
    """``place``, or a refusal where torch could not reshard to fewer ranks: it cuts rows only."""
    if parallel.reshards_to is None:
        return place

    def checked(parameter: nn.Parameter) -> Shard | None:
        found = place(parameter)
        if found is not None and found.dim:
            raise UserError(
                f"parallel.reshard_after_forward: {parallel.reshards_to} needs parameters that are sharded "
                f"by rows, and one of shape {list(parameter.shape)} is sharded along dimension {found.dim}; "
                "use true or false"
            )
        return found

    return checked


def dense_placement(model: nn.Module, parallel: ParallelConfig, shards: int) -> PlacementFn:
    """The same for the other parameters, by ``shard_placement_fn``; vectors have only dimension 0."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if parallel.shard_placement_fn != "shard_by_dim_1":
        return lambda parameter: _row_placement(parameter, names[parameter], shards)

    def place(parameter: nn.Parameter) -> Shard:
        shape = local(parameter).shape
        if len(shape) < 2:
            return Shard(0)
        if shape[1] % shards:
            raise UserError(
                f"parallel.shard_placement_fn: shard_by_dim_1 splits dimension 1 of {names[parameter]} "
                f"{list(shape)} over {shards} ranks, which must divide it; take shard_by_dim_0 (any size) or "
                "another parallel.fsdp_size"
            )
        return Shard(1)

    return place


def _row_placement(parameter: nn.Parameter, name: str, shards: int) -> Shard | None:
    """By rows, FSDP's own choice, unless transformers' reader fails on it: where tp has cut the rows before,
    it cannot read none of them.
    """
    cut_before = isinstance(parameter, DTensor) and any(p.is_shard(0) for p in parameter.placements)
    shape = local(parameter).shape
    if not cut_before or not leaves_a_rank_empty(shape[0], shards):
        return None
    if shape[1] % shards:
        raise UserError(
            f"parallel.fsdp_size: {shards} ranks share the {shape[0]} rows of {name} that a tp rank holds, "
            f"and one would hold none; nor do they divide its {shape[1]} columns. Take an fsdp_size that does"
        )
    return Shard(1)


def _sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over ranks, not averaged: the loss is normalised by the global token count.

    Both switches are needed: by the factor alone torch asks for a pre-multiplied sum, which gloo lacks.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def free_what_was_read_around(model: nn.Module) -> None:
    """Let each shard have memory of its own, once weights are read and before the first forward.

    On the host the reader cuts a shard out of the whole tensor, and a view keeps all of it alive.
    """
    for parameter in model.parameters():
        part = local(parameter)
        if isinstance(parameter, DTensor) and part.untyped_storage().nbytes() > part.nbytes:
            parameter._local_tensor = part.clone(memory_format=torch.contiguous_format)


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
    group, so that both see it gathered. A block that is left without a parameter needs no group.
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


def set_prefetch(model: nn.Module, groups: list[list[nn.Module]], parallel: ParallelConfig) -> None:
    """Each unit starts the gathers of the next ones while it computes, experts counting as units.

    Backwards a module comes before what it contains (its output's gradient is there first), so the order is
    not the forward one reversed.
    """
    ahead, behind = parallel.num_to_forward_prefetch, parallel.num_to_backward_prefetch
    # A tied unit runs first and last. What it fetches the second time may be resharded before it is used, and
    # with a number of ranks to reshard to torch then no longer knows from which it was gathered.
    tied = {group[0] for group in groups if len(group) > 1 and parallel.reshards_to is not None}
    for unit, following in _followers(_in_order(groups, model.modules()), ahead):
        if unit not in tied:
            unit.set_modules_to_forward_prefetch(following)
    for unit, following in _followers(_in_order(groups, _backwards(model)), behind):
        unit.set_modules_to_backward_prefetch(following)


def _in_order(groups: list[list[nn.Module]], modules: Iterable[nn.Module]) -> list[Any]:
    """The first module of each group, where the first of its members is met; that one holds FSDP's state."""
    leader = {member: group[0] for group in groups for member in group}
    return list(dict.fromkeys(leader[module] for module in modules if module in leader))


def _backwards(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in reversed(list(module.children())):
        yield from _backwards(child)


def _followers(units: list[Any], count: int) -> Iterator[tuple[Any, list[Any]]]:
    for index, unit in enumerate(units):
        if following := units[index + 1 : index + 1 + count]:
            yield unit, following
