"""A DCP folder as `Weights`: a checkpoint of ours, or one that MindSpeed-LLM's FSDP2 backend wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardyard.convert.dcp_reader import DcpTensors
from shardyard.convert.hf import read_config
from shardyard.convert.names import ModelNames, Unit
from shardyard.convert.weights import Facts, reading_order
from shardyard.errors import UserError

ASSETS = "assets"
"""Folder of a checkpoint with config.json, tokenizer, template."""
_OURS, _REFERENCE = "model.", "model.model."


class DcpWeights:
    """The model's weights of the checkpoint ``folder``, by the names of Hugging Face files.

    Keys are ``model.<name in memory>`` (ours) or ``model.model.<name>`` (the reference's, whose experts may
    be joined to two dimensions). The optimizer and all else is not looked at. Each tensor in memory is read
    when the first of those that it is turned into is asked for, and kept until another is.

    Raises:
        UserError: no config.json (in ``folder/assets``, ``folder`` or ``config_dir``), hostile or damaged
            files, or other tensors than config.json's model has.
    """

    def __init__(self, folder: Path, *, config_dir: Path | None = None) -> None:
        self.folder = folder
        self.config: Mapping[str, Any] = read_config(config_dir or side_files_of(folder))
        self._stored = DcpTensors(folder)
        self._names = ModelNames(self.config, folder)
        self._prefix = self._find_prefix()
        self._check_shapes()
        dtypes = {name: self._stored.facts[self._prefix + name][1] for name in self._names.shapes}
        held: dict[str, Facts] = {
            name: (self._names.shapes[name], dtypes[name]) for name in reading_order(dtypes)
        }
        units = self._names.units_to_disk(held)
        self.facts: dict[str, Facts] = {name: facts for unit in units for name, facts in unit.results.items()}
        self.buffers = frozenset(
            name for unit in units if self._names.buffers.issuperset(unit.sources) for name in unit.results
        )
        """Tensors that are no parameters: a cast of the weights leaves them as they are."""
        self._unit_of: dict[str, Unit] = {name: unit for unit in units for name in unit.results}
        self._last: tuple[Unit, dict[str, torch.Tensor]] | None = None

    def read(self, name: str) -> torch.Tensor:
        unit = self._unit_of[name]
        if self._last is None or self._last[0] is not unit:
            self._last = None  # its memory is free before the next is read
            stored = {one: self._in_memory(one) for one in unit.sources}
            self._last = unit, self._names.to_disk(stored)
        return self._last[1][name].contiguous()

    def _in_memory(self, name: str) -> torch.Tensor:
        return unfolded(self._stored.read(self._prefix + name), self._names.shapes[name])

    def _find_prefix(self) -> str:
        wanted = self._names.shapes
        counts = {
            prefix: sum(prefix + name in self._stored.facts for name in wanted)
            for prefix in (_OURS, _REFERENCE)
        }
        prefix = max(counts, key=lambda one: counts[one])
        missing = [name for name in wanted if prefix + name not in self._stored.facts]
        foreign = [
            key
            for key in self._stored.facts
            if key.startswith(prefix) and key.removeprefix(prefix) not in {*wanted, *self._names.tied}
        ]
        if missing or foreign:
            counted = [
                f"{len(keys)} {what} (such as {keys[0]})"
                for keys, what in ((missing, "missing"), (foreign, "that it does not know"))
                if keys
            ]
            raise UserError(
                f"{self.folder} is no checkpoint of config.json's {self.config.get('model_type')} model: "
                f"tensors {' and '.join(counted)}. Name the folder of the right config.json with --config"
            )
        return prefix

    def _check_shapes(self) -> None:
        for name, wanted in self._names.shapes.items():
            found = self._stored.facts[self._prefix + name][0]
            if unfolded(torch.empty(found, device="meta"), wanted).shape != wanted:
                raise UserError(
                    f"{self.folder}: {name} is {list(found)}, but config.json asks for {list(wanted)}; is it "
                    "the config.json of another size?"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def side_files_of(folder: Path) -> Path:
    """Where a checkpoint keeps its config.json and tokenizer: newer ones in a folder of their own."""
    return folder / ASSETS if (folder / ASSETS / "config.json").is_file() else folder


def unfolded(tensor: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    """Experts [E, A, B] out of the two-dimensional form of the reference, [E * B, A].

    With moe_grouped_gemm it stores each expert turned, one below the other: gate and up [E * H, 2I], down
    [E * I, H]. What has another shape comes back as it is.
    """
    if tensor.ndim == 2 and len(wanted) == 3:
        experts, a, b = wanted
        if tensor.shape == (experts * b, a):
            return tensor.view(experts, b, a).transpose(1, 2)
    return tensor
