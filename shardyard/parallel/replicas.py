"""Do ranks that must hold the same numbers hold the same numbers?

Replicas that drift apart train on, with a plausible loss, and are noticed when it is too late. So the
parameters are hashed after the first step of a run, where the ranks would already differ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from shardyard.parallel.gradients import Tied
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local, replica_groups

_CHUNK = 1 << 22
_WEIGHT_PERIOD = 65_521  # prime; weights along the tensor make the hash notice a permutation


class DivergedError(RuntimeError):
    """Ranks that hold the same piece of a parameter hold different numbers."""

    on_every_rank = True


@torch.no_grad()
def check_replicas(named: Iterable[tuple[str, torch.Tensor]], meshes: Meshes, tied: Tied = ()) -> int:
    """Compare every tensor with its replicas; all ranks call it. Returns how many were compared.

    Raises:
        DivergedError: on every rank, naming the parameters and the ranks.
    """
    partners = {id(parameter): group for parameter, group in tied}
    by_group: dict[str, tuple[dist.ProcessGroup, list[str], list[torch.Tensor]]] = {}
    for name, tensor in named:
        groups = replica_groups(tensor, meshes)
        if id(tensor) in partners:
            groups["tied"] = partners[id(tensor)]
        for label, group in groups.items():
            _, names, hashes = by_group.setdefault(f"{label}/{group.group_name}", (group, [], []))
            names.append(name)
            hashes.append(hash_of(local(tensor)))
    differing: dict[str, list[int]] = {}
    for _, (group, names, hashes) in sorted(by_group.items()):
        mine = torch.stack(hashes)
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        bad = (least != most).any(dim=1).cpu().tolist()
        differing |= {n: dist.get_process_group_ranks(group) for n, b in zip(names, bad, strict=True) if b}
    _agree(differing)
    return len({name for _, names, _ in by_group.values() for name in names})


def _agree(differing: dict[str, list[int]]) -> None:
    everyone: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, differing)
    found = {name: ranks for share in everyone for name, ranks in share.items()}
    if found:
        some = "; ".join(f"{name} (ranks {ranks})" for name, ranks in list(found.items())[:5])
        raise DivergedError(
            f"{len(found)} parameter(s) differ between ranks that must hold the same values: {some}. The "
            "weights of this run are not to be trusted; please report it with the output of `shardyard env`"
        )


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Two 64-bit sums over the bit patterns of ``tensor``, int64 [2]; on its device, in bounded memory."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(torch.uint8) if flat.element_size() == 1 else flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(piece), device=tensor.device) % _WEIGHT_PERIOD + 1
        total += torch.stack((piece.sum(), (piece * place).sum()))
    return total


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
