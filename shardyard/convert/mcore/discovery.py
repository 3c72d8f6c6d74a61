"""How a checkpoint is cut: found out from its rank folders, its arguments and the names of its tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.layout import Implementation, McoreLayout, parse_list
from shardyard.convert.mcore.pieces import WORD_EMBEDDINGS
from shardyard.convert.mcore.rank_files import Chunk, RankFiles
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.convert")

_LAYER, _MTP = r"decoder\.layers\.(\d+)\.", r"mtp\.layers\.(\d+)\."


@dataclass(frozen=True)
class Given:
    """What the user says about a folder; None: the checkpoint's own arguments and tensors say it."""

    noop_layers: tuple[int, ...] | None = None
    num_layer_list: tuple[int, ...] | None = None
    expert_tp: Literal[1] | None = None
    moe_tp_extend_ep: bool | None = None
    schedules_method: Literal["dualpipev"] | None = None


def discover(files: RankFiles, model: Model, given: Given) -> tuple[McoreLayout, int]:
    """The layout of a checkpoint and its number of MTP layers.

    Raises:
        UserError: a rank's folder is missing, or the layout does not fit the model.
    """
    said = files.arguments
    _check_said(said, model, files.folder)
    _check_given(said, given, files.folder)
    layout = McoreLayout(
        tp=files.extent(0, "tensor_model_parallel_size"),
        pp=files.extent(1, "pipeline_model_parallel_size"),
        ep=files.extent(2, "expert_model_parallel_size"),
        noop_layers=_given_or_said(given.noop_layers, files, "noop_layers"),
        schedules_method=given.schedules_method
        or ("dualpipev" if said.get("schedules_method") == "dualpipev" else None),
    )
    layout = _with_stages(layout, model, given, files)
    layout = _with_experts(layout, model, given, files)
    layout = _with_names(layout, model, files)
    layout = _with_vocabulary(layout, model, files)
    layout.check(model)
    joined = layout.grouped and layout.implementation == "local"
    if joined and layout.tp > 1 and given.moe_tp_extend_ep is None and "moe_tp_extend_ep" not in said:
        logger.warning(
            "%s does not say whether experts are divided over tp x ep ranks, and joined experts have the "
            "same shape either way; if they are, give --moe-tp-extend-ep",
            files.folder,
        )
    for rank in layout.ranks():
        if rank not in files:
            raise UserError(f"{files.folder / layout.folder_of(rank)} is missing; other ranks are there")
    stage, chunk = layout.last(model)
    chunks = files.stage(stage)
    return layout, _count(chunks[min(chunk, len(chunks) - 1)], _MTP)


def _check_said(said: Mapping[str, Any], model: Model, folder: Path) -> None:
    """Heads of another number or size may make tensors of the same shapes.

    Raises:
        UserError: the checkpoint's arguments name other sizes than config.json.
    """
    sizes = {"hidden_size": model.hidden, "num_attention_heads": model.heads}
    if not model.family.latent:
        sizes["kv_channels"] = model.head_dim
        if said.get("group_query_attention") is True:
            sizes["num_query_groups"] = model.groups
    for key, size in sizes.items():
        if isinstance(said.get(key), int) and said[key] != size:
            raise UserError(
                f"{folder}: {key} of the checkpoint's arguments is {said[key]}, config.json says {size}; "
                "name the folder of the right config.json with --config"
            )


def _check_given(said: Mapping[str, Any], given: Given, folder: Path) -> None:
    """What is given is for checkpoints that do not say it; experts cut in another way have the same shapes.

    Raises:
        UserError: the checkpoint says something else.
    """
    extended, shards = said.get("moe_tp_extend_ep"), said.get("expert_tensor_parallel_size")
    tp = said.get("tensor_model_parallel_size")
    if given.moe_tp_extend_ep and extended is False:
        raise UserError(f"moe_tp_extend_ep: {folder} was written without it; leave it out")
    if given.expert_tp == 1 and isinstance(shards, int) and isinstance(tp, int) and shards == tp > 1:
        raise UserError(f"expert_tp: experts in {folder} are cut in {shards}; leave it out")


def _given_or_said(given: tuple[int, ...] | None, files: RankFiles, key: str) -> tuple[int, ...]:
    if given is not None:
        return given
    value = files.arguments.get(key)
    if isinstance(value, str):
        return parse_list(value, f"{files.folder}: {key} of the checkpoint's arguments")
    if isinstance(value, list | tuple | set | frozenset) and all(isinstance(v, int) for v in value):
        return tuple(sorted(value)) if isinstance(value, set | frozenset) else tuple(value)
    return ()


def _with_stages(layout: McoreLayout, model: Model, given: Given, files: RankFiles) -> McoreLayout:
    """Fill in virtual stages, or the layers of each stage where they differ."""
    chunks = len(files.stage(0))
    if layout.schedules_method:
        return layout
    if chunks > 1:
        said = files.arguments.get("num_layers_per_virtual_pipeline_stage")
        each = layout.positions(model) // layout.pp // chunks
        return replace(layout, vpp=said if isinstance(said, int) else each)
    counts = _given_or_said(given.num_layer_list, files, "num_layer_list")
    if not counts and not layout.noop_layers and layout.pp > 1:
        counts = tuple(_count(files.stage(stage)[0], _LAYER) for stage in range(layout.pp))
    even = len(set(counts)) <= 1
    return layout if even else replace(layout, num_layer_list=counts)


def _count(chunk: Chunk, pattern: str) -> int:
    """One more than the highest number that a chunk's names hold at the pattern's group."""
    return max((int(match[1]) + 1 for name in chunk if (match := re.match(pattern, name))), default=0)


def _with_experts(layout: McoreLayout, model: Model, given: Given, files: RankFiles) -> McoreLayout:
    """Fill in how experts are cut: by their tensors where these tell, else by what is said."""
    if not model.experts or layout.tp == 1:
        return layout
    extended = given.moe_tp_extend_ep
    if extended is None:
        extended = bool(files.arguments.get("moe_tp_extend_ep", False))
    whole = given.expert_tp == 1 or files.arguments.get("expert_tensor_parallel_size") == 1
    if _are_whole(layout, model, files):
        whole = True
    return replace(layout, expert_tp=1 if whole and not extended else None, moe_tp_extend_ep=extended)


def _are_whole(layout: McoreLayout, model: Model, files: RankFiles) -> bool:
    """Whether an expert's down projection is seen not to be cut."""
    width = model.config.get("moe_intermediate_size") or model.config.get("intermediate_size")
    pattern = re.compile(r".*\.experts\.(local_experts\.\d+\.linear_fc2\.weight|linear_fc2\.weight\d+)$")
    for chunk in files.chunks(layout.pp):
        for name, tensor in chunk.items():
            if pattern.match(name):
                return tensor.shape[1] == width
    return False


def _with_names(layout: McoreLayout, model: Model, files: RankFiles) -> McoreLayout:
    """Fill in what the names of the tensors say."""
    names = {name for chunk in files.chunks(layout.pp) for name in chunk}

    def some(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    engine = some(r"\.layer_norm_weight$") or some(r"\.experts\.linear_fc1\.weight\d+$")
    implementation: Implementation = "transformer_engine" if engine else "local"
    mindspeed = some(r"^mtp\.final_layernorms\.") or (model.family.latent and some(r"\.linear_qkv\.weight$"))
    return replace(
        layout,
        implementation=implementation,
        grouped=some(r"\.experts\.(weight1|linear_fc1\.weight\d+)$"),
        mla_mm_split=some(r"\.linear_qk_nope\.weight$"),
        dialect="mindspeed" if mindspeed else "megatron",
    )


def _with_vocabulary(layout: McoreLayout, model: Model, files: RankFiles) -> McoreLayout:
    """Fill in the padding of the embedding, where it has more rows than the model's vocabulary."""
    table = files.stage(0)[0].get(WORD_EMBEDDINGS)
    if table is None or table.shape[0] * layout.tp <= model.vocabulary:
        return layout
    said = replace(layout, make_vocab_size_divisible_by=table.shape[0])
    unit = files.arguments.get("make_vocab_size_divisible_by")
    if isinstance(unit, int) and unit > 0:
        as_said = replace(layout, make_vocab_size_divisible_by=unit)
        if as_said.padded_vocabulary(model) == table.shape[0] * layout.tp:
            return as_said
    return said
