"""Where a model comes from: a local folder or a hub id, and its config with the user's overrides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

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
    apply_overrides(config, model.config_overrides or {})
    return config


def check_model_id(model_id: str | None, model_type: str) -> None:
    """Raises UserError when ``model.model_id`` names another family than config.json does."""
    if model_id is not None and _MODEL_IDS.get(model_id, model_id) != model_type:
        raise UserError(
            f"model.model_id: {model_id!r}, but config.json says model_type {model_type!r}. Remove model_id "
            f"or set it to "
            "the model's own type."
        )


def apply_overrides(config: PreTrainedConfig, overrides: dict[str, Any]) -> None:
    """Set each key; a mapping merges into a mapping (rope scaling ...)."""
    import difflib

    known = config.to_dict()
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"model.config_overrides.{key}: {config.model_type} has no such key{hint}")
        current = getattr(config, key, None)
        merged = {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
        setattr(config, key, merged)
        if key == "num_hidden_layers" and getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * value)[:value]


def has_weights(source: Path) -> bool:
    return any(next(source.glob(pattern), None) for pattern in _WEIGHTS)
