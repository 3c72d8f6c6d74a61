"""What the layout needs to know of a model, read from its config.json as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.sections.model import ModelConfig

_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner"),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "value_dim": ("v_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
}
"""Our name -> the names that families use for it in config.json."""

_WINDOW_OFF = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Families that name a window but attend to all unless ``use_sliding_window`` is true."""
_TRANSPOSED = frozenset({"gpt_oss"})
"""Families that keep expert weights as [experts, input, output]."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; None where config.json does not tell, 0 experts for a dense model."""

    model_type: str = "?"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    intermediate: int | None = None
    """Of the dense layers' MLP; None where all layers have experts."""
    dense_layers: int | None = None
    """Layers whose MLP has no experts."""
    expert_intermediate: int | None = None
    shared_intermediate: int | None = None
    """Of the shared experts together; None without them."""
    experts: int = 0
    experts_per_token: int | None = None
    experts_transposed: bool = False
    kv_rank: int | None = None
    """Rank of the compressed keys and values (multi-head latent attention), else None."""
    query_rank: int | None = None
    value_dim: int | None = None
    nope_dim: int | None = None
    """Of a latent head's query and key, the part without positions; ``rope_dim`` is the other one."""
    rope_dim: int | None = None
    sliding_window: bool = False
    """Whether some layers attend to a window only."""
    attention_dropout: float = 0.0
    tied: bool | None = None
    max_positions: int | None = None


def read_shape(model: ModelConfig) -> tuple[ModelShape | None, str | None]:
    """The shape of ``model``, with ``model.config_overrides``; or None and why it is not known here.

    Never raises: the model may lie on another machine, or on a hub, and whoever loads it says what is wrong.
    """
    path, unknown = Path(model.model_name_or_path), "config.json is not on this machine"
    try:
        path, unknown = config_file(model)
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None, unknown
    except (ValueError, RecursionError):
        return None, f"{path} is not JSON"
    if not isinstance(loaded, dict):
        return None, f"{path} holds no mapping"
    return shape_of(loaded, model.config_overrides or {}), None


def config_file(model: ModelConfig) -> tuple[Path, str]:
    """The config.json of ``model``, and what to say if it is not there. It stands beside the weights, or in
    the folder assets of a checkpoint of ours, or where ``model.config_name_or_path`` says."""
    folder = Path(model.model_name_or_path).expanduser()
    own = [folder / "config.json", folder / "assets" / "config.json"]
    for path in own:
        if path.is_file():
            return path, f"{path} cannot be read"
    if model.config_name_or_path is not None:
        named = Path(model.config_name_or_path).expanduser()
        path = named if named.name == "config.json" else named / "config.json"
        return path, f"{path} (model.config_name_or_path) is not on this machine"
    if folder.is_dir():
        return own[0], (
            f"{own[0]} is not on this machine, nor is {own[1]}; name the folder that holds config.json in "
            "model.config_name_or_path"
        )
    return own[0], f"{own[0]} is not on this machine"


def shape_of(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape that a config.json describes; a nested ``text_config`` is the one that counts."""
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    changes = dict(overrides or {})
    inner = changes.pop("text_config", None)
    changes |= inner if isinstance(inner, Mapping) else {}
    values = {name: _size(changes, text, keys) for name, keys in _NAMES.items()}
    text |= changes
    model_type = str(text.get("model_type", "?"))
    experts, layers, heads = values["experts"] or 0, values["layers"], values["heads"]
    dense = layers if not experts else _dense_layers(text, layers or 0)
    if values["hidden"] and heads and values["head_dim"] is None:
        values["head_dim"] = values["hidden"] // heads
    shared, width = _int(text.get("n_shared_experts")), values.pop("expert_intermediate")
    del values["experts"]
    values |= {
        "dense_layers": dense,
        "kv_heads": values["kv_heads"] or heads,
        "intermediate": values["intermediate"] if dense != 0 else None,
        "expert_intermediate": width if experts else None,
        "shared_intermediate": shared * width if experts and shared and width else None,
    }
    return ModelShape(
        model_type=model_type,
        experts=experts,
        experts_transposed=model_type in _TRANSPOSED,
        sliding_window=_slides(text, model_type, layers),
        attention_dropout=_number(text.get("attention_dropout", text.get("attn_pdrop"))),
        tied=text["tie_word_embeddings"] if isinstance(text.get("tie_word_embeddings"), bool) else None,
        **values,
    )


def _int(value: Any) -> int | None:
    """``value`` if it is a size, a whole number above 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _size(changes: Mapping[str, Any], text: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of ``keys`` that holds a size, an override before the file under whatever name."""
    found = (_int(source.get(key)) for source in (changes, text) for key in keys)
    return next((size for size in found if size is not None), None)


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    """Layers without experts among those of a model that has some."""
    kinds = text.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "dense" for kind in kinds[:layers])
    if (first := _int(text.get("first_k_dense_replace"))) is not None:
        return min(first, layers)
    named = text.get("mlp_only_layers")
    named = named if isinstance(named, list) else []
    step = _int(text.get("decoder_sparse_step")) or 1
    return sum(layer in named or (layer + 1) % step != 0 for layer in range(layers))


def _slides(text: Mapping[str, Any], model_type: str, layers: int | None) -> bool:
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds[:layers]
    on = text.get("use_sliding_window", model_type not in _WINDOW_OFF)
    return bool(on) and _int(text.get("sliding_window")) is not None
