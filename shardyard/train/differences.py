"""What a resumed run does differently from the run that wrote its checkpoint, and what each difference does.

The settings of this run win. Two kinds of difference are refused unless ``training.resume_force`` says that
they are meant: data in which the checkpoint's place means something else (train/resume.py), and a schedule
whose learning rate would jump.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardyard.config import Config
from shardyard.config.resolved import SECRETS
from shardyard.config.schema import FIELDS, get
from shardyard.errors import UserError
from shardyard.optim import Schedule

logger = logging.getLogger("shardyard.train")

_SCHEDULE = (
    "training.lr_*", "training.warmup_*", "training.max_steps", "training.num_train_epochs",
)  # fmt: skip
_KEPT = "what is kept and told; no effect on the weights"
_EFFECTS: tuple[tuple[str, str], ...] = (
    ("training.resume_* training.o*put_dir *.cache_dir *token data.overwrite_cache data.*workers", ""),
    (" ".join(_SCHEDULE), "another course of the learning rate in the steps ahead"),
    (
        "training.per_device_train_batch_size training.gradient_accumulation_steps",
        "the global batch is their product with the data-parallel ranks",
    ),
    (
        "training.max_tokens_per_micro_batch training.group_by_length",
        "the same global batches, cut otherwise: equal up to rounding",
    ),
    ("training.seed", "dropout is drawn anew"),
    ("training.fp16_initial_scale", "the scale is the checkpoint's"),
    ("training.optimizer", "the state is taken over where it is of the same kind"),
    ("training.eval_* training.per_device_eval* training.early_*", "holds from the next validation on"),
    (
        "training.save_* training.export_* training.on_save_error training.log* training.profile* "
        "training.keep_best* training.load_best* training.dataloader_* "
        "evaluation.*",
        _KEPT,
    ),
    ("training.deterministic", "other kernels: equal up to rounding"),
    ("training.*", "holds from the next step on"),
    ("data.cross_document_attention", "what packed documents see of each other, from the next step on"),
    ("data.eval* data.val_size", "other validation sets"),
    ("data.*", "the samples and their order are the checkpoint's"),
    ("model.freeze", "what is trained from the next step on"),
    ("model.*_name_or_path", "names the config and the tokenizer; the weights are the checkpoint's"),
    ("model.*", "the weights are the checkpoint's"),
    ("parallel.*dtype", "another precision, from the next step on"),
    ("parallel.*", "another layout: equal up to rounding"),
    ("optimization.*", "other operators: equal up to rounding"),
    ("*", "no effect on the weights"),
)
"""(patterns of settings, what a difference does); the first that matches counts, "" is not told."""
_JUMP = 0.01
"""Shares of ``training.lr`` by which the next step's rate may differ from the schedule it had."""


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint tells of the run that wrote it, besides its state; JSON."""

    config: Mapping[str, Any]
    """``section.key`` -> value, without access tokens."""
    global_batch: int = 0
    ranks: int = 0
    layout: str = ""
    schedule: Mapping[str, Any] | None = None
    """The fields of `Schedule`."""

    @classmethod
    def of(cls, config: Config, **facts: Any) -> RunFacts:
        flat = {path: get(config, path) for path in FIELDS if path not in SECRETS}
        return cls(json.loads(json.dumps(flat)), **facts)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunFacts:
        """Of a checkpoint; an older one tells less."""
        known: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{"config": {}, **known})


def tell_differences(before: RunFacts, now: RunFacts) -> None:
    """Say each difference and what it does; nothing when there is none."""
    rows = [
        (path, old, new, effect) for path, old, new in _changed(before, now) if (effect := effect_of(path))
    ]
    rows += [
        (name, str(old), str(new), effect)
        for name, old, new, effect in (
            ("ranks", before.ranks, now.ranks, "equal up to rounding"),
            ("layout", before.layout, now.layout, "equal up to rounding"),
        )
        if old and old != new
    ]
    if rows:
        logger.warning("this run differs from the one that wrote the checkpoint, and its own settings hold:")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for path, old, new, effect in rows:
        logger.warning("  %-*s  %*s -> %-*s  %s", widths[0], path, widths[1], old, widths[2], new, effect)
    if before.global_batch and before.global_batch != now.global_batch:
        logger.warning(
            "the global batch is %d samples and was %d: the steps ahead differ from those of the unbroken "
            "run; to keep it, make per_device_train_batch_size x gradient_accumulation_steps x "
            "data-parallel ranks the same",
            now.global_batch, before.global_batch,
        )  # fmt: skip


def data_differences(before: RunFacts, now: RunFacts) -> list[str]:
    """The settings that make the samples or their order and differ: ``section.key old -> new``."""
    patterns = ("data.*", "training.seed", "training.stage", "model.tokenizer_name_or_path")
    return [
        f"{path} {old} -> {new}"
        for path, old, new in _changed(before, now)
        if _is_one_of(path, patterns) and effect_of(path)
    ]


def effect_of(path: str) -> str:
    """What a difference in a setting does; "" for one that is of no interest."""
    return next(effect for patterns, effect in _EFFECTS if _is_one_of(path, patterns.split()))


def changes_the_outcome(before: RunFacts, now: RunFacts) -> bool:
    """Whether a difference in the settings may give the run another number of steps, other data or another
    export: all but those that only decide what is kept and told.
    """
    of_the_export = ("training.export_dtype", "training.load_best_model_at_end")
    return any(
        before.config.get(path) != value and (effect_of(path) not in ("", _KEPT) or path in of_the_export)
        for path, value in now.config.items()
    )


def check_schedule(before: RunFacts, now: RunFacts, schedule: Schedule, step: int, *, force: bool) -> None:
    """Compare the learning rate after ``step`` with what the checkpoint's run would have used.

    Other values of ``lr`` and ``min_lr`` are meant to change it; the course is compared with the new ones.
    Where only the number of samples in a step has changed, the jump is told and not refused.

    Raises:
        UserError: the rate would jump, because a setting of the schedule is another, and it is not forced.
    """
    if before.schedule is None or step >= schedule.total:
        return
    old = replace(Schedule(**before.schedule), lr=schedule.lr, min_lr=schedule.min_lr)
    was, will = old.lr_at(step + 1), schedule.lr_at(step + 1)
    if abs(was - will) <= _JUMP * schedule.lr:
        return
    jump = f"the learning rate of step {step + 1} is {will:.3g} and was to be {was:.3g}"
    changed = [
        f"{path} {new} (was {old})" for path, old, new in _changed(before, now) if _is_one_of(path, _SCHEDULE)
    ]
    if force or not changed:
        logger.warning("the schedule jumps: %s", jump)
        return
    raise UserError(
        f"training.resume_from_checkpoint: with {', '.join(changed)} the schedule would jump: {jump}. "
        "Take the checkpoint's value, or set training.resume_force: true"
    )


def _changed(before: RunFacts, now: RunFacts) -> list[tuple[str, str, str]]:
    """(setting, old, new) of those that both runs tell and that differ, as they are shown."""
    return [
        (path, _show(before.config[path]), _show(value))
        for path, value in now.config.items()
        if path in before.config and before.config[path] != value
    ]


def _is_one_of(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
