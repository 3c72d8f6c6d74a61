"""What a run tells of itself before its first step: its settings, its data, the space for its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from shardyard.checkpoint import Space
from shardyard.config import Loaded, TrainingConfig
from shardyard.config.layout import Layout
from shardyard.config.resolved import format_table
from shardyard.data.build import RunData
from shardyard.device import Device, ProcessGroup
from shardyard.optim import group_lines, group_parameters
from shardyard.parallel import Meshes
from shardyard.parallel.pipeline import PipelineModel

logger = logging.getLogger("shardyard.train")

_ALWAYS_SHOWN = {
    "model.model_name_or_path", "data.dataset", "data.template", "data.cutoff_len", "parallel.param_dtype",
    "parallel.recompute", "training.lr", "training.num_train_epochs", "training.max_steps", "training.seed",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.output_dir",
}  # fmt: skip


def report_config(loaded: Loaded, layout: Layout, device: Device) -> None:
    """What was set, with its origin, and what everyone asks for; every other value is a default."""
    for warning in loaded.warnings:
        logger.warning(warning)
    was_set = {path for path, origin in loaded.origins.items() if str(origin) != "default"}
    for line in format_table(loaded.config, loaded.origins, was_set | _ALWAYS_SHOWN).splitlines():
        logger.info(line)
    logger.info("all settings with their origins: %s/resolved_config.yaml", loaded.config.training.output_dir)
    logger.info("%d rank(s) on %s: %s", layout.world_size, device.type, layout)


def data_lines(data: RunData) -> list[str]:
    """What became of the input, data set by data set, and one sample for the eye."""
    lines = []
    several = len(data.parts) > 1
    for part in data.parts:
        lines += [f"data set {part.name}:", *(part.report.lines() if several else ())]
    lines += ["all data sets:"] if several else []
    lines += data.report.lines()
    lines += [f"validation set {held_out.name}: {len(held_out.samples)} samples" for held_out in data.evals]
    return [*lines, "training example (trained part in [[ ]]):", *data.preview.text.splitlines()]


def group_report(
    model: nn.Module, training: TrainingConfig, meshes: Meshes, group: ProcessGroup
) -> list[str]:
    """What each of ``training.parameter_groups`` trains, over all stages; every rank calls it."""
    if training.parameter_groups is None:
        return []
    groups = group_parameters(model, training)
    leads_stage = group.rank % (meshes.layout.world_size // meshes.layout.pp) == 0
    # A tied weight lies on the first and the last stage, under one name.
    twice = model.whole.tied.values() if isinstance(model, PipelineModel) and not model.holds_first else ()
    counts: list[float] = []
    for own in groups:
        counted = [p for name, p in own.named if leads_stage and name not in twice]
        counts += [len(counted), sum(p.numel() for p in counted)]
    total = group.gather(counts).sum(0).view(-1, 2).tolist()
    return ["parameter groups, the first that matches:", *group_lines(groups, total)]


def log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)


def report_space(space: Space) -> None:
    logger.info("%s", space)
    if space.warning:
        logger.warning("%s", space.warning)
