"""Where a model comes from: a folder of any format or a hub id, and its config with the user's overrides."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardyard.config import ModelConfig
from shardyard.errors import UserError, first_line, opening
from shardyard.models.converted import Convert, converted, is_megatron

logger = logging.getLogger("shardyard.models")

_KEY = "model.model_name_or_path"
_SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_HUB_FILES = ["*.safetensors", *_SIDE_FILES]
# The reference's names for families, where they differ from config.json's model_type.
_MODEL_IDS = {"glm52": "glm_moe_dsa", "minimax_m27": "minimax_m2", "step35": "step3p5", "mamba3": "mamba3"}


@dataclass(frozen=True)
class ModelSource:
    """The local folders of a model; one and the same for a Hugging Face folder."""

    config: Path
    """config.json, and what an export takes along; the tokenizer, where none is named."""
    weights: Path
    form: Literal["files", "checkpoint"]
    """Weight files under Hugging Face names, or a folder of torch.distributed.checkpoint."""

    @classmethod
    def of(cls, source: Path | ModelSource) -> ModelSource:
        return source if isinstance(source, ModelSource) else cls(source, source, "files")


def resolve_source(
    model: ModelConfig,
    *,
    fetch_first: Callable[[Callable[[], str]], str],
    convert: Convert | None = None,
    cache: Path | None = None,
) -> ModelSource:
    """The local folders of a model.

    What takes long is done by one rank of each machine (``fetch_first``): downloads of hub ids, and the
    conversion of a Megatron-core folder by ``convert`` into a folder in ``cache``.

    Raises:
        UserError: no such folder, one without config.json, or the hub cannot be reached.
    """

    def resolve() -> ModelSource:
        return _resolve(model, convert, cache)

    folder = _local(_KEY, model.model_name_or_path)
    config = model.config_name_or_path
    if folder is not None and not is_megatron(folder) and (config is None or _config_key_folder(config)):
        return resolve()
    return _from_text(fetch_first(lambda: _as_text(resolve())))


def tokenizer_options(model: ModelConfig, source: ModelSource) -> ModelConfig:
    """``model``, naming the tokenizer beside the config where the weights' folder holds none of its own."""
    if model.tokenizer_name_or_path is not None or source.config == source.weights:
        return model
    return model.model_copy(update={"tokenizer_name_or_path": str(source.config)})


def _as_text(source: ModelSource) -> str:
    return json.dumps([str(source.config), str(source.weights), source.form])


def _from_text(text: str) -> ModelSource:
    config, weights, form = json.loads(text)
    return ModelSource(Path(config), Path(weights), form)


def _resolve(model: ModelConfig, convert: Convert | None, cache: Path | None) -> ModelSource:
    folder = _local(_KEY, model.model_name_or_path)
    if folder is None:
        folder = _download(model, _KEY, model.model_name_or_path, _HUB_FILES)
    megatron = is_megatron(folder)
    checkpoint = not megatron and (folder / ".metadata").is_file()
    config = _config_folder(model, folder, checkpoint=checkpoint)
    if megatron:
        if convert is None or cache is None:
            raise UserError(
                f"{_KEY}: {folder} is a Megatron-core folder; turn it into a Hugging Face one first, with "
                "`shardyard convert`"
            )
        return ModelSource(config, converted(folder, config, cache, convert), "files")
    return ModelSource(config, folder, "checkpoint" if checkpoint else "files")


def _config_folder(model: ModelConfig, folder: Path, *, checkpoint: bool) -> Path:
    """Where config.json is: beside the weights, else where ``config_name_or_path`` says."""
    own = next((place for place in (folder, folder / "assets") if (place / "config.json").is_file()), None)
    name = model.config_name_or_path
    if own is None and name is None:
        inside = f"{folder} holds no config.json" + (", nor does its folder assets" if checkpoint else "")
        hint = "is it a model folder? If so, name the folder of its config.json in model.config_name_or_path"
        raise UserError(f"{_KEY}: {inside}; {hint}")
    if name is None:
        assert own is not None
        return own
    named = _config_key_folder(name) or _download(model, "model.config_name_or_path", name, _SIDE_FILES)
    if own is not None and not own.samefile(named):
        raise UserError(
            f"model.config_name_or_path: {folder} has a config.json of its own ({own / 'config.json'}); to "
            "change values of it set model.config_overrides"
        )
    if not (named / "config.json").is_file():
        raise UserError(f"model.config_name_or_path: {name} holds no config.json")
    return named


def _config_key_folder(name: str) -> Path | None:
    """The local folder that ``config_name_or_path`` names, also by its config.json; None for a hub id."""
    path = Path(name).expanduser()
    return (
        path.parent
        if path.name == "config.json" and path.is_file()
        else _local("model.config_name_or_path", name)
    )


def _local(key: str, name: str) -> Path | None:
    """The folder ``name``; None when it may be a hub id.

    Raises:
        UserError: it is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{key}: no folder {name}. Name a model folder or a hub id such as org/name.")
    return None


def _download(model: ModelConfig, key: str, name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    logger.info("fetching %s from the hub", name)
    try:
        fetched = snapshot_download(
            name,
            revision=model.model_revision,
            cache_dir=model.cache_dir,
            token=model.hf_hub_token,
            allow_patterns=[*patterns, "*.py"] if model.trust_remote_code else patterns,
        )
    except Exception as error:
        # One line of the cause: the hub client's own messages run over several paragraphs.
        raise UserError(
            f"{key}: {name} is no local folder and cannot be fetched from the hub: {first_line(error)}"
        ) from error
    return Path(fetched)


def load_model_config(model: ModelConfig, source: Path | ModelSource) -> PreTrainedConfig:
    """The model's config with ``model.config_overrides`` applied.

    Raises:
        UserError: a type that transformers lacks, code that the user did not allow, a ``model_id`` that
            disagrees, or an override of a key that the config does not have.
    """
    folder = ModelSource.of(source).config
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
    except Exception as error:  # of every type: config classes check their fields each in its own way
        raise UserError(
            f"{_KEY}: the config.json of {folder} cannot be used: {opening(error) or type(error).__name__}"
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
        raise UserError(
            f"model.config_overrides: {config.model_type} refuses these values: {first_line(error)}"
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
