"""Where a model comes from: a local folder or a hub id, and its config with the user's overrides."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardyard.config import ModelConfig
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.models")

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
# The reference's names for families, where they differ from config.json's model_type.
_MODEL_IDS = {"glm52": "glm_moe_dsa", "minimax_m27": "minimax_m2", "step35": "step3p5", "mamba3": "mamba3"}


def resolve_source(model: ModelConfig, *, fetch_first: Callable[[Callable[[], str]], str]) -> Path:
    """The local folder of a model; a hub id is downloaded by one rank of each machine (``fetch_first``).

    Raises:
        UserError: no such folder, or the hub cannot be reached.
    """
    name = model.model_name_or_path
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.model_name_or_path: {name} holds no config.json; is it a Hugging Face model folder?"
            )
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"model.model_name_or_path: no folder {name}. Name a model folder or a hub id such as org/name."
        )
    return Path(fetch_first(lambda: _download(model)))


def _download(model: ModelConfig) -> str:
    from huggingface_hub import snapshot_download

    name = model.model_name_or_path
    logger.info("fetching %s from the hub", name)
    patterns = [*_HUB_FILES, "*.py"] if model.trust_remote_code else _HUB_FILES
    try:
        return snapshot_download(
            name,
            revision=model.model_revision,
            cache_dir=model.cache_dir,
            token=model.hf_hub_token,
            allow_patterns=patterns,
        )
    except Exception as error:
        # One line of the cause: the hub client's own messages run over several paragraphs.
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.model_name_or_path: {name} is no local folder and cannot be fetched from the hub: {cause}"
        ) from error


def load_model_config(model: ModelConfig, source: Path) -> PreTrainedConfig:
    """The model's config with ``model.config_overrides`` applied.

    Raises:
        UserError: a type that transformers lacks, code that the user did not allow, a ``model_id`` that
        disagrees, or
            an override of a key that the config does not have.
    """
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"model.model_name_or_path: the config.json of {source} cannot be used: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    check_model_id(model.model_id, config.model_type)
    config = with_overrides(config, dict(model.config_overrides or {}))
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        raise UserError(
            "model.model_name_or_path: rope_type dynamic makes a step depend on the longest sequence seen "
            "before it, so "
            "a run could be neither resumed nor split; set model.config_overrides: "
            "{rope_scaling: {rope_type: linear "
            "or yarn, factor: ...}}"
        )
    return config


def check_model_id(model_id: str | None, model_type: str) -> None:
    """Raises UserError when ``model.model_id`` names another family than config.json does."""
    if model_id is not None and _MODEL_IDS.get(model_id, model_id) != model_type:
        raise UserError(
            f"model.model_id: {model_id!r}, but config.json says model_type {model_type!r}. Remove model_id "
            f"or set it to "
            "the model's own type."
        )


def with_overrides(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """The config made anew with other values; a mapping merges into a mapping (rope scaling ...).

    Values that follow from others (layer types, lists with an entry per layer) are derived again.

    Raises:
        UserError: an unknown key, a value that the config refuses, or one that would have no effect.
    """
    if not overrides:
        return config
    values = config.to_dict()
    wanted: dict[str, Any] = {}
    for key, value in overrides.items():
        name, value = _canonical(config, values, key, value)
        current = wanted.get(name, values.get(name))
        wanted[name] = (
            {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
        )
        if name.startswith("num_") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"model.config_overrides.{key}: {value!r} is not a whole number from 1 on")
    derived = _DERIVED - wanted.keys()
    if "num_hidden_layers" in wanted:
        layers = values["num_hidden_layers"]
        derived |= {k for k, v in values.items() if isinstance(v, list) and len(v) == layers} - wanted.keys()
    try:
        made = type(config).from_dict({k: v for k, v in values.items() if k not in derived} | wanted)
    except Exception as error:
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.config_overrides: {config.model_type} refuses these values: {cause}"
        ) from error
    for name, value in wanted.items():
        if getattr(made, name, None) != value and name != "rope_parameters":
            raise UserError(
                f"model.config_overrides.{name}: {config.model_type} makes {getattr(made, name, None)!r} of "
                f"{value!r}; "
                "another key decides about it"
            )
    return made


_DERIVED = frozenset({"layer_types"})
_ROPE_KEYS = ("rope_theta", "rope_scaling")


def _canonical(config: PreTrainedConfig, known: dict[str, Any], key: str, value: Any) -> tuple[str, Any]:
    """A key by the name that this family's config uses, and its value in that form."""
    name = config.attribute_map.get(key, key)
    if key in _ROPE_KEYS and "rope_parameters" in known:
        name, value = "rope_parameters", {"rope_theta": value} if key == "rope_theta" else value
    if name not in known:
        near = difflib.get_close_matches(key, [*known, *config.attribute_map], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"model.config_overrides.{key}: {config.model_type} has no such key{hint}")
    if name == "rope_parameters" and isinstance(value, dict):
        if "type" in value:  # the older name; left beside rope_type it would be ignored
            value = {"rope_type": value["type"], **{k: v for k, v in value.items() if k != "type"}}
        kind = value.get("rope_type", "default")
        if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise UserError(
                f"model.config_overrides.{key}: unknown rope_type {kind!r}; {sorted(ROPE_INIT_FUNCTIONS)}"
            )
    return name, value


def has_weights(source: Path) -> bool:
    return any(next(source.glob(pattern), None) for pattern in _WEIGHTS)
