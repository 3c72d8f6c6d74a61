"""Which features go together: one table, read by the checker and printed into docs/parallelism.md.

A pair that is not in ``EXCEPTIONS`` works. To open or close one, change its line there. What only the built
model shows (which modules a pattern names) is refused where it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardyard.config.families import PACKED
from shardyard.config.model_shape import ModelShape
from shardyard.config.schema import FIELDS, Config
from shardyard.config.sections.parallel import LAYERS
from shardyard.errors import UserError


@dataclass(frozen=True)
class Feature:
    """Something a run can use: the setting that asks for it, and whether a run does."""

    title: str
    key: str
    used: Callable[[Config, ModelShape | None], bool]


def _cp(kind: str) -> Callable[[Config, ModelShape | None], bool]:
    return lambda config, _: config.parallel.cp_size > 1 and config.parallel.cp_type == kind


def _validates(config: Config, _: ModelShape | None) -> bool:
    data = config.data
    return bool(data.eval_dataset or data.val_size or data.split != FIELDS["data.split"].default)


BUILT_IN_ATTENTION = "shardyard_documents"
"""The attention that a null model.attn_implementation stands for (shardyard/ops/attention.py)."""

FEATURES: dict[str, Feature] = {
    "tp": Feature("tensor parallelism", "parallel.tp_size", lambda c, _: c.parallel.tp_size > 1),
    "pp": Feature("pipeline parallelism", "parallel.pp_size", lambda c, _: c.parallel.pp_size > 1),
    "ep": Feature("expert parallelism", "parallel.ep_size", lambda c, _: c.parallel.ep_size > 1),
    "cp-ulysses": Feature("context parallelism: ulysses", "parallel.cp_type", _cp("ulysses")),
    "cp-ring": Feature("context parallelism: ring", "parallel.cp_type", _cp("ring")),
    "cp-kvallgather": Feature("context parallelism: kvallgather", "parallel.cp_type", _cp("kvallgather")),
    # Whether there are replicas is known with the number of ranks only: see refuse_pairs_of_replicas.
    "hsdp": Feature("replicas (HSDP)", "parallel.fsdp_size", lambda *_: False),
    "ignored_modules": Feature(
        "ignored_modules", "parallel.ignored_modules", lambda c, _: bool(c.parallel.ignored_modules)
    ),
    "activation_offload": Feature(
        "activation_offload", "parallel.activation_offload", lambda c, _: c.parallel.activation_offload
    ),
    "cpu_offload": Feature("cpu_offload", "parallel.cpu_offload", lambda c, _: c.parallel.cpu_offload),
    "recompute": Feature(
        "recompute: full", "parallel.recompute", lambda c, _: "full" in c.parallel.recompute_modes
    ),
    "recompute_selective": Feature(
        "recompute: selective", "parallel.recompute", lambda c, _: "selective" in c.parallel.recompute_modes
    ),
    "accumulation": Feature(
        "gradient accumulation",
        "training.gradient_accumulation_steps",
        lambda c, _: c.training.gradient_accumulation_steps > 1,
    ),
    "token_budget": Feature(
        "max_tokens_per_micro_batch",
        "training.max_tokens_per_micro_batch",
        lambda c, _: c.training.max_tokens_per_micro_batch is not None,
    ),
    "group_by_length": Feature(
        "group_by_length", "training.group_by_length", lambda c, _: c.training.group_by_length is True
    ),
    "packing": Feature("packing", "data.packing", lambda c, _: bool(c.data.packing or c.data.neat_packing)),
    "cross_document_attention": Feature(
        "cross_document_attention",
        "data.cross_document_attention",
        lambda c, _: c.data.cross_document_attention,
    ),
    "streaming": Feature("streaming", "data.streaming", lambda c, _: c.data.streaming),
    "megatron": Feature(
        "Megatron's windows", "data.index_compat", lambda c, _: c.data.index_compat is not None
    ),
    "enable_chunk_batch": Feature(
        "enable_chunk_batch", "parallel.enable_chunk_batch", lambda c, _: c.parallel.enable_chunk_batch
    ),
    "chunk_layers": Feature(
        "enable_chunk_batch of whole layers (the default chunk_mbs_modules)",
        "parallel.enable_chunk_batch",
        lambda c, _: c.parallel.enable_chunk_batch and c.parallel.chunk_mbs_modules == LAYERS,
    ),
    "compile": Feature("compile", "optimization.compile", lambda c, _: c.optimization.compile != "none"),
    "compile_model": Feature(
        "compile: model", "optimization.compile", lambda c, _: c.optimization.compile == "model"
    ),
    "freeze": Feature("freeze", "model.freeze", lambda c, _: bool(c.model.freeze)),
    "fix_router": Feature("fix_router", "optimization.fix_router", lambda c, _: c.optimization.fix_router),
    "router_aux_loss": Feature(
        "load-balancing loss",
        "training.router_aux_loss_coef",
        lambda c, _: c.training.router_aux_loss_coef > 0,
    ),
    "router_bias": Feature(
        "router bias updates",
        "training.router_bias_update_rate",
        lambda c, _: (c.training.router_bias_update_rate or 0) > 0,
    ),
    "shard_placement": Feature(
        "shard_placement_fn",
        "parallel.shard_placement_fn",
        lambda c, _: c.parallel.shard_placement_fn is not None,
    ),
    "no_reshard": Feature(
        "reshard_after_forward: false",
        "parallel.reshard_after_forward",
        lambda c, _: not c.parallel.reshard_after_forward,
    ),
    "reshard_to": Feature(
        "reshard_after_forward: a number",
        "parallel.reshard_after_forward",
        lambda c, _: c.parallel.reshards_to is not None,
    ),
    "chunk_loss": Feature(
        "chunk_loss_size",
        "optimization.chunk_loss_size",
        lambda c, _: c.optimization.chunk_loss_size is not None,
    ),
    "z_loss": Feature("z-loss", "training.z_loss_coef", lambda c, _: c.training.z_loss_coef > 0),
    "label_smoothing": Feature(
        "label smoothing", "training.label_smoothing", lambda c, _: c.training.label_smoothing > 0
    ),
    "small_states": Feature(
        "optimizer_state_dtype other than fp32",
        "training.optimizer_state_dtype",
        lambda c, _: c.training.optimizer_state_dtype != "fp32",
    ),
    "no_adamw": Feature(
        "an optimizer other than AdamW",
        "training.optimizer",
        lambda c, _: c.training.optimizer not in ("adamw", "fused_adamw"),
    ),
    "in_backward": Feature(
        "optimizer_in_backward",
        "training.optimizer_in_backward",
        lambda c, _: bool(c.training.optimizer_in_backward),
    ),
    "whole_optimizer": Feature(
        "Muon or Adam-mini", "training.optimizer", lambda c, _: c.training.optimizer in ("muon", "adam_mini")
    ),
    "fp16": Feature(
        "param_dtype: fp16", "parallel.param_dtype", lambda c, _: c.parallel.param_dtype == "fp16"
    ),
    "bf16_reduce": Feature(
        "reduce_dtype: bf16", "parallel.reduce_dtype", lambda c, _: c.parallel.reduce_dtype == "bf16"
    ),
    "parameter_groups": Feature(
        "parameter_groups",
        "training.parameter_groups",
        lambda c, _: c.training.parameter_groups is not None,
    ),
    "validation": Feature("validation", "data.eval_dataset", _validates),
    "best": Feature(
        "load_best_model_at_end",
        "training.load_best_model_at_end",
        lambda c, _: c.training.load_best_model_at_end,
    ),
    "attn_implementation": Feature(
        "an attn_implementation of transformers",
        "model.attn_implementation",
        lambda c, _: c.model.attn_implementation not in (None, BUILT_IN_ATTENTION),
    ),
    "attention_kernel": Feature(
        "use_flash_attn by name, other than lean",
        "optimization.use_flash_attn",
        lambda c, _: c.optimization.use_flash_attn not in ("auto", True, False, "lean"),
    ),
    "one_document": Feature(
        "one document per forward (families not measured to keep packed ones apart)",
        "model.model_name_or_path",
        lambda _, shape: shape is not None and shape.model_type not in PACKED,
    ),
    "sliding_window": Feature(
        "models with sliding windows",
        "model.model_name_or_path",
        lambda _, shape: shape is not None and shape.sliding_window,
    ),
    "attention_dropout": Feature(
        "models with attention dropout",
        "model.model_name_or_path",
        lambda _, shape: shape is not None and shape.attention_dropout > 0,
    ),
    "dense": Feature(
        "models without experts",
        "model.model_name_or_path",
        lambda _, shape: shape is not None and shape.layers is not None and not shape.experts,
    ),
}

AXES = ("tp", "pp", "ep", "cp-ulysses", "cp-ring", "cp-kvallgather", "hsdp")
"""The columns of the matrix."""


@dataclass(frozen=True)
class Verdict:
    """Why a pair does not simply work."""

    kind: Literal["refused", "refused by a layout rule", "in part", "no effect"]
    """``in part``: for some modules, which is seen when the model is built."""
    reason: str


_PIECES = Verdict(
    "refused",
    "pieces are cut at the ends of documents, which a rank's slice of the sequence does not respect",
)
_ALONE = Verdict(
    "refused",
    "the parts of a sequence meet in the attention that keeps documents apart; this family does not use it",
)
_FOREIGN = Verdict(
    "refused",
    "only the built-in attention knows which part of a sequence a rank has; leave attn_implementation out",
)
_MERGED = Verdict(
    "refused",
    "blocks of one softmax are merged, for which the built-in kernel is; take auto, or cp_type ulysses",
)
_DROPOUT = Verdict("refused", "blocks of one softmax would drop different weights; use cp_type ulysses")
_KEPT_WHOLE = (
    "the gradients of all micro-batches are added up, whole, until the last one, so nothing would be saved"
)
_NO_EXPERTS = Verdict("refused", "the model has no experts")

_SMALLER = Verdict(
    "refused",
    "the smaller groups are cut from the ranks of the whole run, and here units are shared by some of them; "
    "use true or false",
)

EXCEPTIONS: dict[tuple[str, str], Verdict] = {
    **{("reshard_to", axis): _SMALLER for axis in ("tp", "pp")},
    ("reshard_to", "shard_placement"): Verdict(
        "refused", "parameters have to be sharded by rows; use true or false, or leave shard_placement_fn out"
    ),
    **{
        (pieces, axis): _PIECES
        for pieces in ("enable_chunk_batch", "chunk_layers")
        for axis in ("tp", "cp-ulysses", "cp-ring", "cp-kvallgather")
    },
    ("one_document", "pp"): Verdict("refused", "the micro-batches of a pipeline have one length"),
    ("one_document", "cp-ulysses"): _ALONE,
    ("one_document", "cp-ring"): _ALONE,
    ("one_document", "cp-kvallgather"): _ALONE,
    **{("attn_implementation", axis): _FOREIGN for axis in ("tp", "cp-ulysses", "cp-ring", "cp-kvallgather")},
    ("attention_kernel", "cp-ring"): _MERGED,
    ("attention_kernel", "cp-kvallgather"): _MERGED,
    ("sliding_window", "cp-ring"): Verdict(
        "refused", "blocks of a ring would need a window's masks; use cp_type ulysses or kvallgather"
    ),
    ("attention_dropout", "cp-ring"): _DROPOUT,
    ("attention_dropout", "cp-kvallgather"): _DROPOUT,
    ("dense", "ep"): Verdict("refused by a layout rule", "the model has no experts"),
    ("fix_router", "dense"): _NO_EXPERTS,
    ("router_aux_loss", "dense"): _NO_EXPERTS,
    ("router_bias", "dense"): _NO_EXPERTS,
    ("chunk_layers", "ep"): Verdict(
        "refused",
        "ranks send tokens to experts in each piece, and their numbers of pieces differ; name modules beside "
        "the experts in parallel.chunk_mbs_modules, such as model.layers.{*}.self_attn",
    ),
    ("group_by_length", "token_budget"): Verdict(
        "no effect", "micro-batches by tokens are chosen by length already"
    ),
    ("token_budget", "one_document"): Verdict(
        "no effect",
        "each document has a forward of its own, so memory goes by the longest document",
    ),
    ("in_backward", "accumulation"): Verdict("refused", _KEPT_WHOLE),
    ("in_backward", "pp"): Verdict("refused", _KEPT_WHOLE),
    ("in_backward", "token_budget"): Verdict(
        "no effect", f"in steps of more than one micro-batch {_KEPT_WHOLE}"
    ),
    ("in_backward", "one_document"): Verdict(
        "no effect",
        "each document has a forward of its own, and the gradients of all are added up whole",
    ),
    ("in_backward", "whole_optimizer"): Verdict(
        "refused", "it steps many parameters together, over ranks; take adamw or lion"
    ),
    ("small_states", "no_adamw"): Verdict(
        "refused", "only AdamW's moments come in other types; the other optimizers' state is smaller as it is"
    ),
    ("compile", "tp"): Verdict(
        "refused",
        "a split layer swaps its parameters for this rank's part in Python, which no compiler can follow",
    ),
    ("compile", "enable_chunk_batch"): Verdict(
        "refused",
        "pieces are cut by the lengths of documents, which compiled code is not shown",
    ),
    ("compile", "activation_offload"): Verdict(
        "refused", "compiled code decides itself what it keeps, and this was not tried; take recompute: full"
    ),
    ("compile", "recompute_selective"): Verdict(
        "refused",
        "what to keep is chosen by operator, and compiled code has joined them; take recompute: full",
    ),
    ("compile_model", "recompute"): Verdict(
        "refused", "a layer that is computed again cannot be a part of a larger graph; take compile: block"
    ),
    ("compile_model", "pp"): Verdict(
        "refused", "a stage is called layer by layer anyway; take compile: block"
    ),
    ("enable_chunk_batch", "ignored_modules"): Verdict(
        "in part", "a module that runs in pieces may not hold one that stays whole"
    ),
    ("enable_chunk_batch", "one_document"): Verdict(
        "no effect", "each document has a forward of its own, which is one piece"
    ),
    ("ignored_modules", "ep"): Verdict("in part", "experts that ep splits cannot stay whole"),
}
"""(feature, feature or axis) -> why not; the reason is told at the first one's setting if that was set."""


@dataclass(frozen=True)
class Never:
    """Values of a setting that are refused for good, whatever else is set."""

    path: str
    values: tuple[Any, ...] | None
    """None refuses all but the default."""
    reason: str

    def refuses(self, value: object) -> bool:
        default = FIELDS[self.path].get_default()
        return value != default if self.values is None else value in self.values


NEVER: tuple[Never, ...] = (
    Never(
        "parallel.pp_schedule",
        ("zero_bubble", "zbv", "interleaved_zero_bubble", "dualpipe"),
        "zero-bubble schedules give wrong gradients with FSDP2, without a word (torch 2.13); "
        "use 1f1b or interleaved_1f1b",
    ),
    Never(
        "parallel.chunk_mbs_batch_dim",
        None,
        "rows of a micro-batch lie end to end in one sequence, and pieces are whole rows; leave it at 0",
    ),
    Never(
        "parallel.hook_modules",
        None,
        "each sharded unit carries its own hooks; choose the units by parallel.fsdp_modules",
    ),
)


def pairs_in_use(config: Config, shape: ModelShape | None) -> Iterator[tuple[Feature, Feature, Verdict]]:
    """The exceptions that a run meets."""
    used = {name for name, feature in FEATURES.items() if feature.used(config, shape)}
    for (one, other), verdict in EXCEPTIONS.items():
        if used.issuperset((one, other)):
            yield FEATURES[one], FEATURES[other], verdict


def refuse_pairs_of_replicas(config: Config, shape: ModelShape | None) -> None:
    """The pairs with hsdp, for a run that has replicas.

    Raises:
        UserError: one is refused.
    """
    for (one, other), verdict in EXCEPTIONS.items():
        if verdict.kind != "refused" or "hsdp" not in (one, other):
            continue
        feature = FEATURES[one if other == "hsdp" else other]
        if feature.used(config, shape):
            raise UserError(
                f"{feature.key}: {feature.title} with replicas (HSDP) is refused: {verdict.reason}"
            )


def verdict_of(one: str, other: str) -> Verdict | None:
    """The exception of a pair in either order; None if it works."""
    return EXCEPTIONS.get((one, other)) or EXCEPTIONS.get((other, one))
