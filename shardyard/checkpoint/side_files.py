"""What stands beside exported weights: config, tokenizer and template, generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def write_side_files(
    model: Any, folder: Path, source_dir: Path | None, tokenizer: Any, dtype: torch.dtype
) -> None:
    """config.json, the tokenizer with its template, generation_config.json."""
    config = json.dumps(_config_of(model, dtype, source_dir), indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    generation = source_dir / "generation_config.json" if source_dir else None
    if generation and generation.is_file():
        # As it is: transformers would refuse to save one whose options contradict each other.
        shutil.copyfile(generation, folder / generation.name)
    elif getattr(model, "generation_config", None) is not None:
        text = json.dumps(model.generation_config.to_diff_dict(), indent=2, default=str)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")


def _config_of(model: Any, dtype: torch.dtype, source_dir: Path | None = None) -> dict[str, Any]:
    """config.json without our traces; its dtype is that of the written tensors.

    The source's own text where the model still is what it says: other loaders read keys that transformers drops.
    Code that the source names is not copied, so a model of transformers' own does not name it either.
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
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
