"""Loss, perplexity and bits per byte of data sets, by model, data path and layout of a training.

What is built is what a run builds before its first step, without optimizer. So the loss is, to the last
digit, that of a validation of the run, by the same ranks, of the same weights.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.checkpoint import read_weights
from shardyard.config import Config
from shardyard.config.layout import Layout, layout_of
from shardyard.data.build import build_eval_sets, build_run_data
from shardyard.data.cut import Cut
from shardyard.data.eval_sets import EvalSet
from shardyard.data.fit import check_fit
from shardyard.data.leader import Role
from shardyard.data.parts import Part
from shardyard.data.templates import build_template
from shardyard.data.tokenizer import load_tokenizer
from shardyard.device import Device, ProcessGroup, agree_on_node, local_ranks
from shardyard.errors import UserError
from shardyard.evaluate.evaluator import Evaluator
from shardyard.evaluate.text_bytes import bytes_of_tokens, labelled_bytes
from shardyard.infer.opening import Found, cache_folder
from shardyard.models import (
    BuiltModel,
    Convert,
    LossOptions,
    Placement,
    build_model,
    load_model_config,
    resolve_source,
    tokenizer_options,
)
from shardyard.monitor import ALL_SETS, EvalResult, EvalScore
from shardyard.parallel import Compilation, Meshes, RoutingOptions, build_meshes, build_routing

logger = logging.getLogger("shardyard.evaluate")


@dataclass(frozen=True)
class SetLoss:
    """A set's scores; ``bytes`` is the UTF-8 text that its labelled tokens stand for."""

    score: EvalScore
    rows: int
    bytes: int

    @property
    def bits_per_byte(self) -> float | None:
        """None where the labelled tokens are no text."""
        return self.score.loss_sum / math.log(2) / self.bytes if self.bytes else None


@dataclass(frozen=True)
class DataLoss:
    """The sets by name; with several, "all" is their total."""

    sets: dict[str, SetLoss]
    result: EvalResult
    layout: str


def trained_weights(found: Found) -> str:
    """The folder to read: of a run its checkpoint, in fp32, rather than an export in a narrower dtype."""
    if found.run_dir is not None and found.step is not None:
        own = found.run_dir / "checkpoints" / f"global_step_{found.step}"
        if (own / ".metadata").is_file():
            return str(own)
    return found.weights


def score_data(
    config: Config, group: ProcessGroup, device: Device, *, convert: Convert | None = None
) -> DataLoss | None:
    """The scores of the validation sets of ``config``, or of its training data where it has none.

    All ranks call it; rank 0 gets the scores. On one rank, sizes of a layout of more are left out.

    Raises:
        UserError: a mistake in the settings or the data; a set without a labelled token.
    """
    config = _for_scoring(config, group.world_size)
    layout = layout_of(config, group.world_size)
    device.set_deterministic(bool(config.training.deterministic))
    device.seed(config.training.seed)
    source = resolve_source(
        config.model, fetch_first=lambda fetch: agree_on_node(group, "model", fetch), convert=convert,
        cache=cache_folder(),
    )  # fmt: skip
    model_config = load_model_config(config.model, source)
    tokenizer = load_tokenizer(tokenizer_options(config.model, source))
    logger.info("> Building DataFactory...")
    sets, parts = _build_sets(config, tokenizer, group, layout)
    if config.data.data_manager_type == "lf" and config.data.template:
        build_template(config.data.template, tokenizer)
    check_fit(parts, model_config.get_text_config())
    logger.info("> Building FSDP2 Model...")
    meshes = build_meshes(layout, device.type)
    placement = Placement(
        config.parallel, meshes, device, Compilation(config.optimization.compile), config.optimization,
        loss=LossOptions.of(config.training, config.optimization),
    )  # fmt: skip
    built = build_model(
        config.model, model_config, source, placement, seed=config.training.seed, read_weights=read_weights
    )
    options = RoutingOptions.of(config.training, config.optimization)
    built.model.routing = build_routing([built.model], meshes, options)
    evaluator = evaluator_of(config, built, group, device, sets, meshes)
    logger.info("> Scoring %s...", ", ".join(f"{one.name} ({len(one.samples)} rows)" for one in sets))
    result = evaluator.evaluate()
    return _with_bytes(result, sets, tokenizer, str(layout)) if group.is_main else None


def evaluator_of(
    config: Config,
    built: BuiltModel,
    group: ProcessGroup,
    device: Device,
    sets: tuple[EvalSet, ...],
    meshes: Meshes,
) -> Evaluator:
    """The run's own way to score validation sets."""
    training, alone = config.training, built.unpacked is not None
    rows = training.per_device_eval_batch_size
    hidden_size = built.model.config.get_text_config().hidden_size
    return Evaluator(
        built.model, group, device, sets, meshes=meshes,
        per_device=rows or training.per_device_train_batch_size, packed=not alone,
        cut=Cut.of(training, hidden_size=hidden_size, alone=alone) if rows is None else None,
    )  # fmt: skip


def _for_scoring(config: Config, world_size: int) -> Config:
    """``config`` without what is about training, and about ranks that are not there."""
    parallel = config.parallel
    if world_size == 1:
        fields = type(parallel).model_fields
        sizes = {key: field.get_default() for key, field in fields.items() if key.endswith("_size")}
        changed = [key for key, value in sizes.items() if getattr(parallel, key) != value]
        if changed:
            logger.info("on one rank: %s of the settings are left out", ", ".join(changed))
        parallel = parallel.model_copy(update=sizes)
    model = config.model.model_copy(update={"freeze": None})
    return config.model_copy(update={"parallel": parallel, "model": model})


def _build_sets(
    config: Config, tokenizer: Any, group: ProcessGroup, layout: Layout
) -> tuple[tuple[EvalSet, ...], tuple[Part, ...]]:
    data = config.data
    role = Role.of(
        rank=group.rank, local_rank=group.local_rank, node_rank=group.node_rank, num_nodes=group.num_nodes,
        shared_file_system=data.data_shared_file_system,
    )  # fmt: skip
    if not data.eval_dataset and data.dataset is not None:
        if data.val_size or _splits(config):
            run = build_run_data(
                config, tokenizer, dp_size=layout.data_parallel, role=role, rendezvous=group,
                local_ranks=local_ranks(),
            )  # fmt: skip
            return run.evals, run.parts
        logger.info("the settings have no validation data: scoring what is trained on, data.dataset")
        config = config.model_copy(update={"data": data.model_copy(update={"eval_dataset": data.dataset})})
    if not config.data.eval_dataset:
        raise UserError("--data: nothing to score; name a file, a folder or a data set")
    apart = config.data.model_copy(update={"eval_on_each_dataset": True})
    config = config.model_copy(update={"data": apart})
    return build_eval_sets(
        config, tokenizer, role=role, rendezvous=group, local_ranks=local_ranks()
    )  # fmt: skip


def _splits(config: Config) -> bool:
    from shardyard.config.data_rules import split_shares

    is_stream = config.data.data_manager_type == "mg" and config.training.stage == "pt"
    return is_stream and split_shares(config.data.split)[1] > 0


def _with_bytes(result: EvalResult, sets: tuple[EvalSet, ...], tokenizer: Any, layout: str) -> DataLoss:
    of_tokens = bytes_of_tokens(tokenizer)
    found = {
        one.name: SetLoss(result.sets[one.name], len(one.samples), labelled_bytes(one.samples, of_tokens))
        for one in sets
    }
    if len(found) > 1:
        members = list(found.values())
        found[ALL_SETS] = SetLoss(
            result.total, sum(one.rows for one in members), sum(one.bytes for one in members)
        )
    return DataLoss(found, result, layout)


def table(loss: DataLoss) -> list[str]:
    """A line a set."""
    from shardyard.evaluate.results import aligned

    rows = [("set", "", "loss", "perplexity", "bits/byte", "labelled tokens", "rows", "seconds")]
    for name, one in loss.sets.items():
        bits = "-" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}"
        score = one.score
        rows.append((name, "", f"{score.loss:.6f}", f"{score.perplexity:.4f}", bits, str(score.labelled),
                     str(one.rows), f"{score.seconds:.1f}"))  # fmt: skip
    return aligned(rows)


def as_json(loss: DataLoss) -> dict[str, Any]:
    """The sets, for the results' file; numbers that JSON lacks are null."""
    return {
        name: {
            "loss": _number(one.score.loss), "perplexity": _number(one.score.perplexity),
            "bits_per_byte": _number(one.bits_per_byte), "labelled_tokens": one.score.labelled,
            "tokens": one.score.tokens, "bytes": one.bytes, "rows": one.rows,
            "seconds": round(one.score.seconds, 3),
        }
        for name, one in loss.sets.items()
    }  # fmt: skip


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def metrics_path(found: Found) -> tuple[Path, int]:
    """The run's folder and the step of the model.

    Raises:
        UserError: it is not a checkpoint of a run.
    """
    if found.run_dir is None or found.step is None:
        raise UserError("--into-metrics: the model is not a checkpoint of a run")
    return found.run_dir, found.step
