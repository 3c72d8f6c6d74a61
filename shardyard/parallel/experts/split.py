"""Experts on the ranks that own them: each ep rank holds some, and tokens travel to them and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardyard.config import ParallelConfig
from shardyard.errors import UserError
from shardyard.parallel.experts.exchange import exchange_tokens
from shardyard.parallel.experts.select import ALL_EXPERTS, expert_modules, takes_routed_tokens
from shardyard.parallel.meshes import Meshes
from shardyard.parallel.ownership import local

logger = logging.getLogger("shardyard.parallel")


def apply_expert_parallel(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> None:
    """Each parameter of the experts becomes a DTensor Shard(0) on ``meshes.ep``; does nothing with ep 1.

    Before FSDP, on the meta device. ``num_experts`` of an experts module is what its rank holds afterwards.

    Raises:
        UserError: a model without experts, or experts that ``parallel.ep_size`` does not divide.
    """
    if meshes.layout.ep == 1:
        return
    chosen = expert_modules(model, parallel.ep_modules)
    if not chosen and meshes.layout.pp == 1:
        raise UserError(f"parallel.ep_size: {meshes.layout.ep}, but this model has no experts; leave it at 1")
    if parallel.ep_dispatcher != "eager":
        logger.info("parallel.ep_dispatcher: %s is an NPU's; eager is used here", parallel.ep_dispatcher)
    for name, module in chosen:
        _check(name, module, meshes.layout.ep)
        ExpertParallel(module, meshes.ep).install()


def _check(name: str, module: Any, ep: int) -> None:
    if module.num_experts % ep:
        sizes = [size for size in range(1, module.num_experts + 1) if module.num_experts % size == 0]
        raise UserError(
            f"parallel.ep_size: {ep} does not divide the {module.num_experts} experts of {name}; "
            f"sizes that do: {', '.join(map(str, sizes))}"
        )
    own = set(module.parameters(recurse=False))
    if not takes_routed_tokens(module) or any(parameter not in own for parameter in module.parameters()):
        raise UserError(
            f"parallel.ep_size: {ep}, but the experts of {name} ({type(module).__name__}) cannot run apart; "
            "leave it at 1 for this family"
        )


class ExpertParallel:
    """The forward of one experts module whose experts live on the ranks of ``mesh``."""

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.run_experts = module.forward

    def install(self) -> None:
        """Split the parameters and take the place of the module's forward."""
        for name, parameter in self.module.named_parameters(recurse=False):
            split = distribute_tensor(parameter.data, self.mesh, [Shard(0)], src_data_rank=None)
            setattr(self.module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        setattr(self.module, ALL_EXPERTS, self.module.num_experts)
        self.module.num_experts //= self.mesh.size()
        self.module.forward = self

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return exchange_tokens(
            self._run, hidden, index, weights,
            local_experts=self.module.num_experts, group=self.mesh.get_group(),
        )  # fmt: skip

    def _run(self, rows: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with _local_parameters(self.module) as parameters:
            if len(rows) == 0:
                return _NoRows.apply(rows, *parameters)
            return self.run_experts(rows, expert, weights)


class _NoRows(torch.autograd.Function):
    """What experts make of no rows. Their gradient is zero, not absent: FSDP reduces what is there."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        zeros = (
            grad.new_zeros(shape, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        )
        return grad, *zeros


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The module with this rank's plain tensors in place of its DTensors."""
    held: dict[str, Any] = dict(module._parameters)
    parts = {n: local(p) for n, p in held.items() if p is not None}
    module._parameters.update(parts)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield list(parts.values())
    finally:
        module._parameters.update(held)
