"""What single values cannot show: pairs that exclude each other, settings without effect, later features."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shardyard.config.data_rules import check_data, without_effect
from shardyard.config.evaluation_rules import check_evaluation
from shardyard.config.later import LATER
from shardyard.config.model_shape import ModelShape
from shardyard.config.parameter_groups import group_rules
from shardyard.config.schema import FIELDS, Config, get
from shardyard.config.sections.base import Switch
from shardyard.config.sections.parallel import RecomputeMode
from shardyard.config.source import Notes, Place
from shardyard.config.support import NEVER, pairs_in_use

SWITCHES = tuple(path for path, info in FIELDS.items() if info.annotation == Switch)
_CONSTANT = ("constant", "constant_with_warmup")
_DSA = ("use_sparse_flash_attn", "use_fused_lightning_indexer", "use_fused_lightning_indexer_loss")
_DSA_IDS = ("dsv32", "deepseek_v32", "deepseek_v4")


@dataclass(frozen=True)
class Checked:
    """A configuration with what its rules need: where its values were set, and where to report."""

    config: Config
    places: Mapping[str, Place]
    """``section.key`` of each value that the user set."""
    notes: Notes
    shape: ModelShape | None = None
    """The model's, when its config.json is on this machine."""

    def value(self, path: str) -> Any:
        return get(self.config, path)

    def changed(self, path: str) -> bool:
        """Whether the value differs from the default."""
        return self.value(path) != FIELDS[path].get_default()

    def fault(self, paths: tuple[str, ...], text: str) -> None:
        """Report at the first of ``paths`` that the user set, unless one of them has a fault already."""
        if not self.notes.faulty_paths().intersection(paths):
            shown = next((path for path in paths if path in self.places), paths[0])
            self.notes.fault(self.places.get(shown, Place()), shown, text.removeprefix(f"{shown} "))

    def warn(self, path: str, text: str) -> None:
        self.notes.warn(self.places.get(path), path, text)


@dataclass(frozen=True)
class Derived:
    """A default that follows another setting."""

    value: Any
    source: str


def apply_rules(checked: Checked) -> dict[str, Derived]:
    """Run every rule; faults and warnings go to ``checked.notes``.

    Returns:
        The defaults that follow another setting in this run.
    """
    _refuse_later(checked)
    _check_support(checked)
    check_data(checked)
    check_evaluation(checked)
    _check_run(checked)
    _check_memory(checked)
    _check_operators(checked)
    _warn_of_long_warmup(checked)
    _warn_without_effect(checked)
    return _derive(checked)


def _refuse_later(checked: Checked) -> None:
    for path, later in LATER.items():
        value = checked.value(path)
        default = FIELDS[path].get_default()
        if later.refuses(value, default):
            rest = "another value" if later.refused else f"its default, {show(default)}"
            checked.fault(
                (path,),
                f"{show(value)} asks for {later.feature} which comes with a later release; use {rest}",
            )


def _check_support(checked: Checked) -> None:
    for never in NEVER:
        value = checked.value(never.path)
        if never.refuses(value):
            checked.fault((never.path,), f"{show(value)} is refused: {never.reason}")
    for one, other, verdict in pairs_in_use(checked.config, checked.shape):
        if verdict.kind == "refused":
            text = f"{one.title} with {other.title} is refused: {verdict.reason}"
            checked.fault((one.key, other.key), text)
        elif verdict.kind == "no effect":
            checked.warn(one.key, f"has no effect: {verdict.reason}")
    dispatcher = checked.config.parallel.ep_dispatcher
    if dispatcher != "eager" and checked.config.parallel.ep_size > 1:
        checked.warn("parallel.ep_dispatcher", f"{dispatcher} is an operator of NPUs; eager is used")


def show(value: Any) -> str:
    """A value as one would write it in the YAML."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{', '.join(map(show, value))}]" if isinstance(value, tuple) else str(value)


def _check_run(checked: Checked) -> None:
    training = checked.config.training
    if training.max_steps == 0:
        checked.fault(
            ("training.max_steps",), "0 would train nothing; give a number of updates, or -1 for epochs"
        )
    if (
        training.warmup_steps is not None
        and training.warmup_ratio > 0
        and "training.warmup_ratio" in checked.places
    ):
        checked.fault(
            ("training.warmup_steps", "training.warmup_ratio"),
            "training.warmup_steps and training.warmup_ratio are both set; keep one",
        )
    decays = training.lr_scheduler_type not in _CONSTANT
    if decays and "training.min_lr" in checked.places and training.min_lr > training.lr:
        checked.fault(
            ("training.min_lr", "training.lr"),
            f"training.min_lr {training.min_lr:g} is above training.lr {training.lr:g}; lower it",
        )
    _check_parameter_groups(checked)
    _check_loss(checked)
    _check_saving(checked)
    _check_in_backward(checked)
    _check_low_bit(checked)
    resume = training.resume_from_checkpoint
    if training.overwrite_output_dir and resume is not None:
        inside = os.path.realpath(resume).startswith(os.path.realpath(training.output_dir) + os.sep)
        if resume == "latest" or inside:
            checked.fault(
                ("training.overwrite_output_dir", "training.resume_from_checkpoint"),
                "training.overwrite_output_dir would move away the run that training.resume_from_checkpoint "
                "goes on from; keep one",
            )


def _check_loss(checked: Checked) -> None:
    training, path = checked.config.training, "training.calculate_per_token_loss"
    if path in checked.places and not training.calculate_per_token_loss and training.stage == "pt":
        checked.warn(
            path,
            "false has no effect: the loss is a mean over the global batch's trained tokens, since a mean of "
            "the micro-batches' means would change with the way a batch is split",
        )


def _check_parameter_groups(checked: Checked) -> None:
    try:
        group_rules(checked.config.training)
    except ValueError as error:
        checked.fault(("training.parameter_groups",), str(error))


def _check_in_backward(checked: Checked) -> None:
    training = checked.config.training
    if training.optimizer_in_backward is not True:
        return
    key = "training.optimizer_in_backward"
    if training.max_grad_norm > 0:
        checked.fault(
            (key, "training.max_grad_norm"),
            f"true updates before the norm of all gradients is known, and training.max_grad_norm "
            f"{training.max_grad_norm:g} clips by it; set training.max_grad_norm: 0, or {key}: two_pass, "
            "which computes each step's forward and backward twice",
        )
    if checked.config.parallel.param_dtype == "fp16":
        checked.fault(
            (key, "parallel.param_dtype"),
            f"true updates before it is known whether a gradient has overflowed in fp16; set {key}: "
            "two_pass, or another parallel.param_dtype",
        )
    if training.on_nonfinite == "skip":
        checked.fault(
            (key, "training.on_nonfinite"),
            f"true updates before it is known whether all gradients are finite, so "
            f"training.on_nonfinite: skip cannot be kept; set {key}: two_pass, or on_nonfinite: stop",
        )


def _check_low_bit(checked: Checked) -> None:
    key = "training.optimizer_state_dtype"
    dtype = checked.config.training.optimizer_state_dtype
    if dtype in ("int8", "int4") and importlib.util.find_spec("torchao") is None:
        checked.fault(
            (key,),
            f"{dtype} needs torchao, which is not installed here: "
            "pip install -c constraints.txt 'shardyard[low_bit]'; bf16 needs nothing",
        )


def _check_saving(checked: Checked) -> None:
    training = checked.config.training
    every, saves = training.export_steps, training.save_steps
    if every and (saves <= 0 or every % saves):
        checked.fault(
            ("training.export_steps", "training.save_steps"),
            f"training.export_steps {every} is no multiple of training.save_steps {saves}, and an export "
            "stands beside a checkpoint; make it one, or set it to 0",
        )


def _check_memory(checked: Checked) -> None:
    parallel, training = checked.config.parallel, checked.config.training
    if parallel.reduce_dtype == "fp16" and parallel.param_dtype != "fp16":
        checked.fault(
            ("parallel.reduce_dtype",),
            "fp16 needs parallel.param_dtype: fp16, whose scale on the loss keeps gradients inside fp16's "
            "range; use bf16 or fp32",
        )
    if parallel.param_dtype == "fp16" and training.fp16_min_scale > training.fp16_initial_scale:
        checked.fault(
            ("training.fp16_min_scale", "training.fp16_initial_scale"),
            "training.fp16_min_scale is above training.fp16_initial_scale; lower it",
        )
    path, modes = "parallel.recompute_modules", get_args(RecomputeMode)
    for entry in checked.config.parallel.recompute_modules:
        if isinstance(entry, dict) and (entry.keys() != {"pattern", "mode"} or entry["mode"] not in modes):
            wanted = f"{{pattern: ..., mode: {' | '.join(modes)}}}"
            checked.fault((path,), f"{entry} is no entry; write a pattern, or {wanted}")


def _check_operators(checked: Checked) -> None:
    optimization = checked.config.optimization
    model_id = checked.config.model.model_id or ""
    if optimization.use_flash_gdn is True and optimization.use_triton_gdn is True:
        checked.fault(
            ("optimization.use_flash_gdn", "optimization.use_triton_gdn"),
            "optimization.use_flash_gdn and optimization.use_triton_gdn exclude each other; keep one",
        )
    families = {f"optimization.{key}": (*_DSA_IDS, "glm5...") for key in _DSA}
    families |= {f"optimization.use_{key}": ("deepseek_v4",) for key in ("ascend_mhc", "triton_swiglu_limit")}
    for path in SWITCHES:
        if checked.value(path) is not True:
            continue
        ids = families.get(path, (model_id,))
        if model_id in ids or ("glm5..." in ids and model_id.startswith("glm5")):
            checked.warn(path, "no fused kernel of it is here yet; the family's own code runs")
        else:
            checked.fault(
                (path, "model.model_id"), f"is for model.model_id {', '.join(ids)} only; leave it at auto"
            )


_NO_EFFECT: tuple[tuple[Callable[[Config], bool], str, tuple[str, ...]], ...] = (
    (
        lambda config: config.parallel.recompute_mode == "none",
        "parallel.recompute is false",
        ("parallel.recompute_modules",),
    ),
    (
        lambda config: "selective" not in config.parallel.recompute_modes,
        "no module recomputes selectively (parallel.recompute: selective)",
        ("parallel.recompute_operators",),
    ),
    (
        lambda config: not config.parallel.activation_offload,
        "parallel.activation_offload is false",
        ("parallel.activation_offload_modules",),
    ),
    (
        lambda config: config.parallel.param_dtype != "fp16",
        "parallel.param_dtype is not fp16",
        tuple(path for path in FIELDS if path.startswith("training.fp16_")),
    ),
    (
        lambda config: config.parallel.cp_size == 1,
        "parallel.cp_size is 1",
        ("parallel.cp_type",),
    ),
    (
        lambda config: config.parallel.ep_size == 1,
        "parallel.ep_size is 1",
        ("parallel.ep_modules", "parallel.ep_dispatcher"),
    ),
    (
        lambda config: config.parallel.ep_size == 1 and config.parallel.tp_size == 1,
        "parallel.ep_size and parallel.tp_size are 1",
        ("parallel.ep_fsdp_modules",),
    ),
    (
        lambda config: config.parallel.pp_size == 1,
        "parallel.pp_size is 1",
        ("parallel.pp_schedule", "parallel.pp_stages_per_rank", "parallel.pp_layers_per_stage"),
    ),
    (
        lambda config: config.parallel.tp_size == 1,
        "parallel.tp_size is 1",
        ("parallel.tp_colwise", "parallel.tp_rowwise"),
    ),
    (
        lambda config: not config.parallel.enable_chunk_batch,
        "parallel.enable_chunk_batch is false",
        tuple(path for path in FIELDS if path.startswith("parallel.chunk_mbs")),
    ),
    (
        lambda config: not config.training.profile,
        "training.profile is false",
        tuple(path for path in FIELDS if path.startswith("training.profile_")),
    ),
    (
        lambda config: config.training.dataloader_num_workers == 0,
        "training.dataloader_num_workers is 0",
        ("training.dataloader_prefetch_factor", "training.dataloader_persistent_workers"),
    ),
    (
        lambda config: config.training.lr_scheduler_type in _CONSTANT,
        "training.lr_scheduler_type is constant",
        ("training.min_lr",),
    ),
    (
        lambda config: config.training.lr_scheduler_type not in ("wsd", "warmup_stable_decay"),
        "training.lr_scheduler_type is not wsd",
        ("training.lr_wsd_decay_ratio", "training.lr_wsd_decay_style"),
    ),
    (
        lambda config: config.training.lr_scheduler_type != "cosine_with_restarts",
        "training.lr_scheduler_type is not cosine_with_restarts",
        ("training.lr_num_cycles",),
    ),
    (
        lambda config: config.training.lr_scheduler_type != "polynomial",
        "training.lr_scheduler_type is not polynomial",
        ("training.lr_power",),
    ),
    (
        lambda config: config.training.optimizer != "muon",
        "training.optimizer is not muon",
        tuple(path for path in FIELDS if path.startswith("training.muon_")),
    ),
    (
        lambda config: config.training.optimizer != "lion",
        "training.optimizer is not lion",
        ("training.lion_beta1", "training.lion_beta2"),
    ),
    (
        lambda config: config.training.optimizer == "lion",
        "training.optimizer is lion",
        ("training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"),
    ),
    (
        lambda config: not config.training.save_hf_weights and not config.training.export_steps,
        "nothing is exported (training.save_hf_weights, training.export_steps)",
        ("training.export_dtype",),
    ),
    (
        lambda config: config.training.resume_from_checkpoint is None,
        "training.resume_from_checkpoint is null",
        ("training.resume_force",),
    ),
    (
        lambda config: not config.data.streaming,
        "data.streaming is false",
        ("data.buffer_size",),
    ),
)
"""(condition, the condition in words, settings that then do nothing)."""


def _warn_of_long_warmup(checked: Checked) -> None:
    training = checked.config.training
    warmup, updates = training.warmup_steps, training.max_steps
    if warmup is None or not 0 < updates <= warmup:
        return
    outcome = (
        f"the rate only reaches {updates}/{warmup} of training.lr"
        if warmup > updates
        else "the rate reaches training.lr in the last update only"
    )
    checked.warn(
        "training.warmup_steps", f"{warmup} with training.max_steps {updates}: {outcome}; lower warmup_steps"
    )


def _warn_without_effect(checked: Checked) -> None:
    if not checked.config.data.ignore_pad_token_for_loss:
        checked.warn("data.ignore_pad_token_for_loss", "false has no effect: batches hold no padding tokens")
    idle = {reason: paths for holds, reason, paths in _NO_EFFECT if holds(checked.config)}
    idle |= without_effect(checked.config.training.stage, checked.config.data.data_manager_type)
    for reason, paths in idle.items():
        for path in filter(checked.changed, paths):
            checked.warn(path, f"has no effect while {reason}")


def _derive(checked: Checked) -> dict[str, Derived]:
    training = checked.config.training
    derived: dict[str, Derived] = {}
    if training.warmup_steps is not None and "training.warmup_ratio" not in checked.places:
        derived["training.warmup_ratio"] = Derived(0.0, "training.warmup_steps")
    decays = training.lr_scheduler_type not in _CONSTANT
    if decays and training.min_lr > training.lr and "training.min_lr" not in checked.places:
        derived["training.min_lr"] = Derived(training.lr, "training.lr")
        checked.warn(
            "training.min_lr",
            f"the default {training.min_lr:g} is above training.lr {training.lr:g}; training.lr is used",
        )
    return derived
