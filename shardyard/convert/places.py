"""Which files of a Hugging Face folder hold its weights, and where each tensor lies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from shardyard.convert.headers import Place, read_header
from shardyard.convert.pickled import PickledFile
from shardyard.errors import UserError

Source = Place | PickledFile
"""Of a tensor: its bytes in a safetensors file, or a file that knows it by its name."""

_FILES = (
    "model.safetensors", "model.safetensors.index.json", "*.safetensors",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin", "*.pt", "*.pth", "*.bin",
)  # fmt: skip
"""In the order of transformers and of training; of several patterns the first that finds anything counts."""
_OTHER = ("adapter_model", "training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""How the names of files begin that trainers leave in such a folder besides the model."""
_SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)(\.\w+)")


def weight_files(folder: Path) -> list[Path]:
    """The files that count, or the one index that names them; none where there are no weights."""
    for pattern in _FILES:
        found = sorted(path for path in folder.glob(pattern) if not path.name.startswith(_OTHER))
        if found:
            return found
    return []


def sources_of(folder: Path) -> dict[str, Source]:
    """Where each tensor of the model in ``folder`` is.

    Raises:
        UserError: no weights, or files that are missing, damaged, or disagree about what is where.
    """
    paths = weight_files(folder)
    if not paths:
        raise UserError(f"{folder} holds no weights (*.safetensors, pytorch_model*.bin)")
    if paths[0].suffix == ".json":
        return _indexed(paths[0])
    _refuse_gaps(paths)
    found: dict[str, Source] = {}
    for path in paths:
        for name, source in _table(path).items():
            if name in found:
                raise UserError(f"{path}: {name} is also in {found[name].path.name}; which one counts?")
            found[name] = source
    return found


def _table(path: Path) -> Mapping[str, Source]:
    if path.suffix == ".safetensors":
        return read_header(path)
    file = PickledFile(path)
    return dict.fromkeys(file.facts, file)


def _indexed(index: Path) -> dict[str, Source]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} cannot be read: it has no weight_map of names to files") from error
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index} points outside its folder: {name}")
    tables = {name: _table(index.parent / name) for name in files}
    for name, file in weight_map.items():
        if name not in tables[file]:
            raise UserError(f"{index} says that {name} is in {file}, which does not hold it")
    # Tensors that the index forgets are read too, as transformers does.
    found = {name: source for table in tables.values() for name, source in table.items()}
    return found | {name: tables[file][name] for name, file in weight_map.items()}


def _refuse_gaps(paths: list[Path]) -> None:
    """Without an index only the names of files (7-of-9) tell that one is missing.

    Raises:
        UserError: a file of a set is not there.
    """
    sets: dict[tuple[str, int, str], set[int]] = {}
    for path in paths:
        if match := _SHARD.fullmatch(path.name):
            sets.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    for (begin, count, end), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        missing = set(range(first, first + count)) - numbers if count <= _MOST else {count}
        if missing:
            raise UserError(
                f"{paths[0].parent} holds {len(numbers)} of {count} files {begin}*-of-*{end}; number "
                f"{min(missing)} is missing"
            )


_MOST = 100_000
"""Files of one model; a name that speaks of more is not believed."""
