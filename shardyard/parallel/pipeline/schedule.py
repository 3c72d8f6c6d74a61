"""The order in which a rank works on the micro-batches of a step: torch's schedules, told every shape.

A schedule is made for a number of micro-batches and one length of them; it is made anew when one of the two
changes. Given all shapes beforehand, torch makes no extra forward to learn them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from shardyard.config import ParallelConfig
from shardyard.parallel.pipeline.split import stages_per_rank


class TrainingSchedule:
    """Forward and backward of ``count`` micro-batches whose hidden states are ``wire`` = [1, T, H].

    ``modules`` are this rank's stages by index: FSDP roots that take ids (the first) or hidden states as
    their first argument and give hidden states or (the last) the sum of the loss.
    """

    def __init__(
        self,
        modules: dict[int, torch.nn.Module],
        parallel: ParallelConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        count: int,
        wire: torch.Tensor,
    ) -> None:
        self.count, self.wire = count, wire
        self._divisor = 1.0
        self._sums: list[torch.Tensor] = []
        num_stages = group.size() * stages_per_rank(parallel)
        self._stages = [
            _stage(module, index, num_stages, group, device, wire) for index, module in modules.items()
        ]
        self._schedule = self._make(parallel)

    def _make(self, parallel: ParallelConfig) -> Any:
        # Our gradients are sums over micro-batches; torch would divide them by their number.
        options: dict[str, Any] = dict(n_microbatches=self.count, loss_fn=self._loss, scale_grads=False)
        if parallel.pp_schedule == "interleaved_1f1b":
            return ScheduleInterleaved1F1B(self._stages, **options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        # With fewer micro-batches than stages nothing is left to interleave: 1F1B is GPipe.
        few = self.count < self._stages[0].num_stages
        kind = ScheduleGPipe if few or parallel.pp_schedule == "gpipe" else Schedule1F1B
        return kind(self._stages[0], **options)

    def _loss(self, loss_sum: torch.Tensor, _target: None) -> torch.Tensor:
        self._sums.append(loss_sum.detach())
        return loss_sum / self._divisor

    def run(
        self, entering: Sequence[torch.Tensor], arguments: Sequence[dict[str, Any]], divisor: float
    ) -> list[torch.Tensor]:
        """Accumulate the gradients of all micro-batches, each loss sum divided by ``divisor``, and reduce
        them once over the data-parallel ranks. The loss sums, on the rank of the last stage; elsewhere none.

        ``entering`` are the ids of the micro-batches, for the first stage, ``arguments`` are for every stage.
        """
        self._divisor, self._sums = divisor, []
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        # The public `step` would cut one tensor into equal micro-batches; ours differ in their documents.
        self._schedule._step_microbatches(
            [(ids,) for ids in entering],
            list(arguments),
            [None] * self.count,
            [],
            return_outputs=False,
        )
        return self._sums


def _stage(
    module: torch.nn.Module,
    index: int,
    num_stages: int,
    group: dist.ProcessGroup,
    device: torch.device,
    wire: torch.Tensor,
) -> PipelineStage:
    hidden = wire.detach().requires_grad_()
    first, last = index == 0, index == num_stages - 1
    return PipelineStage(
        module, index, num_stages, device, group=group,
        # What enters the first stage and leaves the last one is not sent; only its kind matters.
        input_args=torch.zeros(1, dtype=torch.long, device=device) if first else hidden,
        output_args=torch.zeros((), device=device, requires_grad=True) if last else hidden,
    )  # fmt: skip


def filled_count(count: int, pp_size: int, parallel: ParallelConfig) -> int:
    """So many micro-batches, fillers among them, does the schedule need to run ``count``.

    Interleaved 1F1B works in rounds of equal size, of ``pp_size`` micro-batches at least.
    """
    if parallel.pp_schedule != "interleaved_1f1b":
        return count
    while count % max(1, count // pp_size):
        count += 1
    return count
