"""Muon: momentum whose matrices are made orthogonal, and AdamW for all that is no hidden matrix.

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with decoupled decay and the
learning rate of Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982), so that AdamW's rate
serves both:

    B <- mu B + (1 - mu) G;   U = mu B + (1 - mu) G (Nesterov) or B;   O = orthogonalise(U)
    W <- (1 - lr decay) W - lr scale O,   scale = 0.2 sqrt(max(rows, cols))

That is `torch.optim.Muon` of torch 2.13 with ``adjust_lr_fn="match_rms_adamw"``, whose products are in bf16.

What is orthogonalised is the whole matrix, whatever part of it a rank holds (`spread`): a shard's own
orthogonal factor is not a piece of the whole one's, and the run would depend on the number of ranks. The
momentum stays in shards, as the parameters are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardyard.optim import adamw
from shardyard.optim.algorithms import Setup
from shardyard.optim.combined import Combined
from shardyard.optim.groups import Group, torch_groups
from shardyard.optim.matrices import Matrix, hidden_matrices
from shardyard.optim.matrix_plan import Piece, Plan, Round
from shardyard.optim.newton_schulz import orthogonalise
from shardyard.optim.spread import Spread
from shardyard.optim.stepping import Stepping
from shardyard.parallel import local

Scaling = Literal["match_rms_adamw", "original"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BUDGET = 1 << 25
"""Elements of the matrices that a rank works on at a time: 128 MiB in fp32."""


class Muon(Stepping):
    """Over parameters that hold ``matrices``: DTensors, and plain tensors where a process is alone.

    ``group``: the ranks that hold these parameters together; each of them builds it and steps it.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Mapping[Any, Sequence[Matrix]],
        group: dist.ProcessGroup | None = None,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        scaling: Scaling = "match_rms_adamw",
        dtype: torch.dtype = torch.float32,
        budget: int = _BUDGET,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._momentum, self._nesterov, self._steps = momentum, nesterov, steps
        self._scaling: Scaling = scaling
        self._dtype = dtype
        self._of = [(p, options) for options in self.param_groups for p in options["params"]]
        parameters = [p for p, _ in self._of]
        self._spread = Spread(parameters, [matrices[p] for p in parameters], group, budget=budget)
        self.plan = self._spread.plan

    def first_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The momentum, in shards."""
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def _step(self) -> None:
        for parameter, options in self._of:
            if parameter.grad is not None:
                state = self.state_of(parameter, options)
                local(state["momentum_buffer"]).lerp_(local(parameter.grad), 1 - self._momentum)
                local(parameter).mul_(1 - options["lr"] * options["weight_decay"])
        if self._of:
            like = torch.empty(0, dtype=self._dtype, device=_device_of(self._of[0][0]))
            for turn in self.plan.rounds:
                whole = self._spread.gather(turn, self._direction, like)
                self._spread.deliver(turn, self._orthogonal(turn, whole), self._apply, like)

    def _direction(self, piece: Piece) -> torch.Tensor:
        """What is to be orthogonalised, of one piece."""
        parameter, _ = self._of[piece.parameter]
        if parameter.grad is None:  # the same on all ranks: such a parameter stays as it is
            return local(parameter)[piece.local].new_zeros(piece.shape)
        momentum = local(self.state[parameter]["momentum_buffer"])[piece.local]
        if not self._nesterov:
            return momentum
        return local(parameter.grad)[piece.local].lerp(momentum, self._momentum)

    def _orthogonal(self, turn: Round, whole: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Matrices of one stack go together."""
        done: dict[int, torch.Tensor] = {}
        for numbers in _stacks(turn.tasks, self.plan):
            given = [whole.pop(number) for number in numbers]
            together = given[0] if len(given) == 1 else torch.stack(given)
            del given
            result = orthogonalise(together, steps=self._steps, dtype=self._dtype)
            done |= zip(numbers, result[None] if len(numbers) == 1 else result, strict=True)
        return done

    def _apply(self, piece: Piece, orthogonal: torch.Tensor) -> None:
        parameter, options = self._of[piece.parameter]
        if parameter.grad is None:
            return
        rate = options["lr"] * scale_of(self.plan.tasks[piece.task][1], self._scaling)
        part = local(parameter)[piece.local]
        part.add_(orthogonal.to(part.device), alpha=-rate)


def scale_of(matrix: Matrix, scaling: Scaling) -> float:
    """What the learning rate is multiplied by: ``match_rms_adamw`` gives updates the root mean square 0.2,
    about AdamW's; ``original`` is Jordan's.
    """
    rows, cols = matrix.out_and_in
    return (
        0.2 * math.sqrt(max(rows, cols)) if scaling == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
    )


def _stacks(numbers: Sequence[int], plan: Plan) -> list[list[int]]:
    """The tasks by parameter and shape, matrices of their own apart."""
    stacks: dict[tuple[Any, ...], list[int]] = {}
    for number in numbers:
        parameter, matrix = plan.tasks[number]
        stacks.setdefault((parameter, matrix.shape), []).append(number)
    return list(stacks.values())


def _device_of(parameter: torch.Tensor) -> torch.device:
    """Where matrices are multiplied and exchanged: the mesh's, also for parameters on the host."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())


class MuonAndAdamW(Combined):
    """Muon for hidden matrices, AdamW for the rest."""


def build(groups: Sequence[Group], setup: Setup) -> MuonAndAdamW:
    """Each group is split in two, with the same learning rate and decay."""
    training = setup.training
    matrices = hidden_matrices(setup.model)
    hidden, rest = (
        [replace(g, named=tuple(pair for pair in g.named if (pair[1] in matrices) is wanted)) for g in groups]
        for wanted in (True, False)
    )
    muon = Muon(
        torch_groups(hidden, training.lr),
        matrices,
        stage_group(setup),
        momentum=training.muon_momentum, nesterov=training.muon_nesterov, steps=training.muon_ns_steps,
        scaling=training.muon_scaling, dtype=_DTYPES[training.muon_ns_dtype],
    )  # fmt: skip
    return MuonAndAdamW([muon, adamw.build(rest, setup)])


def stage_group(setup: Setup) -> dist.ProcessGroup | None:
    """The ranks that hold this rank's pipeline stages; every rank asks."""
    if not dist.is_initialized():
        return None
    if setup.meshes is None or setup.meshes.layout.pp == 1:
        return dist.group.WORLD
    return setup.meshes.dense["dp_replicate", "fsdp", "tp"]._flatten("stage").get_group()
