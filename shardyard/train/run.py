"""One training run in this process, from a checked config to an exported model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardyard.checkpoint import (
    CheckpointStore,
    check_exportable,
    export_dtype,
    export_hf,
    prepare_output_dir,
)
from shardyard.config import Config, Loaded
from shardyard.config.layout import Layout, resolve_layout
from shardyard.config.resolved import dump_yaml, format_table
from shardyard.data.batches import BatchLoader
from shardyard.data.build import TrainData, build_train_data
from shardyard.data.leader import Role
from shardyard.data.sampler import ElasticSampler
from shardyard.data.tokenizer import load_tokenizer
from shardyard.device import Device, ProcessGroup, detect_device, local_ranks, start_process_group
from shardyard.errors import UserError
from shardyard.models import BuiltModel, Placement, build_model, load_model_config, resolve_source
from shardyard.models.table import startup_table
from shardyard.monitor import Monitor, log_run_start
from shardyard.optim import Schedule, build_optimizer
from shardyard.parallel import Meshes, build_meshes
from shardyard.train.state import RunState
from shardyard.train.step import TrainStep
from shardyard.train.trainer import Observer, Trainer

logger = logging.getLogger("shardyard.train")


def run(loaded: Loaded, *, observe: Observer | None = None) -> int:
    """Train as ``loaded.config`` says; 0 when the run is complete.

    ``observe`` is called on each rank before the first step, with None, and after each step with its record.

    Raises:
        UserError: a mistake that the user can mend, on every rank that sees it.
        NonFiniteError: the loss or gradient became NaN or Inf.
    """
    device = detect_device()
    group = start_process_group(device)
    try:
        _train(loaded, device, group, observe)
    except UserError:
        group.leave_together()
        raise
    group.stop()
    return 0


def _train(loaded: Loaded, device: Device, group: ProcessGroup, observe: Observer | None) -> None:
    started = time.perf_counter()
    config = loaded.config
    layout = resolve_layout(config.parallel, group.world_size)
    device.set_deterministic(bool(config.training.deterministic))
    device.seed(config.training.seed)
    _report_config(loaded, layout, device)
    # One rank touches the run folder and says what it found; all end together when it must not be used.
    resume_from = _agree(group, "output_dir", lambda: _open_output_dir(config))
    _write_resolved(loaded, group)

    logger.info("> Building Tokenizer...")
    source = resolve_source(config.model, fetch_first=lambda fetch: _agree_on_node(group, "model", fetch))
    model_config = load_model_config(config.model, source)
    tokenizer = load_tokenizer(config.model)
    logger.info("> Building DataFactory...")
    data = _build_data(config, tokenizer, group)
    _check_vocabulary(data, model_config.get_text_config().vocab_size)
    logger.info("> Building FSDP2 Model...")
    meshes = build_meshes(layout, device.type)
    placement = Placement(config.parallel, meshes, device)
    built = build_model(config.model, model_config, source, placement, seed=config.training.seed)
    logger.info("> Building Optimizer...")
    optimizer = build_optimizer(built.model, config.training)
    dtype = export_dtype(built.model, _source_of(config, built))
    for line in startup_table(built, layout, optimizer, dtype):
        logger.info(line)
    if built.unpacked:
        logger.warning("each document gets a forward of its own: %s", built.unpacked)
    trainer = _assemble(config, data, built, optimizer, meshes, device, group, resume_from, tokenizer)
    trainer.observe = observe
    state = trainer.train()
    if config.training.save_hf_weights:
        _export(config, built, tokenizer)
    trainer.monitor.close()
    logger.info("Training completed in %.2fs (%d steps)", time.perf_counter() - started, state.step)


def _assemble(
    config: Config,
    data: TrainData,
    built: BuiltModel,
    optimizer: torch.optim.Optimizer,
    meshes: Meshes,
    device: Device,
    group: ProcessGroup,
    resume_from: str,
    tokenizer: Any,
) -> Trainer:
    training = config.training
    sampler = ElasticSampler(
        len(data.store),
        global_batch=training.per_device_train_batch_size
        * training.gradient_accumulation_steps
        * meshes.dp_size,
        seed=training.seed,
        shuffle=not training.disable_shuffling,
        drop_last=training.dataloader_drop_last,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
    )
    logger.info("> Building Checkpointer...")
    store = CheckpointStore(Path(training.output_dir), save_total_limit=training.save_total_limit)
    order = f"samples {data.store.manifest['key']}, seed {training.seed}, shuffled {sampler.shuffle}"
    state = _restore(store, resume_from, built, optimizer, order)
    if training.save_hf_weights:
        check_exportable(built.model, source_dir=_source_of(config, built), tokenizer=tokenizer)
    schedule = Schedule.of(training, sampler.last_step(cursor=state.cursor, step=state.step))
    step = TrainStep(
        built.model, optimizer, group, device, dp_size=meshes.dp_size, max_grad_norm=training.max_grad_norm,
        on_nonfinite=training.on_nonfinite, packed=built.unpacked is None, seed=training.seed,
    )  # fmt: skip
    batches = BatchLoader(
        data.store, sampler, dp_rank=meshes.dp_rank, dp_size=meshes.dp_size,
        per_device=training.per_device_train_batch_size, start_cursor=state.cursor, start_step=state.step,
        num_workers=training.dataloader_num_workers, prefetch_factor=training.dataloader_prefetch_factor,
        pin_memory=training.dataloader_pin_memory, persistent_workers=training.dataloader_persistent_workers,
    )  # fmt: skip
    logger.info("> Building Monitor...")
    monitor = Monitor(
        Path(training.output_dir),
        logging_steps=training.logging_steps, log_throughput=training.log_throughput,
        log_cpu_memory=training.log_cpu_memory, is_main=group.is_main, resume_step=state.step,
    )  # fmt: skip
    log_run_start(
        num_examples=len(data.store), num_epochs=training.num_train_epochs,
        total_batch_size=sampler.global_batch,
        gradient_accumulation_steps=training.gradient_accumulation_steps, total_steps=schedule.total,
    )  # fmt: skip
    return Trainer(
        step, batches, schedule, monitor, store, group, training, sampler, state, saved_at=state.step
    )


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


def _build_data(config: Config, tokenizer: Any, group: ProcessGroup) -> TrainData:
    role = Role.of(
        rank=group.rank, local_rank=group.local_rank, node_rank=group.node_rank, num_nodes=group.num_nodes,
        shared_file_system=config.data.data_shared_file_system,
    )  # fmt: skip
    data = build_train_data(config, tokenizer, role=role, rendezvous=group, local_ranks=local_ranks())
    for line in [
        *data.report.lines(),
        "training example (trained part in [[ ]]):",
        *data.preview_text.splitlines(),
    ]:
        logger.info(line)
    return data


def _check_vocabulary(data: TrainData, vocab_size: int) -> None:
    """An id without an embedding would crash a device kernel, or read another row."""
    largest = data.report.largest_id
    if largest >= vocab_size:
        raise UserError(
            f"model.tokenizer_name_or_path: the data holds token id {largest}, but the model's vocabulary "
            f"has "
            f"{vocab_size} entries; use the tokenizer that belongs to the model"
        )


def _open_output_dir(config: Config) -> str:
    """Where to resume from ("" for a new run); on global rank 0 only."""
    training = config.training
    output_dir = Path(training.output_dir)
    wanted = training.resume_from_checkpoint
    store = CheckpointStore(output_dir, save_total_limit=None)
    found = store.resolve(wanted) if wanted else None
    # A checkpoint of another run may begin this one, but not in a folder that holds a third.
    own = wanted == "latest" or (found is not None and found.resolve().parent == store.folder.resolve())
    inputs = [Path(config.model.model_name_or_path), *_dataset_paths(config.data.dataset)]
    prepare_output_dir(
        output_dir,
        resuming=own,
        overwrite=training.overwrite_output_dir,
        inputs=[p.expanduser() for p in inputs],
    )
    if wanted == "latest" and found is None:
        logger.info(
            "resume_from_checkpoint: latest, but %s holds no checkpoint yet: starting at step 0", output_dir
        )
    return str(found or "")


def _dataset_paths(dataset: Any) -> list[Path]:
    if isinstance(dataset, dict):
        dataset = dataset.get("file_name") or ()
    names = [dataset] if isinstance(dataset, str) else list(dataset or ())
    return [Path(name) for name in names]


def _write_resolved(loaded: Loaded, group: ProcessGroup) -> None:
    if group.is_main:
        path = Path(loaded.config.training.output_dir, "resolved_config.yaml")
        path.write_text(dump_yaml(loaded.config, loaded.origins), encoding="utf-8")


def _restore(
    store: CheckpointStore, path: str, built: BuiltModel, optimizer: torch.optim.Optimizer, order: str
) -> RunState:
    if not path:
        return RunState(order)
    restored = store.load(Path(path), model=built.model, optimizer=optimizer)
    state = RunState.from_json(restored.run_state)
    if not restored.has_optimizer:
        if store.folder.resolve() == Path(path).resolve().parent:
            raise UserError(
                f"training.resume_from_checkpoint: {path} holds weights only (training.save_only_model), so "
                f"training "
                "starts from step 0; name another training.output_dir for that, this one holds the steps so "
                "far"
            )
        logger.info("Loaded model weights only, starting training from step 0")
        return RunState(order)
    if state.data_order != order:
        raise UserError(
            f"training.resume_from_checkpoint: {path} counts its place in other data ({state.data_order}) "
            f"than this run "
            f"has ({order}). Resume with the data, data settings and seed of the checkpoint; to train on "
            f"other data, start "
            "a new run from the exported model."
        )
    logger.info("Load distributed checkpoint from %s successfully!", path)
    logger.info("Resuming from step %d, %d samples into the data", state.step, state.cursor)
    return state


def _source_of(config: Config, built: BuiltModel) -> Path | None:
    return None if config.model.train_from_scratch else built.source


def _export(config: Config, built: BuiltModel, tokenizer: Any) -> None:
    output_dir = config.training.output_dir
    report = export_hf(
        built.model,
        out_dir=Path(output_dir),
        source_dir=_source_of(config, built),
        tokenizer=tokenizer,
        save_dtype=None,
    )
    logger.info("Huggingface checkpoint saved at %s successfully! (%s)", output_dir, report)


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
