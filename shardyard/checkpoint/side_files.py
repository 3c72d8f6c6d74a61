"""What stands beside exported weights: config, tokenizer and template, generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from shardyard.checkpoint.state import any_stage
from shardyard.errors import UserError


def write_side_files(
    model: Any,
    folder: Path,
    source_dir: Path | None,
    tokenizer: Any,
    dtype: torch.dtype,
    chat_template: str | None = None,
) -> None:
    """config.json, the tokenizer with its own template or ``chat_template``, generation_config.json."""
    config = json.dumps(_config_of(model, dtype, source_dir), indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        if chat_template is not None:
            # As save_pretrained would write it, without touching the live tokenizer.
            (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    _write_generation_config(model, folder, source_dir, tokenizer)


def _write_generation_config(model: Any, folder: Path, source_dir: Path | None, tokenizer: Any) -> None:
    """The source's own, with the token that ends a turn among its stop ids: training may have set another."""
    source = source_dir / "generation_config.json" if source_dir else None
    if source and source.is_file():
        text = source.read_text(encoding="utf-8")  # transformers would refuse options that contradict
    elif getattr(model, "generation_config", None) is not None:
        text = json.dumps(model.generation_config.to_diff_dict(), indent=2, default=str) + "\n"
    else:
        return
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UserError(f"{source} holds no JSON object; correct it, or remove the file")
    stop_ids = _as_list(options.get("eos_token_id", getattr(model.config, "eos_token_id", None)))
    trained = getattr(tokenizer, "eos_token_id", None)
    path = folder / "generation_config.json"
    if trained is not None and trained not in stop_ids:
        options["eos_token_id"] = [*stop_ids, trained]
        path.write_text(json.dumps(options, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    elif source and source.is_file():
        shutil.copyfile(source, path)
    else:
        path.write_text(text, encoding="utf-8")


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _config_of(model: Any, dtype: torch.dtype, source_dir: Path | None = None) -> dict[str, Any]:
    """config.json without our traces; its dtype is that of the written tensors.

    The source's own text where the model still is what it says: other loaders read keys that transformers
    drops. Code that the source names is not copied, so a model of transformers' own does not name it either.
    """
    config = _without_traces(_as_json(model.config))
    path = source_dir / "config.json" if source_dir else None
    if path is not None and path.is_file():
        source = json.loads(path.read_text(encoding="utf-8"))
        if _without_traces(_as_json(type(model.config).from_json_file(path))) == config:
            config = source
    config.pop("torch_dtype", None)
    if is_native(model):
        config.pop("auto_map", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [_base_class(model).__name__]
    return config


def _as_json(config: Any) -> dict[str, Any]:
    """As transformers writes it: infinities have a form of their own."""
    return json.loads(config.to_json_string(use_diff=True))


def _without_traces(config: dict[str, Any]) -> dict[str, Any]:
    ours = {
        "distributed_config",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "architectures",
        "transformers_version",
    }
    return {key: value for key, value in config.items() if key not in ours}


def is_native(model: Any) -> bool:
    """The model's code is transformers' own, not the model folder's."""
    return _base_class(model).__module__.startswith("transformers.")


def _base_class(model: Any) -> type:
    """FSDP puts a class of its own in front, with its own prefix to the name."""
    return next(cls for cls in type(any_stage(model)).__mro__ if not issubclass(cls, FSDPModule))
