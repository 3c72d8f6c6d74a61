"""One update: the loss of a global batch, its gradients, the step of the optimizer.

The loss is a sum over labelled tokens divided by their number in the *global* batch, whatever the split into
micro-batches and ranks. It is normalised here and nowhere else.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shardyard.checkpoint.state import persistent_tensors
from shardyard.data.types import MicroBatch
from shardyard.device import Device, ProcessGroup, read_back
from shardyard.evaluate.forwards import forward_parts
from shardyard.optim import InBackward, clip_factor, clip_gradients, owned_norms, set_lr, square_sum
from shardyard.parallel import GradientSums, Meshes, RoutingStats, answers_for, check_replicas
from shardyard.parallel.pipeline import PipelineModel, tied_partners
from shardyard.train.scaler import LossScaler, ScaleState


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after an update. ``loss`` is per labelled token; memory is the largest of any
    rank, bytes.
    """

    loss: float
    grad_norm: float
    num_labelled: int
    num_tokens: int
    memory_allocated: int
    memory_reserved: int
    routing: RoutingStats | None = None
    """None for a model without experts."""
    skipped: str | None = None
    """Why the optimizer did not move; None when it did."""
    scale: ScaleState | None = None
    """With fp16, of the next step's loss; None where nothing has changed it."""
    notice: int = 0
    """The bits that any rank had to tell at the end of the step."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or Inf; raised before the optimizer moves, if it does not in the backward."""

    on_every_rank = True


@dataclass(frozen=True)
class _Counts:
    """Agreed by all ranks before the first forward of a step."""

    labelled: int
    tokens: int
    forwards: tuple[int, ...]
    """Forwards per micro-batch: the largest number of any rank, so that collectives match."""


class TrainStep:
    """Runs one `StepBatch` share through model and optimizer.

    Two small collectives a step: one of counts before the forwards, one of loss, norm and memory after the
    backwards. Gradients are reduced once, in the backward of the last forward. Every reduction is a sum: the
    loss is divided by the global number of labelled tokens before the backward, and by nothing else.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        group: ProcessGroup,
        device: Device,
        *,
        meshes: Meshes,
        max_grad_norm: float,
        on_nonfinite: str = "stop",
        packed: bool = True,
        seed: int = 0,
        in_backward: bool | Literal["two_pass"] = False,
        scaler: LossScaler | None = None,
    ) -> None:
        self.model, self.optimizer, self.group, self.device = model, optimizer, group, device
        self.meshes, self.max_grad_norm, self.on_nonfinite = meshes, max_grad_norm, on_nonfinite
        self.packed, self.seed, self.scaler = packed, seed, scaler
        self.notice: Callable[[], int] = _nothing_to_tell
        """What this rank has to tell the others at the end of a step, as bits; it costs no collective."""
        self.routing = model.routing
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.tied = tied_partners(model)
        self.sum_gradients = GradientSums(self.parameters, meshes, self.tied)
        partners = {p for p, pair in self.tied if pair.rank() != 0}  # the first stage answers for them
        self.owned = [p for p in self.parameters if answers_for(p, meshes) and p not in partners]
        self.in_backward = (
            InBackward(optimizer, late=self.sum_gradients.summed, two_passes=in_backward == "two_pass")
            if in_backward
            else None
        )

    def __call__(self, micro_batches: Sequence[MicroBatch], *, step: int, lr: float) -> StepResult:
        """Update number ``step`` (from 1) with learning rate ``lr``.

        Raises:
            NonFiniteError: with ``on_nonfinite`` "stop", on every rank.
        """
        counts = self._agree(micro_batches)
        if counts.labelled == 0:
            memory = self.device.peak_memory()
            return StepResult(math.nan, 0.0, 0, counts.tokens, *memory, skipped="no token in it has a label")
        set_lr(self.optimizer, lr)
        with nullcontext() if self.in_backward is None else self.in_backward.first_pass():
            losses = self._begin(micro_batches, counts, step)
        result, faults = self._conclude(losses, counts)
        if faults:
            self.optimizer.zero_grad(set_to_none=True)
            self._finish_routing(applied=False)
            if self.scaler is not None and _are_of_gradients(faults) and self.scaler.can_back_off:
                return replace(result, skipped=self.scaler.back_off(), scale=self.scaler.state)
            message = self._describe(faults, micro_batches, step)
            if self.in_backward is not None and not self.in_backward.two_passes:
                message += "; by training.optimizer_in_backward the weights have moved: go back to a save"
            if self.on_nonfinite == "stop":
                raise NonFiniteError(message)
            return replace(result, skipped=message)
        if self.in_backward is not None and self.in_backward.two_passes:
            self.optimizer.zero_grad(set_to_none=True)
            with self.in_backward.second_pass(clip_factor(result.grad_norm, self.max_grad_norm) / self.scale):
                self._begin(micro_batches, counts, step)
        clip_gradients(self.parameters, result.grad_norm, self.max_grad_norm, self.scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            result = replace(result, scale=self.scaler.succeeded())
        return replace(result, routing=self._finish_routing(applied=True))

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before the backward: 1 but for fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def compare_replicas(self) -> int:
        """How many tensors other ranks hold as well, all equal there; every rank calls it.

        Raises:
            DivergedError: on every rank, naming those that differ.
        """
        return check_replicas(persistent_tensors(self.model).items(), self.meshes, self.tied)

    def _finish_routing(self, *, applied: bool) -> RoutingStats | None:
        return None if self.routing is None else self.routing.finish_step(applied=applied)

    def _begin(self, micro_batches: Sequence[MicroBatch], counts: _Counts, step: int) -> list[torch.Tensor]:
        """The forwards and backwards of a step, the same ones when it is called again."""
        # Dropout follows from seed, step and rank, so that resuming needs no generator state.
        self.device.seed(step_seed(self.seed, step, self.group.rank))
        if self.routing is not None:
            self.routing.begin_step(counts.tokens, self.scale)
        return self._forward_backward(micro_batches, counts)

    def _agree(self, micro_batches: Sequence[MicroBatch]) -> _Counts:
        documents = [1 if self.packed else len(batch.doc_lens) for batch in micro_batches]
        # Ranks that share a batch (cp, tp, pp) have the same micro-batches; one of them counts them.
        counted = micro_batches if self.meshes.leads_batch else ()
        labelled = sum(batch.num_labelled for batch in counted)
        tokens = sum(batch.num_tokens for batch in counted)
        rows = self.group.gather([labelled, tokens, *documents])
        forwards = rows[:, 2:].max(0).values.int().tolist()
        return _Counts(int(rows[:, 0].sum()), int(rows[:, 1].sum()), tuple(forwards))

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], counts: _Counts) -> list[torch.Tensor]:
        """Loss sums, one per micro-batch. Gradients are sums over ranks, so 1/N is the only factor, times the
        scale of fp16.
        """
        divisor = counts.labelled / self.scale
        if isinstance(self.model, PipelineModel):
            parts = [forward_parts(batch, 1, device=self.device, packed=True)[0] for batch in micro_batches]
            losses = self.model.forward_backward(parts, divisor)
            self.sum_gradients()
            return losses
        losses = []
        last = len(micro_batches) - 1
        for index, (batch, forwards) in enumerate(zip(micro_batches, counts.forwards, strict=True)):
            parts = forward_parts(batch, forwards, device=self.device, packed=self.packed)
            sums: list[torch.Tensor] = []
            for number, part in enumerate(parts):
                self.model.set_requires_gradient_sync(index == last and number == len(parts) - 1)
                loss = self.model(**part)
                (loss / divisor).backward()
                sums.append(loss.detach())
            losses.append(torch.stack(sums).sum())
        self.sum_gradients()
        return losses

    def _conclude(
        self, losses: list[torch.Tensor], counts: _Counts
    ) -> tuple[StepResult, dict[int, int | None]]:
        """Loss and norm over all ranks; and the ranks at fault -> their first bad micro-batch (None: the
        gradient).
        """
        norms = owned_norms(self.owned, self.in_backward.norms if self.in_backward else None)
        counted = self.routing.pending() if self.routing is not None else []
        # The one time in a step that this process waits for the device, with all it has to know.
        per_batch, norms, *arrived = read_back([torch.stack(losses), norms, *counted])
        if self.routing is not None:
            self.routing.arrived(arrived)
        per_batch, square = per_batch.double(), square_sum(norms)
        finite = torch.isfinite(per_batch)
        first_bad = -1 if bool(finite.all()) else int((~finite).int().argmax())
        loss_sum = float(per_batch.sum()) if self.meshes.counts_loss else 0.0
        rows = self.group.gather([loss_sum, square, first_bad, *self.device.peak_memory(), self.notice()])
        loss = float(rows[:, 0].sum()) / counts.labelled
        norm = math.sqrt(total) / self.scale if (total := float(rows[:, 1].sum())) >= 0 else math.nan
        result = StepResult(
            loss, norm, counts.labelled, counts.tokens, int(rows[:, 3].max()), int(rows[:, 4].max()),
            notice=functools.reduce(operator.or_, rows[:, 5].int().tolist()),
        )  # fmt: skip
        bad: dict[int, int | None] = {r: int(b) for r, b in enumerate(rows[:, 2].tolist()) if b >= 0}
        if not bad and not math.isfinite(norm):
            bad = {r: None for r, square in enumerate(rows[:, 1].tolist()) if not math.isfinite(square)}
        return result, bad

    def _describe(self, faults: dict[int, int | None], micro_batches: Sequence[MicroBatch], step: int) -> str:
        ids = self.group.gather_objects([batch.sample_ids for batch in micro_batches])
        if any(index is not None for index in faults.values()):
            where = "; ".join(
                f"rank {rank}, micro-batch {index + 1}, samples {list(ids[rank][index])}"
                for rank, index in faults.items()
                if index is not None
            )
            return f"step {step}: the loss is NaN or Inf on {where}"
        samples = "; ".join(
            f"rank {rank}: {[s for batch in share for s in batch]}" for rank, share in enumerate(ids)
        )
        ranks = ", ".join(map(str, faults))
        return (
            f"step {step}: the loss is finite but the gradient is NaN or Inf (in the shards of rank "
            f"{ranks}); the "
            f"samples of this step are {samples}"
        )


def _are_of_gradients(faults: dict[int, int | None]) -> bool:
    """Whether the loss itself is finite on every rank."""
    return all(micro_batch is None for micro_batch in faults.values())


def _nothing_to_tell() -> int:
    return 0


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for each (run, step, rank)."""
    return (seed * 1_000_003 + step * 8191 + rank) % 2**63
