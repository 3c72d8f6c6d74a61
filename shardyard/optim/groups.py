"""Which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from shardyard.config import TrainingConfig
from shardyard.config.parameter_groups import GroupRule, group_rules
from shardyard.errors import UserError
from shardyard.parallel import matches
from shardyard.parallel.pipeline import PipelineModel

_KEY = "training.parameter_groups"
_OTHERS = GroupRule(("*",))


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own; the learning rate is the schedule's times ``lr_scale``."""

    label: str
    named: tuple[tuple[str, nn.Parameter], ...]
    weight_decay: float
    lr_scale: float = 1.0

    def options(self, lr: float) -> dict[str, Any]:
        """The group as torch's optimizers take it, with names, at the schedule's rate ``lr``."""
        return {
            "params": list(self.named), "weight_decay": self.weight_decay, "lr": lr * self.lr_scale,
            "lr_scale": self.lr_scale, "label": self.label,
        }  # fmt: skip


def torch_groups(groups: Iterable[Group], lr: float) -> list[dict[str, Any]]:
    """Those that have parameters, as torch takes them; one without any where there is none: a pipeline stage
    may be all frozen.
    """
    return [g.options(lr) for g in groups if g.named] or [{"params": [], "param_names": [], "lr": lr}]


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Matrices decay; norms, biases and other vectors do not."""
    # An expert's stacked biases are 2-D, as is a norm with weights of its own for each head.
    return parameter.ndim >= 2 and not name.endswith("bias") and not is_of_norm(name)


def is_of_norm(name: str) -> bool:
    """Whether the parameter ``name`` is a norm's own."""
    return "norm" in name.rpartition(".")[0].rpartition(".")[2]


def group_parameters(model: nn.Module, training: TrainingConfig) -> tuple[Group, ...]:
    """The trained parameters of this rank's stages: two groups for each entry of ``parameter_groups``, and
    two for the rest, in the same order on all ranks; a group may be empty.

    Weight decay, an entry's own too, leaves out norms and biases unless ``training.decay_norm_and_bias``.

    Raises:
        UserError: a pattern matches no parameter of the model.
    """
    rules = (*group_rules(training), _OTHERS)
    names = dict(_names_of(model))
    _refuse_unmatched(rules, _all_names(model))
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in rules]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[_first(rules, names[parameter])].append((name, parameter))
    everything = training.decay_norm_and_bias
    return tuple(
        Group(
            label,
            tuple(pair for pair in own if (everything or decays(*pair)) is decayed),
            decay,
            rule.lr_scale,
        )
        for rule, own in zip(rules, members, strict=True)
        for label, decayed, decay in _halves(rule, training)
    )


def group_lines(groups: Sequence[Group], counts: Sequence[Sequence[float]]) -> list[str]:
    """What each group trains, and which entry trains nothing; ``counts``: its parameters and their elements,
    over all stages.
    """
    width = max(len(group.label) for group in groups)
    lines = []
    for number, (group, (tensors, elements)) in enumerate(zip(groups, counts, strict=True)):
        if tensors:
            lines.append(
                f"{group.label:<{width}}  lr x {group.lr_scale:g}, weight decay {group.weight_decay:g}: "
                f"{int(tensors):,} parameters of {int(elements):,} elements"
            )
        elif number % 2 == 0 and number < len(groups) - 2 and not counts[number + 1][0]:  # both its halves
            lines.append(
                f"{group.label:<{width}}  trains nothing: its parameters are frozen, or of an entry above"
            )
    return lines


def _halves(rule: GroupRule, training: TrainingConfig) -> Iterator[tuple[str, bool, float]]:
    title = "others" if rule is _OTHERS else ", ".join(rule.patterns)
    decay = training.weight_decay if rule.weight_decay is None else rule.weight_decay
    yield title, True, decay
    yield f"{title} (norms and biases)", False, 0.0


def _names_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Each parameter with all its names; a tied one has several, and the same ones on every stage."""
    if isinstance(model, PipelineModel):
        tied = model.whole.tied
        for name, parameter in model.named_parameters():
            yield parameter, model.whole.names_of(tied.get(name, name))
        return
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    yield from names.items()


def _all_names(model: nn.Module) -> list[str]:
    if isinstance(model, PipelineModel):
        return [*model.whole.parameters, *model.whole.tied]
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _first(rules: Sequence[GroupRule], names: Sequence[str]) -> int:
    return next(
        index
        for index, rule in enumerate(rules)
        if any(matches(pattern, name) for pattern in rule.patterns for name in names)
    )


def _refuse_unmatched(rules: Sequence[GroupRule], names: Sequence[str]) -> None:
    for number, rule in enumerate(rules, 1):
        for pattern in rule.patterns:
            if rule is not _OTHERS and not any(matches(pattern, name) for name in names):
                raise UserError(
                    f"{_KEY}: {pattern} of entry {number} matches no parameter of this model; they are "
                    f"called like {', '.join([*names[:2], *names[-1:]])}, and `*` stands for any text"
                )
