"""This rank's stages of a pipeline, which look like one model that holds a part of the names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.parallel.pipeline.schedule import TrainingSchedule, filled_count
from shardyard.parallel.pipeline.stages import Stage, WholeModel
from shardyard.parallel.sequence import SequenceLayout

IGNORE_INDEX = -100


class PipelineModel(nn.Module):
    """The stages of one rank, in order. Names, parameters and buffers are those of the whole model.

    Call it without gradients for a forward through all stages; training goes through `forward_backward`.
    Every rank of the pipeline calls either with the same micro-batches.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parallel: ParallelConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        sequence: SequenceLayout,
        compute_dtype: torch.dtype,
    ) -> None:
        """``modules`` are pruned models (`stages.prune`), FSDP roots; ``group``: the pipeline's ranks."""
        super().__init__()
        # A tuple is no submodule: names keep their form, without a number in front.
        self.stages = tuple(modules)
        self._by_index = {stage_of(module).index: module for module in modules}
        self._parallel, self._group, self._device = parallel, group, device
        self._sequence, self._dtype = sequence, compute_dtype
        self._schedule: TrainingSchedule | None = None
        self._ends: dist.ProcessGroup | None = None
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    @property
    def whole(self) -> WholeModel:
        return stage_of(self.stages[0]).whole

    @property
    def holds_first(self) -> bool:
        return any(stage_of(module).is_first for module in self.stages)

    @property
    def holds_last(self) -> bool:
        return any(stage_of(module).is_last for module in self.stages)

    @property
    def routing(self) -> Any:
        """The routers' object, which the forward of each stage reads."""
        return getattr(self.stages[0], "routing", None)

    @routing.setter
    def routing(self, value: Any) -> None:
        for module in self.stages:
            module.routing = value  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for module in self.stages:
            yield from module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """As of one model.

        Raises:
            AttributeError: it is another rank's.
        """
        named = dict(self.named_modules(remove_duplicate=False))
        if target not in named:
            raise AttributeError(f"no pipeline stage of this rank has a module {target}")
        return named[target]

    def train(self, mode: bool = True) -> PipelineModel:
        self.training = mode
        for module in self.stages:
            module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Config, generation config and whatever else a model of transformers carries."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("stages")[0], name)

    def group_of_ends(self) -> dist.ProcessGroup | None:
        """The ranks of the first and the last stage; None on a rank that holds neither. Made once."""
        if self._group.size() == 2:
            return self._group
        if self._ends is None and self._group.rank() in (0, self._group.size() - 1):
            ranks = dist.get_process_group_ranks(self._group)
            made = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self._ends = made
        return self._ends

    def forward_backward(self, parts: Sequence[dict[str, Any]], divisor: float) -> list[torch.Tensor]:
        """Gradients of the micro-batches ``parts`` (arguments of the model's forward), each loss sum divided
        by ``divisor``, summed and reduced once. Their loss sums, zeros but on the rank of the last stage.
        """
        fillers = filled_count(len(parts), self._group.size(), self._parallel) - len(parts)
        everything = [*parts, *([_filler(parts[0])] * fillers)]
        length = max(self._sequence.local_length(_documents(part)) for part in everything)
        schedule, wire = self._schedule, self._wire(length)
        if schedule is None or (schedule.count, schedule.wire.shape) != (len(everything), wire.shape):
            self._schedule = schedule = TrainingSchedule(
                self._by_index, self._parallel, self._group, self._device, count=len(everything), wire=wire
            )
        entering = [part["input_ids"] for part in everything]
        arguments = [_without_ids(part) | {"local_tokens": length} for part in everything]
        sums = schedule.run(entering, arguments, divisor)[: len(parts)]
        return sums or [torch.zeros((), device=self._device) for _ in parts]

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
        """One micro-batch through all stages, without gradients.

        With ``labels`` the sum of the loss on the rank of the last stage and 0 elsewhere, so that a rank goes
        on to its next micro-batch at once; without, all logits on every rank, fp32 [1, T, V].
        """
        if torch.is_grad_enabled():
            raise RuntimeError("a pipeline trains through forward_backward")
        length = self._sequence.local_length(_documents({"input_ids": input_ids, **others}))
        output = torch.zeros((), device=self._device)
        for index, module in self._by_index.items():
            entering = input_ids if index == 0 else self._receive(length)
            result = module(entering, labels=labels, local_tokens=length, **others)
            if stage_of(module).is_last:
                output = result
            else:
                self._send(result)
        return output if labels is not None else self._broadcast(output, input_ids.shape[1])

    def _wire(self, length: int) -> torch.Tensor:
        """Room for the hidden states between stages, of a micro-batch with ``length`` tokens on this rank."""
        size, tokens = self.config.get_text_config().hidden_size, length // self._sequence.tp_size
        return torch.empty(1, tokens, size, dtype=self._dtype, device=self._device)

    def _receive(self, length: int) -> torch.Tensor:
        hidden = self._wire(length)
        dist.recv(hidden, group=self._group, group_src=(self._group.rank() - 1) % self._group.size())
        return hidden

    def _send(self, hidden: torch.Tensor) -> None:
        """To the next stage, without waiting: as many as the pipeline has ranks may be on their way."""
        while len(self._sent) >= self._group.size():
            self._sent.popleft()[0].wait()
        hidden = hidden.contiguous()
        target = (self._group.rank() + 1) % self._group.size()
        work = dist.isend(hidden, group=self._group, group_dst=target)
        assert work is not None
        self._sent.append((work, hidden))

    def _broadcast(self, logits: torch.Tensor, tokens: int) -> torch.Tensor:
        words = self.config.get_text_config().vocab_size
        logits = logits.float() if self.holds_last else torch.empty(1, tokens, words, device=self._device)
        dist.broadcast(logits, group=self._group, group_src=self._group.size() - 1)
        return logits


def stage_of(module: Any) -> Stage:
    return module._pp_stage


def parts_of(model: Any) -> tuple[Any, ...]:
    """The models of the family's own class that a rank holds: its stages, or the whole."""
    return model.stages if isinstance(model, PipelineModel) else (model,)


def tied_partners(model: Any) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """The weights that the first and the last stage share, with the group of the two ranks; usually none.

    The first stage's rank comes first in the group: it answers for the weight. All ranks of the pipeline call
    this together.
    """
    if not isinstance(model, PipelineModel) or not model.whole.tied:
        return []
    group = model.group_of_ends()
    names = set(model.whole.tied.values())
    return [(p, group) for name, p in model.named_parameters() if name in names] if group else []


def _documents(part: dict[str, Any]) -> tuple[int, ...]:
    return part.get("doc_lens") or (part["input_ids"].shape[1],)


def _without_ids(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "input_ids"}


def _filler(part: dict[str, Any]) -> dict[str, Any]:
    """One token without a label, in place of a micro-batch."""
    return part | {
        "input_ids": part["input_ids"][:, :1],
        "labels": torch.full_like(part["labels"][:, :1], IGNORE_INDEX),
        "position_ids": torch.zeros_like(part["position_ids"][:, :1]),
        "doc_lens": (1,),
        "is_filler": True,
    }
