"""Which layers tensor parallelism splits, and where a rank needs the whole sequence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from shardyard.config import ParallelConfig
from shardyard.config.families import SPLIT
from shardyard.errors import UserError
from shardyard.parallel.patterns import select
from shardyard.parallel.tensor.families import ADAPTERS, DROPOUT_OF_PARTIAL_SUMS, PER_HEAD

COLWISE, ROWWISE = "colwise", "rowwise"
_ATTENTION = "self_attn"


@dataclass
class Region:
    """A module whose input is the whole sequence: all but the names of its split layers, full names.

    Without split layers each rank computes the whole and keeps its slice of the output.
    """

    name: str
    colwise: list[str] = field(default_factory=list)
    rowwise: list[str] = field(default_factory=list)
    per_head: tuple[str, ...] = ()
    """The region's own parameters that are used in slices, one number per head."""

    @property
    def is_split(self) -> bool:
        return bool(self.colwise)


@dataclass(frozen=True)
class TensorPlan:
    """Regions in the model's order; names of embedding and head, None where a pipeline stage has none."""

    regions: list[Region]
    embedding: str | None
    head: str | None


def plan_tensor_parallel(model: PreTrainedModel, parallel: ParallelConfig) -> TensorPlan:
    """The model's own plan, what our adapters add to it, and the user's patterns on top.

    Raises:
        UserError: a family that was not measured, sizes that tp_size does not divide, a pattern that splits
            what cannot be split.
    """
    _refuse_unmeasured(model, parallel)
    styles = _styles(model)
    _check_patterns(model, parallel, styles)
    regions: dict[str, Region] = {}
    for name, _ in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if leaf == _ATTENTION:
            regions[name] = Region(name)
        style = styles.get(name)
        if style in (COLWISE, ROWWISE):
            region = regions.setdefault(parent, Region(parent))
            (region.colwise if style == COLWISE else region.rowwise).append(name)
    for region in regions.values():
        if region.is_split and region.name.endswith(_ATTENTION):
            region.per_head = PER_HEAD.get(model.config.model_type, ())
    plan = TensorPlan(list(regions.values()), *_vocabulary(model))
    _refuse_uneven(model, plan, parallel.tp_size)
    return plan


def _refuse_unmeasured(model: PreTrainedModel, parallel: ParallelConfig) -> None:
    config: Any = model.config
    key = f"parallel.tp_size: {parallel.tp_size}"
    if config.model_type not in SPLIT:
        raise UserError(
            f"{key} splits layers of families that were measured to give the same gradients, and "
            f"{config.model_type!r} is none of them ({', '.join(sorted(SPLIT))}); "
            "use parallel.fsdp_size instead"
        )
    for name in DROPOUT_OF_PARTIAL_SUMS:
        if getattr(config, name, None):
            raise UserError(
                f"{key} cannot drop the same elements on every rank; "
                f"set model.config_overrides: {{{name}: 0.0}}"
            )
    attention = str(config._attn_implementation)
    if attention in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys() and not attention.startswith("flash"):
        raise UserError(
            f"{key}: the attention {attention!r} takes a mask, which a rank would make from its own tokens "
            "only; leave model.attn_implementation out"
        )


def _styles(model: PreTrainedModel) -> dict[str, str]:
    """Full name of a module -> its style in the family's plan or in our adapter."""
    plan = {**(model.tp_plan or {}), **ADAPTERS.get(model.config.model_type, {})}
    names = {name: re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    return {name: plan[general] for name, general in names.items() if general in plan}


def _check_patterns(model: PreTrainedModel, parallel: ParallelConfig, styles: dict[str, str]) -> None:
    """Patterns that the user wrote may name what is split anyway; nothing else is known to be right."""
    linears = [name for name, module in model.named_modules() if _is_linear(module)]
    for key, style in (("tp_colwise", COLWISE), ("tp_rowwise", ROWWISE)):
        patterns = getattr(parallel, key)
        if patterns == type(parallel).model_fields[key].get_default(call_default_factory=True):
            continue
        for name in select(patterns, linears, key=f"parallel.{key}"):
            if styles.get(name) != style:
                generals = {re.sub(r"\d+", "{*}", n) for n, found in styles.items() if found == style}
                raise UserError(
                    f"parallel.{key}: {name} cannot be split so in a {model.config.model_type!r} model; "
                    f"name some of {', '.join(sorted(generals)) or 'nothing'}"
                )


def _is_linear(module: nn.Module) -> bool:
    """By what is asked of it: quantised layers are of other classes."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _vocabulary(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """Names of the embedding and of the head; a pipeline stage has an identity where it has none."""
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (
        names[embedding] if isinstance(embedding, nn.Embedding) else None,
        names[head] if head is not None and _is_linear(head) else None,
    )


def _refuse_uneven(model: PreTrainedModel, plan: TensorPlan, tp_size: int) -> None:
    """Each rank gets as many heads, inner features and words as every other."""
    config: Any = model.config
    sizes: dict[str, int] = {}
    if plan.embedding or plan.head:
        sizes["vocab_size"] = config.vocab_size
    for region in plan.regions:
        if region.is_split and region.name.endswith(_ATTENTION):
            sizes["num_attention_heads"] = config.num_attention_heads
            sizes["num_key_value_heads"] = config.num_key_value_heads
        for name in region.rowwise:
            layer: Any = model.get_submodule(name)
            sizes[f"the input of {name}"] = layer.in_features
    for name, size in sizes.items():
        if size % tp_size:
            raise UserError(
                f"parallel.tp_size: {tp_size} does not divide {size}, {name} of this {config.model_type!r} "
                f"model; sizes that do: {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
            )
