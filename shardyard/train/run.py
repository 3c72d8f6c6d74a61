"""One training run in this process, from a checked config to an exported model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint import CheckpointStore, background_group, check_exportable, read_weights
from shardyard.config import Config, Loaded
from shardyard.config.layout import Layout, layout_of
from shardyard.config.resolved import format_table
from shardyard.data.batches import BatchLoader
from shardyard.data.build import RunData, build_run_data
from shardyard.data.leader import Role
from shardyard.data.sampler import Sampler
from shardyard.data.templates import build_template
from shardyard.data.tokenizer import load_tokenizer
from shardyard.device import (
    EXIT_SAVED,
    Device,
    ProcessGroup,
    detect_device,
    local_ranks,
    start_process_group,
)
from shardyard.errors import UserError
from shardyard.models import (
    BuiltModel,
    Convert,
    Placement,
    build_model,
    load_model_config,
    resolve_source,
    tokenizer_options,
)
from shardyard.models.table import startup_table
from shardyard.monitor import Monitor, log_run_start
from shardyard.optim import Schedule, build_optimizer
from shardyard.parallel import Meshes, RoutingOptions, build_meshes, build_routing
from shardyard.train.differences import RunFacts, check_schedule
from shardyard.train.evaluation import Evaluator
from shardyard.train.exporting import Exporter
from shardyard.train.resume import restore
from shardyard.train.run_folder import (
    claim_output_dir,
    goes_on_from_latest,
    look_at_output_dir,
    nothing_left,
)
from shardyard.train.same_settings import refuse_different_settings
from shardyard.train.step import TrainStep
from shardyard.train.trainer import Observer, Trainer

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
    _report_config(loaded, layout, device)
    # One rank looks at the run folder and says what it found; it is written to when all else is known to be
    # right.
    resume_from = _agree(group, "output_dir", lambda: look_at_output_dir(config))
    if _agree(group, "complete", lambda: nothing_left(config, resume_from, group.world_size)):
        logger.info("nothing to do: %s is the end of this run, and its model is exported", resume_from)
        return 0

    logger.info("> Building Tokenizer...")
    source = resolve_source(
        config.model, fetch_first=lambda fetch: _agree_on_node(group, "model", fetch), convert=convert,
        cache=Path(config.training.output_dir).resolve().parent / ".converted",
    )  # fmt: skip
    model_config = load_model_config(config.model, source)
    tokenizer = load_tokenizer(tokenizer_options(config.model, source))
    logger.info("> Building DataFactory...")
    vocab_size = model_config.get_text_config().vocab_size
    data = _build_data(config, tokenizer, group, layout, vocab_size)
    if template := _named_template(config):
        build_template(template, tokenizer)  # sets the tokenizer's eos, also when the cache had the samples
    _check_fit(data, model_config.get_text_config())
    logger.info("> Building FSDP2 Model...")
    meshes = build_meshes(layout, device.type)
    placement = Placement(config.parallel, meshes, device)
    built = build_model(
        config.model, model_config, source, placement, seed=config.training.seed, read_weights=read_weights
    )
    options = RoutingOptions.of(config.training, config.optimization)
    built.model.routing = build_routing([built.model], meshes, options)
    logger.info("> Building Optimizer...")
    optimizer = build_optimizer(built.model, config.training)
    exporter = Exporter(config, built, tokenizer)
    _log_lines(startup_table(built, meshes, group, optimizer, exporter.dtype))
    if built.unpacked:
        logger.warning("each document gets a forward of its own: %s", built.unpacked)
    trainer = _assemble(loaded, data, built, optimizer, meshes, device, group, resume_from, exporter)
    trainer.observe = observe
    state = trainer.train()
    if data.stream is not None:
        _log_lines(["what the stream has read, in whole windows:", *data.stream.store.report().lines()])
    data.close()
    trainer.monitor.close()
    if trainer.interrupted is not None:
        return EXIT_SAVED
    if config.training.save_hf_weights:
        exporter.finish(state.step, is_main=group.is_main)
    logger.info("Training completed in %.2fs (%d steps)", time.perf_counter() - started, state.step)
    return 0


def _assemble(
    loaded: Loaded,
    data: RunData,
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    meshes: Meshes,
    device: Device,
    group: ProcessGroup,
    resume_from: str,
    exporter: Exporter,
) -> Trainer:
    config, training = loaded.config, loaded.config.training
    sampler = data.sampler
    logger.info("> Building Checkpointer...")
    store = CheckpointStore(
        Path(training.output_dir), save_total_limit=training.save_total_limit,
        background=background_group if training.save_async else None,
    )  # fmt: skip
    facts = RunFacts.of(
        config, global_batch=sampler.global_batch, ranks=group.world_size, layout=str(meshes.layout)
    )
    force = training.resume_force
    latest = _agree(group, "latest", lambda: "yes" if goes_on_from_latest(config) else "")
    state, before = restore(
        store, resume_from, built, optimizer, data.identity, facts, force=force, latest=bool(latest)
    )
    if training.save_hf_weights or training.export_steps:
        check_exportable(
            built.model, source_dir=exporter.source_dir, tokenizer=exporter.tokenizer,
            save_dtype=exporter.save_dtype,
        )  # fmt: skip
    schedule = Schedule.of(training, sampler.last_step(cursor=state.cursor, step=state.step))
    if before is not None:
        check_schedule(before, facts, schedule, state.step, force=force)
        if state.step >= schedule.total:
            logger.info("nothing is left to train: all %d steps are done", state.step)
    facts = replace(facts, schedule=asdict(schedule))
    step = TrainStep(
        built.model, optimizer, group, device, meshes=meshes, max_grad_norm=training.max_grad_norm,
        on_nonfinite=training.on_nonfinite, packed=built.unpacked is None, seed=training.seed,
    )  # fmt: skip
    batches = BatchLoader(
        data.samples, sampler, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size,
        per_device=training.per_device_train_batch_size, start_cursor=state.cursor, start_step=state.step,
        num_workers=training.dataloader_num_workers, prefetch_factor=training.dataloader_prefetch_factor,
        pin_memory=training.dataloader_pin_memory, persistent_workers=training.dataloader_persistent_workers,
        merge_packs=data.merge_packs,
    )  # fmt: skip
    evaluator = _evaluator(config, data, built, meshes, device, group)
    _agree(group, "run folder", lambda: claim_output_dir(loaded))
    if training.save_steps > 0 or training.save_epochs > 0:
        space = store.check_space(built.model, None if training.save_only_model else optimizer)
        logger.info("%s", space)
        if space.warning:
            logger.warning("%s", space.warning)
    logger.info("> Building Monitor...")
    monitor = Monitor(
        Path(training.output_dir),
        logging_steps=training.logging_steps, log_throughput=training.log_throughput,
        log_cpu_memory=training.log_cpu_memory, is_main=group.is_main, resume_step=state.step,
        evaluated_step=state.evaluated_step,
    )  # fmt: skip
    log_run_start(
        num_examples=sampler.units_per_epoch, num_epochs=_num_epochs(schedule, sampler),
        total_batch_size=sampler.global_batch,
        gradient_accumulation_steps=training.gradient_accumulation_steps, total_steps=schedule.total,
    )  # fmt: skip
    return Trainer(
        step,
        batches,
        schedule,
        monitor,
        store,
        group,
        training,
        sampler,
        state,
        asdict(facts),
        saved_at=state.step,
        assets=exporter.write_assets,
        export=exporter.into,
        evaluator=evaluator,
    )


def _evaluator(
    config: Config, data: RunData, built: BuiltModel, meshes: Meshes, device: Device, group: ProcessGroup
) -> Evaluator | None:
    if not data.evals:
        return None
    training = config.training
    return Evaluator(
        built.model, group, device, data.evals, meshes=meshes,
        per_device=training.per_device_eval_batch_size or training.per_device_train_batch_size,
        packed=built.unpacked is None,
    )  # fmt: skip


_ALWAYS_SHOWN = {
    "model.model_name_or_path", "data.dataset", "data.template", "data.cutoff_len", "parallel.param_dtype",
    "parallel.recompute", "training.lr", "training.num_train_epochs", "training.max_steps", "training.seed",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.output_dir",
}  # fmt: skip


def _report_config(loaded: Loaded, layout: Layout, device: Device) -> None:
    """What was set, with its origin, and what everyone asks for; every other value is a default."""
    for warning in loaded.warnings:
        logger.warning(warning)
    was_set = {path for path, origin in loaded.origins.items() if str(origin) != "default"}
    for line in format_table(loaded.config, loaded.origins, was_set | _ALWAYS_SHOWN).splitlines():
        logger.info(line)
    logger.info("all settings with their origins: %s/resolved_config.yaml", loaded.config.training.output_dir)
    logger.info("%d rank(s) on %s: %s", layout.world_size, device.type, layout)


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
    _log_lines(_data_lines(data))
    return data


def _data_lines(data: RunData) -> list[str]:
    """What became of the input, data set by data set, and one sample for the eye."""
    lines = []
    several = len(data.parts) > 1
    for part in data.parts:
        lines += [f"data set {part.name}:", *(part.report.lines() if several else ())]
    lines += ["all data sets:"] if several else []
    lines += data.report.lines()
    lines += [f"validation set {held_out.name}: {len(held_out.samples)} samples" for held_out in data.evals]
    return [*lines, "training example (trained part in [[ ]]):", *data.preview.text.splitlines()]


def _log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)


def _check_fit(data: RunData, config: Any) -> None:
    """An id or a position without an embedding would crash a device kernel, or read another row."""
    for part in (*data.parts, *data.eval_parts):
        if part.report.largest_id >= config.vocab_size:
            raise UserError(
                f"model.tokenizer_name_or_path: {part.name} ({part.path}) holds token id "
                f"{part.report.largest_id}, but the model's vocabulary has {config.vocab_size} entries; use "
                "the tokenizer that belongs to the model"
            )
    longest = max(part.report.longest for part in (*data.parts, *data.eval_parts))
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or longest <= positions:
        return
    too_long = (
        f"data.cutoff_len: a sample has {longest} tokens, and the model was made for {positions} positions"
    )
    if getattr(config, "rope_parameters", None) is None:
        raise UserError(f"{too_long}; set data.cutoff_len to {positions} at most")
    logger.warning("%s; rotary positions go on beyond that, but were not trained there", too_long)


def _named_template(config: Config) -> str | None:
    return config.data.template if config.data.data_manager_type == "lf" else None


def _agree(group: ProcessGroup, what: str, work: Callable[[], str]) -> str:
    """What global rank 0's ``work`` returns, on every rank; its UserError is everyone's."""
    return _share(group, what, work, leads=group.is_main)


def _agree_on_node(group: ProcessGroup, what: str, work: Callable[[], str]) -> str:
    return _share(group, f"{what}/node{group.node_rank}", work, leads=group.local_rank == 0)


def _share(group: ProcessGroup, key: str, work: Callable[[], str], *, leads: bool) -> str:
    if not leads:
        verdict, value = group.wait(key)[:1], group.wait(key)[1:]
        if verdict == "!":
            raise UserError(value)
        return value
    try:
        value = work()
    except UserError as error:
        group.publish(key, f"!{error}")
        raise
    group.publish(key, f"={value}")
    return value
