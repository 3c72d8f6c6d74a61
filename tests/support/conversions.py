"""What tests of conversions compare: the tensors of a folder as safetensors' own library reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Held = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> dtype, shape, bytes."""


def held_in(folder: Path) -> Held:
    """The tensors of all safetensors files of ``folder``; with an index they are those that it lists."""
    from safetensors import safe_open

    found: Held = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: as_held(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["weight_map"].keys() == found.keys()
        assert listed["metadata"]["total_size"] == sum(len(data) for _, _, data in found.values())
    return found


def as_held(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


class DictWeights:
    """`Weights` of tensors at hand, which counts what is read; ``folder`` is where they would come from."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.config = folder, dict(config)
        self.tensors = dict(tensors)
        self.facts = {name: (tuple(t.shape), t.dtype) for name, t in self.tensors.items()}
        self.reads: list[str] = []

    def read(self, name: str) -> Any:
        self.reads.append(name)
        return self.tensors[name].clone()
