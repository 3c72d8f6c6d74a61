"""A Hugging Face model folder as `Weights`: safetensors files, or pickled ones read as tensors only.

Block-fp8 weights (DeepSeek-V3) are turned back into bf16 as they are read; their scales are no tensors of the
model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardyard.convert import fp8
from shardyard.convert.headers import read_tensor
from shardyard.convert.pickled import PickledFile
from shardyard.convert.places import sources_of
from shardyard.convert.weights import Facts, reading_order, same_bits, with_dtype
from shardyard.errors import UserError

_EMBEDDINGS, _HEAD = ("embed_tokens.weight", "wte.weight"), "lm_head.weight"


class HfWeights:
    """The weights of ``folder`` by the names of its files.

    Floating fp8 weights with scales have ``dtype`` (bf16), others theirs. Of a head that repeats tied
    embeddings there is no second copy.

    Raises:
        UserError: no config.json or weights, files that are missing, damaged or quantised in another way, or
            a head that differs from the embeddings that config.json ties it to.
    """

    def __init__(
        self, folder: Path, *, config_dir: Path | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.folder = folder
        self._dtype = dtype
        config = read_config(config_dir or folder)
        self._block = fp8.block_size(config, f"{(config_dir or folder) / 'config.json'}")
        self._sources = sources_of(folder)
        self._scales = self._find_scales() if self._block else {}
        if self._block:
            config = with_dtype(config, dtype)
            del config["quantization_config"]
        self.config: Mapping[str, Any] = config
        scales = set(self._scales.values())
        names = [name for name in self._sources if name not in scales]
        self.facts: dict[str, Facts] = {name: self._facts_of(name) for name in reading_order(names)}
        self._drop_repeated_head()

    def read(self, name: str) -> torch.Tensor:
        tensor = self._stored(name)
        if name not in self._scales:
            return tensor
        assert self._block is not None
        return fp8.dequantise(tensor, self._stored(self._scales[name]), self._block, self._dtype)

    def _stored(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return source.read(name) if isinstance(source, PickledFile) else read_tensor(source, name)

    def _stored_facts(self, name: str) -> Facts:
        source = self._sources[name]
        return source.facts[name] if isinstance(source, PickledFile) else source.facts

    def _facts_of(self, name: str) -> Facts:
        shape, dtype = self._stored_facts(name)
        return shape, self._dtype if name in self._scales else dtype

    def _file_of(self, name: str) -> Path:
        return self._sources[name].path

    def _find_scales(self) -> dict[str, str]:
        """Weight -> its scales, for all fp8 weights."""
        assert self._block is not None
        found: dict[str, str] = {}
        for name in self._sources:
            shape, dtype = self._stored_facts(name)
            if not dtype.is_floating_point or dtype.itemsize > 1 or name.endswith(fp8.SCALE):
                continue
            scale = name + fp8.SCALE
            if scale not in self._sources:
                raise UserError(f"{self._file_of(name)}: {name} is {dtype} and has no {scale} beside it")
            wanted = fp8.blocks_of(shape, self._block) if len(shape) == 2 else None
            if self._stored_facts(scale)[0] != wanted:
                raise UserError(
                    f"{self._file_of(scale)}: {scale} is {list(self._stored_facts(scale)[0])}, but {name} is "
                    f"{list(shape)} in blocks of {list(self._block)}"
                )
            found[name] = scale
        return found

    def _drop_repeated_head(self) -> None:
        """Some files of tied models hold the embeddings twice."""
        if _HEAD not in self.facts or not _is_tied(self.config):
            return
        embedding = next((name for name in self.facts if name.endswith(_EMBEDDINGS)), None)
        if embedding is None:  # the head is the one copy
            return
        if self.facts[embedding] != self.facts[_HEAD] or not same_bits(
            self.read(embedding), self.read(_HEAD)
        ):
            raise UserError(
                f"{self.folder}: config.json ties {_HEAD} to {embedding} (tie_word_embeddings), but they "
                "differ, so one of them would be lost; set tie_word_embeddings to false in config.json"
            )
        del self.facts[_HEAD]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no config.json; name the folder that does with --config") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object")
    return config


def _is_tied(config: Mapping[str, Any]) -> bool:
    """config.json may leave the key to its family's default."""
    stated = config.get("tie_word_embeddings")
    if isinstance(stated, bool):
        return stated
    from transformers import CONFIG_MAPPING

    known = config.get("model_type") in CONFIG_MAPPING
    return bool(known and getattr(CONFIG_MAPPING[config["model_type"]](), "tie_word_embeddings", False))
