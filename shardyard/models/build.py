"""config.json -> meta model -> parallelised -> weights, read shard by shard or drawn from the seed."""

from __future__ import annotations

import copy
import fnmatch
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from shardyard.config import Layout, ModelConfig
from shardyard.device import Device
from shardyard.errors import UserError, first_line
from shardyard.models import packing
from shardyard.models.block_fp8 import take_block_size
from shardyard.models.causal_lm import Placement, base_class, trainable_class
from shardyard.models.head import check_head, heads_of
from shardyard.models.source import ModelSource
from shardyard.models.weights import ReadWeights, from_files, from_seed, read_checkpoint, without_weights
from shardyard.ops.registry import EAGER, Row
from shardyard.parallel import Precision, matches
from shardyard.parallel.pipeline import (
    PipelineModel,
    Stage,
    check_hands_on,
    costs_of,
    describe_whole,
    parts_of,
    plan_stages,
)

logger = logging.getLogger("shardyard.models")

# fp32 differs by rounding only; bf16 rounds each activation to 8 bits.
_LEAK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class BuiltModel:
    """``model(input_ids, position_ids, labels, doc_lens)`` gives the loss sum; see models/causal_lm.py.

    ``source`` is the folder of its config.json. ``unpacked`` says why the documents of a micro-batch need a
    forward each; None when they share one. ``operators``: what runs for each operation.
    """

    model: Any
    config: PreTrainedConfig
    source: Path
    precision: Precision
    unpacked: str | None
    operators: tuple[Row, ...] = ()


def build_model(
    model_config: ModelConfig,
    config: PreTrainedConfig,
    source: Path | ModelSource,
    placement: Placement,
    *,
    seed: int,
    read_weights: ReadWeights | None = None,
) -> BuiltModel:
    """Build, parallelise and fill the model; ``read_weights`` reads those of a checkpoint folder.

    Raises:
        UserError: weights that are missing or do not fit the config, a family that cannot be trained here.
    """
    transformers_logging.disable_progress_bar()  # one bar a rank would run through each other
    source = ModelSource.of(source)
    stated_dtype = getattr(config, "dtype", None)
    block = take_block_size(config)
    base, config = base_class(config, str(source.config), trust_remote_code=model_config.trust_remote_code)
    refused = packing.refusal(config)
    attention = packing.attention_for(model_config.attn_implementation, config)
    _check_attention(model_config.attn_implementation, placement.device)
    if model_config.config_overrides or model_config.attn_implementation:
        _rehearse(base, config, attention)
    precision = Precision.of(placement.parallel, placement.device)

    checkpoint = source.form == "checkpoint" and not model_config.train_from_scratch

    def make(stage: Stage | None) -> PreTrainedModel:
        cls = trainable_class(base, placement, stage)
        if model_config.train_from_scratch:
            made = from_seed(cls, config, attention, placement, seed)
        elif checkpoint:
            made = without_weights(cls, config, attention, placement)
        else:
            made = from_files(
                cls, config, source.weights, attention, model_config, block, placement.distributed_config
            )
        made.config.dtype = stated_dtype  # building in fp32 set it; the export goes by what the model states
        return made

    model: Any = (
        make(None) if placement.meshes.layout.pp == 1 else _pipeline(base, config, attention, placement, make)
    )
    if checkpoint:
        read_checkpoint(model, source.weights, read_weights)
    device = placement.device.torch_device
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    _freeze(model, model_config.freeze or [])
    model.train()
    unpacked = refused or _self_test(model, config, precision, device)
    if unpacked:
        _refuse_sharing(unpacked, placement.meshes.layout)
    check_head(model, config, placement.loss, precision.compute, device, packed=unpacked is None)
    return BuiltModel(model, config, source.config, precision, unpacked, _operators(model))


def _refuse_sharing(unpacked: str, layout: Layout) -> None:
    """What a rank holds of a micro-batch under these axes is cut and padded between its documents."""
    for key in ("pp", "cp", "tp"):
        if getattr(layout, key) > 1:
            raise UserError(
                f"parallel.{key}_size: each document of this model needs a forward of its own ({unpacked}), "
                f"which does not go with micro-batches that ranks share; set {key}_size to 1"
            )


def _check_attention(name: str | None, device: Device) -> None:
    if name is None:
        return
    known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
    if name not in known:
        raise UserError(
            f"model.attn_implementation: {name!r} is unknown; transformers has {', '.join(known)}"
        )
    if name == "flex_attention" and not device.is_accelerator:
        raise UserError("model.attn_implementation: flex_attention has no backward pass on a CPU; use sdpa")


def _rehearse(base: type[PreTrainedModel], config: Any, attention: str | None) -> None:
    """What the user changed may be something that the family's code cannot build; found without weights."""
    try:
        with torch.device("meta"):
            base._from_config(copy.deepcopy(config), attn_implementation=attention)
    except Exception as error:
        raise UserError(
            "model.config_overrides, model.attn_implementation: the model cannot be built with these: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _pipeline(
    base: type[PreTrainedModel],
    config: Any,
    attention: str | None,
    placement: Placement,
    make: Callable[[Stage], PreTrainedModel],
) -> PipelineModel:
    """This rank's stages, cut where the parameters of the whole model say; that one exists on meta only."""
    with torch.device("meta"):
        whole = base._from_config(copy.deepcopy(config), attn_implementation=attention)
    plan, facts = plan_stages(placement.parallel, costs_of(whole)), describe_whole(whole)
    check_hands_on(whole)
    meshes = placement.meshes
    logger.info("pipeline over %d ranks, layers of each stage: %s", meshes.layout.pp, plan)
    return PipelineModel(
        [make(Stage(index, plan, facts)) for index in plan.stages_of(meshes.pp_rank)],
        placement.parallel,
        meshes.pp.get_group(),
        placement.device.torch_device,
        placement.sequence,
        Precision.of(placement.parallel, placement.device).compute,
    )


def _operators(model: Any) -> tuple[Row, ...]:
    """What runs in this rank's part of the model, its loss last where this rank has it."""
    rows: tuple[Row, ...] = parts_of(model)[0].operators
    for head in heads_of(model):
        runs = Row("loss", "lean", "logits of trained tokens only, in pieces, with their gradient")
        rows = (*rows, Row("loss", EAGER, head.unsuited) if head.unsuited else runs)
    return rows


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _freeze(model: Any, patterns: Sequence[str]) -> None:
    """Stop the training of parameters whose name, or whose module's name, a pattern matches.

    A tied parameter goes by all its names, and one of another pipeline stage counts as well.
    """
    if not patterns:
        return
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    everywhere = list(aliases.values())
    if isinstance(model, PipelineModel):
        everywhere = [model.whole.names_of(name) for name in model.whole.parameters]
    chosen = {name for names in everywhere if any(_names_one(p, names) for p in patterns) for name in names}
    for parameter, names in aliases.items():
        if chosen.intersection(names):
            parameter.requires_grad_(False)
    if unused := [
        p for p in dict.fromkeys(patterns) if not any(_names_one(p, names) for names in everywhere)
    ]:
        raise UserError(f"model.freeze: {', '.join(sorted(unused))} matches no parameter of this model")
    if all(chosen.intersection(names) for names in everywhere):
        raise UserError("model.freeze: the patterns freeze every parameter; nothing is left to train")


def _names_one(pattern: str, parameters: Iterable[str]) -> bool:
    """Whether ``pattern`` matches one of the parameters, or a module that holds it."""
    prefixes = (name.rsplit(".", cut)[0] for name in parameters for cut in range(name.count(".") + 1))
    return any(matches(pattern, prefix) or fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes)


def _self_test(model: Any, config: Any, precision: Precision, device: torch.device) -> str | None:
    vocab_size = config.get_text_config().vocab_size
    try:
        difference = packing.leak(model, vocab_size=vocab_size, device=device)
    except (TypeError, NotImplementedError, ValueError) as error:
        return f"the self-test of packed documents failed: {first_line(error)}"
    tolerance = _LEAK_TOLERANCE[precision.compute]
    if difference <= tolerance:
        return None
    return (
        f"two packed documents differ from each alone by {difference:.1e} ({tolerance:.0e} would be rounding)"
    )
