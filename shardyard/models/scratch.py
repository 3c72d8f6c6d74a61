"""Initial weights that do not depend on the layout.

Each module draws its parameters whole, from a generator seeded by (seed, module name), and every rank keeps
its slice. So any number of ranks starts from the same weights, and no rank holds more than one block of the
model at a time. (transformers' own initialisation of sharded tensors gives every rank the same shard.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from shardyard.parallel import local


def module_seed(seed: int, name: str) -> int:
    """A 63-bit seed of its own for each module."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def initialise_from_seed(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Give a parallelised model on the meta device its storage and its initial weights."""
    names = _with_memory(model, device)
    done: set[nn.Module] = set()
    with _own_random_numbers(device):
        for block in _blocks(model):
            _initialise_block(model, block, names, done, seed)
        for origin in _tied_origins(model):
            # Drawn once more, last: a tied weight is the embedding's, also on a stage without the other one.
            _initialise_block(model, (origin, False), names, done - {origin}, seed)


@torch.no_grad()
def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give a parallelised model on the meta device its storage: NaN in all weights, and what no checkpoint
    holds (the frequencies of rotary positions ...) as the family's code makes it.
    """
    names = _with_memory(model, device)
    with _own_random_numbers(device):
        for module in model.modules():
            if module._non_persistent_buffers_set:
                _initialise_block(model, (module, False), names, set(), 0)
    for _, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        if tensor.is_floating_point():
            local(tensor).fill_(torch.nan)


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that are part of a checkpoint, by name."""
    found = []
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            found.append((name, buffer))
    return found


def _with_memory(model: PreTrainedModel, device: torch.device) -> dict[nn.Module, str]:
    """The names of the modules, all with storage of their own now; tied weights are tied again."""
    model.to_empty(device=device)
    model.tie_weights(recompute_mapping=False)
    return {module: name for name, module in model.named_modules()}


def _own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device])


def _tied_origins(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that own the weights which others are tied to."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = sorted({origin.rpartition(".")[0] for origin in tied.values()})
    return [model.get_submodule(name) for name in names]


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """(module, whole subtree?): each FSDP block as a whole, then what is around them, children first."""
    inner = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    outermost = [m for m in inner if not any(m is not o and m in set(o.modules()) for o in inner)]
    yield from ((module, True) for module in outermost)
    yield from ((module, False) for module in reversed(list(model.modules())))


def _initialise_block(
    model: PreTrainedModel,
    block: tuple[nn.Module, bool],
    names: dict[nn.Module, str],
    done: set[nn.Module],
    seed: int,
) -> None:
    module, subtree = block
    members = [m for m in (reversed(list(module.modules())) if subtree else [module]) if m not in done]
    sharded: list[tuple[nn.Module, str, nn.Parameter]] = []
    for member in members:
        for name, parameter in member.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                sharded.append((member, name, parameter))
                member._parameters[name] = nn.Parameter(torch.empty_like(_whole_like(parameter)))
    try:
        for member in members:
            torch.manual_seed(module_seed(seed, names[member]))
            _initialiser(model, member, names)._init_weights(member)
    finally:
        for member, name, parameter in sharded:
            whole, member._parameters[name] = member._parameters[name], parameter
            assert isinstance(parameter, DTensor) and whole is not None
            _copy_slice(whole.data, parameter)
    done.update(members)


def _whole_like(parameter: DTensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.to_local().device)


def _copy_slice(whole: torch.Tensor, parameter: DTensor) -> None:
    # src_data_rank=None: every rank has the whole tensor, so the slice is taken without a broadcast.
    sliced = distribute_tensor(
        whole.to(parameter.device_mesh.device_type),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )
    parameter.to_local().copy_(sliced.to_local())


def _initialiser(model: PreTrainedModel, module: nn.Module, names: dict[nn.Module, str]) -> PreTrainedModel:
    """The innermost sub-model that holds ``module``: composite models have a rule for each part."""
    found, name = model, names[module]
    for candidate in model.modules():
        prefix = names[candidate]
        inside = prefix == "" or name == prefix or name.startswith(prefix + ".")
        if isinstance(candidate, PreTrainedModel) and inside and len(prefix) >= len(names[found]):
            found = candidate
    return found
