"""Adam-mini: AdamW with one second moment for a block of a parameter, half of AdamW's state.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (arXiv:2406.16793): within a block, where the
Hessian is dense, one step size serves, from the mean of the squared gradients:

    M <- b1 M + (1 - b1) G;   v <- b2 v + (1 - b2) mean(G^2 over the block)
    W <- (1 - lr decay) W - lr M / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

Blocks, by its partition for Transformers: query and key by head, every other matrix by output (a row; of an
embedding and a head, a token), each expert's matrices likewise, and vectors (norms, biases) whole.

A block may lie on several ranks: sums of squares are added up over them, a few floats for each row or head,
all parameters in one collective for each dimension of the mesh. The second moment is kept for each row,
[rows, 1], so that it is saved and sharded with the rows of its parameter; rows of one head have equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate

from shardyard.optim.algorithms import Setup
from shardyard.optim.groups import Group, torch_groups
from shardyard.optim.matrix_plan import box_of
from shardyard.optim.stepping import Stepping
from shardyard.parallel import beside, local
from shardyard.parallel.experts.select import fused_experts
from shardyard.parallel.pipeline import parts_of


@dataclass(frozen=True)
class Blocks:
    """How a parameter is cut into blocks."""

    inputs: int | None
    """The dimension over which a block stretches; None: the whole parameter is one."""
    height: int = 1
    """Rows of a block, for a head's."""


def blocks_of(model: nn.Module) -> dict[nn.Parameter, Blocks]:
    """The blocks of each parameter, by its role."""
    transposed = {
        parameter
        for _, module in fused_experts(model)
        if getattr(module, "is_transposed", False)
        for parameter in module.parameters(recurse=False)
    }
    head = _head_size(model)
    return {p: _blocks(name, p, head, transposed=p in transposed) for name, p in model.named_parameters()}


def _blocks(name: str, parameter: torch.Tensor, head: int | None, *, transposed: bool) -> Blocks:
    if parameter.ndim < 2:
        return Blocks(None)
    if parameter.ndim > 2 and transposed:
        return Blocks(parameter.ndim - 2)
    by_head = parameter.ndim == 2 and name.endswith(("q_proj.weight", "k_proj.weight"))
    fits = by_head and head is not None and parameter.shape[0] % head == 0
    return Blocks(parameter.ndim - 1, head if fits and head is not None else 1)


def _head_size(model: nn.Module) -> int | None:
    config: Any = getattr(parts_of(model)[0], "config", None)
    if config is None:
        return None
    text = config.get_text_config()
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    return getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)


class AdamMini(Stepping):
    """Over DTensors, or plain tensors where a process is alone."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        blocks: Mapping[Any, Blocks],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._betas, self._eps = betas, eps
        self._blocks = {p: blocks[p] for group in self.param_groups for p in group["params"]}
        self._across = {p: _groups_across(p, own) for p, own in self._blocks.items()}

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A count of updates, a moment like the parameter, and the second one for each row."""
        inputs = self._blocks[parameter].inputs
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": local(parameter).new_zeros(())
            if inputs is None
            else _zeros_by_row(parameter, inputs),
        }

    def _step(self) -> None:
        trained = list(self.trained())
        means = self._mean_squares([parameter for parameter, _ in trained])
        for (parameter, group), mean in zip(trained, means, strict=True):
            self._update(parameter, mean, self.state_of(parameter, group), group)

    def _update(
        self, parameter: torch.Tensor, mean: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = self._betas
        state["step"] += 1
        count = float(state["step"])
        moment, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        assert parameter.grad is not None
        moment.lerp_(local(parameter.grad), 1 - beta1)
        square.lerp_(mean, 1 - beta2)
        size = (square / (1 - beta2**count)).sqrt_().add_(self._eps)
        rate = group["lr"] / (1 - beta1**count)
        weights = local(parameter)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_(moment / size, alpha=rate)

    def _mean_squares(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each parameter what its second moment takes up: for each row that this rank holds, or one."""
        sums = [_sums(p, self._blocks[p]) for p in parameters]
        for group, numbers in _by_group(self._across[p] for p in parameters):
            together = torch.cat([sums[number] for number in numbers])
            dist.all_reduce(together, group=group)
            parts = together.split([len(sums[number]) for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                sums[number] = part
        return [_spread(total, p, self._blocks[p]) for total, p in zip(sums, parameters, strict=True)]


def _sums(parameter: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Sums of squared gradients, 1-D: by block, all blocks of the parameter for heads; those held else."""
    assert parameter.grad is not None
    squares = local(parameter.grad).float().square()
    if blocks.inputs is None:
        return squares.sum().reshape(1)
    rows = squares.sum(blocks.inputs)
    if blocks.height == 1:
        return rows.reshape(-1)
    begin, end = box_of(parameter)[0]
    total = rows.new_zeros(parameter.shape[0] // blocks.height)
    return total.index_add_(0, torch.arange(begin, end, device=rows.device) // blocks.height, rows)


def _spread(total: torch.Tensor, parameter: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Means, in the shape of this rank's second moment."""
    if blocks.inputs is None:
        return total.reshape(()) / parameter.numel()
    mean = total / (blocks.height * parameter.shape[blocks.inputs])
    if blocks.height > 1:
        begin, end = box_of(parameter)[0]
        mean = mean[torch.arange(begin, end, device=mean.device) // blocks.height]
    shape = list(local(parameter).shape)
    shape[blocks.inputs] = 1
    return mean.reshape(shape)


def _zeros_by_row(parameter: torch.Tensor, inputs: int) -> torch.Tensor:
    """Like ``parameter`` with one element along ``inputs``, and its rows on the same ranks."""
    shape = list(parameter.shape)
    shape[inputs] = 1
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(shape)
    held = list(local(parameter).shape)
    held[inputs] = 1
    placements = [Replicate() if _splits(p, {inputs}) else p for p in parameter.placements]
    return beside(parameter, local(parameter).new_zeros(held), shape=shape, placements=placements)


def _splits(placement: Any, dims: set[int] | None) -> bool:
    """Whether it splits one of ``dims``; None: any. Where tp or ep has cut before, FSDP's is no Shard."""
    return not placement.is_replicate() and (dims is None or placement.dim in dims)


def _groups_across(parameter: torch.Tensor, blocks: Blocks) -> tuple[dist.ProcessGroup, ...]:
    """The ranks over which blocks stretch: along each mesh dimension that shards a dimension of a block."""
    if not isinstance(parameter, DTensor):
        return ()
    inside = None if blocks.inputs is None else {blocks.inputs, *([0] if blocks.height > 1 else [])}
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if mesh.size(dim) > 1 and _splits(placement, inside)
    )


def _by_group(
    across: Iterable[Sequence[dist.ProcessGroup]],
) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """Group -> the parameters whose sums go over it, in the same order on all its ranks."""
    found: dict[dist.ProcessGroup, list[int]] = {}
    for number, groups in enumerate(across):
        for group in groups:
            found.setdefault(group, []).append(number)
    return list(found.items())


def build(groups: Sequence[Group], setup: Setup) -> AdamMini:
    """With AdamW's settings."""
    training = setup.training
    return AdamMini(
        torch_groups(groups, training.lr), blocks_of(setup.model),
        betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_epsilon,
    )  # fmt: skip
