"""One training run in this process, from a checked config to an exported model."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardyard.checkpoint import CheckpointStore, background_group, check_exportable, read_weights
from shardyard.checkpoint.in_use import held, refuse_if_in_use
from shardyard.checkpoint.state import prepare_optimizer
from shardyard.config import Config, Loaded
from shardyard.config.layout import Layout, layout_of
from shardyard.data.batches import BatchLoader
from shardyard.data.build import RunData, build_run_data, longest_unit
from shardyard.data.cut import Cut, tell_of_long_units
from shardyard.data.fit import check_fit
from shardyard.data.leader import Role
from shardyard.data.sampler import Sampler
from shardyard.data.templates import build_template
from shardyard.data.tokenizer import load_tokenizer
from shardyard.device import (
    Device,
    ProcessGroup,
    agree,
    agree_on_node,
    copy_stream,
    detect_device,
    local_ranks,
    start_process_group,
)
from shardyard.errors import EXIT_SAVED, UserError
from shardyard.evaluate.evaluator import Evaluator
from shardyard.models import (
    BuiltModel,
    Convert,
    LossOptions,
    Placement,
    build_model,
    load_model_config,
    read_ahead,
    resolve_source,
    tokenizer_options,
)
from shardyard.models.table import startup_table
from shardyard.monitor import Monitor, log_run_start
from shardyard.ops.table import operator_lines
from shardyard.optim import Schedule, build_optimizer, state_bytes_here
from shardyard.parallel import (
    Compilation,
    Meshes,
    RoutingOptions,
    build_meshes,
    build_routing,
    check_compiler,
)
from shardyard.train.differences import RunFacts, check_schedule
from shardyard.train.exporting import Exporter, named_template
from shardyard.train.reports import data_lines, group_report, log_lines, report_config, report_space
from shardyard.train.resume import restore
from shardyard.train.run_folder import (
    claim_output_dir,
    give_back_output_dir,
    goes_on_from_latest,
    look_at_output_dir,
    nothing_left,
)
from shardyard.train.same_settings import refuse_different_settings
from shardyard.train.saving import Saver
from shardyard.train.scaler import LossScaler
from shardyard.train.state import RunState
from shardyard.train.step import TrainStep
from shardyard.train.trainer import Observer, Trainer

if TYPE_CHECKING:
    from shardyard.evaluate.in_training import BenchmarksInTraining

logger = logging.getLogger("shardyard.train")


def run(loaded: Loaded, *, observe: Observer | None = None, convert: Convert | None = None) -> int:
    """Train as ``loaded.config`` says; 0 when the run is complete, 75 when a signal stopped it after a save.

    ``observe`` is called on each rank before the first step, with None, and after each step with its record;
    ``convert`` makes a Hugging Face folder of a Megatron-core one that ``model.model_name_or_path`` names.

    Raises:
        UserError: a mistake that the user can mend, on every rank that sees it.
        NonFiniteError: the loss or gradient became NaN or Inf.
    """
    device = detect_device()
    group = start_process_group(device)
    try:
        code = _train(loaded, device, group, observe, convert)
    except UserError:
        group.leave_together()
        raise
    group.stop()
    return code


@dataclass(frozen=True)
class _Parts:
    """What a run is made of."""

    loaded: Loaded
    device: Device
    group: ProcessGroup
    meshes: Meshes
    data: RunData
    built: BuiltModel
    optimizer: torch.optim.Optimizer
    exporter: Exporter


@dataclass(frozen=True)
class _Start:
    """Where a run begins, and what its checkpoints will tell of it."""

    store: CheckpointStore
    state: RunState
    schedule: Schedule
    facts: RunFacts


def _train(
    loaded: Loaded,
    device: Device,
    group: ProcessGroup,
    observe: Observer | None,
    convert: Convert | None,
) -> int:
    started = time.perf_counter()
    config = loaded.config
    refuse_different_settings(config, group)
    layout = layout_of(config, group.world_size)
    device.set_deterministic(bool(config.training.deterministic))
    device.seed(config.training.seed)
    report_config(loaded, layout, device)
    check_compiler(_compilation(config), device)
    # One rank looks at the run folder and says what it found; it is written to when all else is known to be
    # right.
    output_dir = Path(config.training.output_dir)
    agree(group, "in use", lambda: refuse_if_in_use(output_dir))
    resume_from = agree(group, "output_dir", lambda: look_at_output_dir(config))
    if agree(group, "complete", lambda: nothing_left(config, resume_from, group.world_size)):
        exported = ", and its model is exported" if config.training.save_hf_weights else ""
        logger.info("nothing to do: %s is the end of this run%s", resume_from, exported)
        group.leave_together()  # no collective has waited for the others
        return 0
    parts = _build(loaded, layout, device, group, convert)
    trainer = _assemble(parts, _begin(parts, resume_from))
    trainer.observe = observe
    with held(output_dir, holds=group.is_main):
        code, steps = _train_and_export(parts, trainer)
    if code == 0:
        logger.info("Training completed in %.2fs, at step %d", time.perf_counter() - started, steps)
    return code


def _train_and_export(parts: _Parts, trainer: Trainer) -> tuple[int, int]:
    """The exit code, and the steps that are done."""
    state = trainer.train()
    if parts.data.stream is not None:
        report = parts.data.stream.store.report()
        log_lines(["what the stream has read, in whole windows:", *report.lines()])
    parts.data.close()
    trainer.monitor.close()
    if trainer.interrupted is not None:
        return EXIT_SAVED, state.step
    if parts.loaded.config.training.save_hf_weights:
        parts.exporter.finish(state.step, is_main=parts.group.is_main)
    return 0, state.step


def _build(
    loaded: Loaded, layout: Layout, device: Device, group: ProcessGroup, convert: Convert | None
) -> _Parts:
    config = loaded.config
    logger.info("> Building Tokenizer...")
    source = resolve_source(
        config.model, fetch_first=lambda fetch: agree_on_node(group, "model", fetch), convert=convert,
        cache=Path(config.training.output_dir).resolve().parent / ".converted",
    )  # fmt: skip
    model_config = load_model_config(config.model, source)
    tokenizer = load_tokenizer(tokenizer_options(config.model, source))
    if group.local_rank == 0 and not config.model.train_from_scratch:
        read_ahead(source.weights)
    logger.info("> Building DataFactory...")
    vocab_size = model_config.get_text_config().vocab_size
    data = _build_data(config, tokenizer, group, layout, vocab_size)
    if template := named_template(config):
        build_template(template, tokenizer)  # sets the tokenizer's eos, also when the cache had the samples
    check_fit((*data.parts, *data.eval_parts), model_config.get_text_config())
    logger.info("> Building FSDP2 Model...")
    meshes = build_meshes(layout, device.type)
    placement = Placement(
        config.parallel, meshes, device, _compilation(config), config.optimization,
        loss=LossOptions.of(config.training, config.optimization),
    )  # fmt: skip
    built = build_model(
        config.model, model_config, source, placement, seed=config.training.seed, read_weights=read_weights
    )
    options = RoutingOptions.of(config.training, config.optimization)
    built.model.routing = build_routing([built.model], meshes, options)
    logger.info("> Building Optimizer...")
    optimizer = build_optimizer(built.model, config.training, meshes)
    exporter = Exporter(config, built, tokenizer)
    log_lines(
        startup_table(
            built, meshes, group, exporter.dtype, config.training, state_bytes=state_bytes_here(optimizer)
        )
    )
    log_lines(group_report(built.model, config.training, meshes, group))
    log_lines(operator_lines(built.operators))
    if built.unpacked:
        logger.warning("each document gets a forward of its own: %s", built.unpacked)
    return _Parts(loaded, device, group, meshes, data, built, optimizer, exporter)


def _compilation(config: Config) -> Compilation:
    return Compilation(config.optimization.compile)


def _begin(parts: _Parts, resume_from: str) -> _Start:
    """The state to go on from, read into the model and the optimizer, and the schedule of what is left."""
    config, training = parts.loaded.config, parts.loaded.config.training
    group, sampler = parts.group, parts.data.sampler
    logger.info("> Building Checkpointer...")
    store = CheckpointStore(
        Path(training.output_dir), save_total_limit=training.save_total_limit,
        background=background_group if training.save_async else None,
    )  # fmt: skip
    facts = RunFacts.of(
        config, global_batch=sampler.global_batch, ranks=group.world_size, layout=str(parts.meshes.layout)
    )
    force = training.resume_force
    latest = agree(group, "latest", lambda: "yes" if goes_on_from_latest(config) else "")
    state, before = restore(
        store, resume_from, parts.built, parts.optimizer, parts.data.identity, facts, force=force,
        latest=bool(latest), sampler=sampler,
    )  # fmt: skip
    if config.parallel.param_dtype != "fp16":
        state = state.scaled(None)
    if training.save_hf_weights or training.export_steps:
        exporter = parts.exporter
        check_exportable(
            parts.built.model, source_dir=exporter.source_dir, tokenizer=exporter.tokenizer,
            save_dtype=exporter.save_dtype,
        )  # fmt: skip
    schedule = Schedule.of(training, sampler.last_step(cursor=state.cursor, step=state.step))
    if before is not None:
        check_schedule(before, facts, schedule, state.step, force=force)
        if state.step >= schedule.total:
            logger.info("nothing is left to train: all %d steps are done", state.step)
    return _Start(store, state, schedule, replace(facts, schedule=asdict(schedule)))


def _assemble(parts: _Parts, start: _Start) -> Trainer:
    training, built, sampler = parts.loaded.config.training, parts.built, parts.data.sampler
    meshes, state, schedule = parts.meshes, start.state, start.schedule
    # What stays is allocated before what comes and goes, or the gaps between cost memory of their own.
    prepare_optimizer(parts.optimizer)
    step = TrainStep(
        built.model, parts.optimizer, parts.group, parts.device, meshes=meshes,
        max_grad_norm=training.max_grad_norm, on_nonfinite=training.on_nonfinite,
        packed=built.unpacked is None, seed=training.seed, in_backward=training.optimizer_in_backward,
        scaler=LossScaler.of(training, parts.loaded.config.parallel, state.scale),
    )  # fmt: skip
    batches = BatchLoader(
        parts.data.samples, sampler, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size,
        per_device=training.per_device_train_batch_size, start_cursor=state.cursor, start_step=state.step,
        num_workers=training.dataloader_num_workers, prefetch_factor=training.dataloader_prefetch_factor,
        pin_memory=training.dataloader_pin_memory, persistent_workers=training.dataloader_persistent_workers,
        merge_packs=parts.data.merge_packs, cut=_cut(parts, pp=meshes.layout.pp),
        copies=copy_stream(parts.device),
    )  # fmt: skip
    evaluator, benchmarks = _evaluator(parts), _benchmarks(parts)
    agree(parts.group, "run folder", lambda: _claim(parts.loaded))
    if training.save_steps > 0 or training.save_epochs > 0:
        optimizer = None if training.save_only_model else parts.optimizer
        try:
            report_space(start.store.check_space(built.model, optimizer))
        except UserError:
            if parts.group.is_main:
                give_back_output_dir(parts.loaded.config)
            raise
    logger.info("> Building Monitor...")
    monitor = Monitor(
        Path(training.output_dir),
        logging_steps=training.logging_steps, log_throughput=training.log_throughput,
        log_cpu_memory=training.log_cpu_memory, is_main=parts.group.is_main, resume_step=state.step,
        evaluated_step=state.evaluated_step,
    )  # fmt: skip
    log_run_start(
        num_examples=sampler.units_per_epoch, num_epochs=_num_epochs(schedule, sampler),
        total_batch_size=sampler.global_batch,
        gradient_accumulation_steps=(
            training.gradient_accumulation_steps if training.max_tokens_per_micro_batch is None else None
        ),
        total_steps=schedule.total,
    )  # fmt: skip
    saver = Saver(
        start.store, training, sampler, built.model, parts.optimizer, asdict(start.facts), state.step,
        assets=parts.exporter.write_assets, export=parts.exporter.into,
    )  # fmt: skip
    return Trainer(
        step,
        batches,
        schedule,
        monitor,
        saver,
        training,
        sampler,
        state,
        evaluator=evaluator,
        benchmarks=benchmarks,
    )


def _claim(loaded: Loaded) -> str:
    """Make the run folder this run's own, unless another one has begun there meanwhile."""
    refuse_if_in_use(Path(loaded.config.training.output_dir))
    return claim_output_dir(loaded)


def _cut(parts: _Parts, *, pp: int = 1) -> Cut:
    built = parts.built
    hidden_size = built.model.config.get_text_config().hidden_size
    alone = built.unpacked is not None
    return Cut.of(parts.loaded.config.training, hidden_size=hidden_size, pp=pp, alone=alone)


def _evaluator(parts: _Parts) -> Evaluator | None:
    training, built = parts.loaded.config.training, parts.built
    rows = training.per_device_eval_batch_size
    if not parts.data.evals:
        return None
    return Evaluator(
        built.model, parts.group, parts.device, parts.data.evals, meshes=parts.meshes,
        per_device=rows or training.per_device_train_batch_size, packed=built.unpacked is None,
        cut=_cut(parts) if rows is None else None,
    )  # fmt: skip


def _benchmarks(parts: _Parts) -> BenchmarksInTraining | None:
    config, built = parts.loaded.config, parts.built
    if not config.evaluation.tasks:
        return None
    from shardyard.evaluate.in_training import BenchmarksInTraining  # it loads engines, of no use without

    return BenchmarksInTraining(
        built.model, parts.exporter.tokenizer, parts.group, parts.device, config,
        packed=built.unpacked is None,
    )  # fmt: skip


def _num_epochs(schedule: Schedule, sampler: Sampler) -> float | None:
    updates = sampler.updates_per_epoch
    return schedule.total / updates if updates else None


def _build_data(
    config: Config, tokenizer: Any, group: ProcessGroup, layout: Layout, vocab_size: int
) -> RunData:
    role, node = (
        Role.of(
            rank=group.rank, local_rank=group.local_rank, node_rank=group.node_rank,
            num_nodes=group.num_nodes, shared_file_system=shared,
        )
        for shared in (config.data.data_shared_file_system, False)
    )  # fmt: skip
    data = build_run_data(
        config, tokenizer, dp_size=layout.data_parallel, role=role, node=node, rendezvous=group,
        local_ranks=local_ranks(), vocab_size=vocab_size,
    )  # fmt: skip
    log_lines(data_lines(data))
    tell_of_long_units(longest_unit(config, data), config.training.max_tokens_per_micro_batch)
    return data
