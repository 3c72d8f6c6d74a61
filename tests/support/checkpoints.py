"""Small models and checkpoints for tests of the store, and ways to harm them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def reseal(path: Path, **changes: Any) -> None:
    """Give ``manifest.json`` the sizes and hashes that the files have now, and make it pass for unchanged.

    ``changes`` are set in it after that. An attacker can do the same: the seal is against accidents.
    """
    from shardyard.checkpoint.manifest import sealed

    held = json.loads((path / "manifest.json").read_text())
    for name in held["files"]:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            held["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    held.pop("sha256", None)
    (path / "manifest.json").write_text(sealed(json.dumps(held | changes | {"sha256": ""})))


def files_of(path: Path) -> list[str]:
    return sorted(found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file())


def die_at_file_operation(place: int) -> None:
    """From now on this process is killed at its ``place``-th file operation (from 0) on checkpoints."""
    left = place

    def watch(event: str, args: Any) -> None:  # what is opened, renamed, removed: places to die at
        nonlocal left
        files = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if event in files and "checkpoints" in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


class Bomb:
    """Makes the folder ``marker`` when its pickle is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def small_model(size: int = 8, layers: int = 2) -> Any:
    """Sharded matrices [size, size] with a buffer, and an AdamW that has made a step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for _ in range(layers)))
    model.register_buffer("count", torch.tensor(3))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, size)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def local_values(model: Any, optimizer: Any) -> dict[str, Any]:
    """This rank's pieces of all that a checkpoint holds, as copies in NumPy."""
    from torch.distributed.tensor import DTensor

    from shardyard.checkpoint.state import model_tensors, optimizer_tensors

    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone().numpy()
        for name, tensor in tensors.items()
    }


def overwrite(model: Any, optimizer: Any, value: float) -> None:
    """Set all that a checkpoint holds to ``value``, in place, as the next step would."""
    from shardyard.checkpoint.state import model_tensors, optimizer_tensors

    for tensor in (model_tensors(model) | optimizer_tensors(model, optimizer)).values():
        tensor.fill_(value)
