"""``data.dataset`` -> the data sets of a run: rows to prepare, or token files that are there already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config import Config
from shardyard.data import sources
from shardyard.data.indexed.layout import bin_path, idx_path
from shardyard.data.preprocess.packed import is_packed, without_suffix
from shardyard.data.sources import DatasetEntry
from shardyard.errors import UserError

KEY = "data.dataset"


@dataclass(frozen=True)
class NamedSet:
    """One data set: an ``entry`` whose rows are read, or the ``prefix`` of .bin/.idx files; ``weight`` is its
    share, if the user gave shares.
    """

    name: str
    entry: DatasetEntry | None = None
    prefix: Path | None = None
    weight: float | None = None


def resolve_sets(config: Config, dataset: Any) -> list[NamedSet]:
    """The data sets that ``dataset`` (``data.dataset`` or ``data.eval_dataset``) names, in its order.

    With ``data_manager_type: mg`` an item is a file, folder, glob or name whose rows hold text, or the prefix
    of Megatron's .bin/.idx; numbers before every item are shares (``0.3, a, 0.7, b``).

    Raises:
        UserError: nothing is named, or something that is not there (see ``resolve_datasets``).
    """
    if config.data.data_manager_type == "lf":
        return [NamedSet(entry.name, entry) for entry in _entries(config, dataset)]
    shared: Mapping[str, Any] = {}
    if isinstance(dataset, Mapping):
        shared = {key: value for key, value in dataset.items() if key != "file_name"}
        if "file_name" not in dataset:  # a hub, or a fault that the registry explains
            return [NamedSet(entry.name, entry) for entry in _entries(config, dataset)]
    items = _items(dataset)
    weights = _weights(items)
    if weights is None and isinstance(dataset, Mapping) and not any(map(_find_prefix_of(config), items)):
        return [
            NamedSet(entry.name, entry)
            for entry in _entries(config, {**shared, "file_name": items if len(items) > 1 else items[0]})
        ]
    names = items if weights is None else items[1::2]
    return [
        _one(config, name, shared, None if weights is None else weight)
        for name, weight in zip(names, weights or [0.0] * len(names), strict=True)
    ]


def _entries(config: Config, dataset: Any) -> list[DatasetEntry]:
    model = config.model
    tokens = {"hf": model.hf_hub_token, "ms": model.ms_hub_token, "om": model.om_hub_token}
    return sources.resolve_datasets(
        dataset, config.data.dataset_dir, tokens=tokens, cache_dir=model.cache_dir
    )


def _items(dataset: Any) -> list[Any]:
    if isinstance(dataset, Mapping):
        dataset = dataset["file_name"]
    if isinstance(dataset, str):
        return [part.strip() for part in dataset.split(",") if part.strip()]
    return list(dataset or [])


def _weights(items: Sequence[Any]) -> list[float] | None:
    """The shares, scaled to a sum of 1, if every other item is a number (the reference's rule)."""
    numbers = [_number(item) for item in items]
    found = [number for number in numbers[::2] if number is not None]
    if not items or len(items) % 2 or len(found) != len(items) // 2:
        if any(number is not None for number in numbers):
            raise UserError(
                f"{KEY}: {', '.join(map(str, items))}: shares and paths must take turns, a share before each "
                "path, "
                "such as 0.3, first, 0.7, second; or leave all shares out"
            )
        return None
    if min(found) <= 0 or not all(map(math.isfinite, found)):
        raise UserError(f"{KEY}: the shares {', '.join(map(str, items[::2]))} must be above 0")
    return [share / sum(found) for share in found]


def _number(item: Any) -> float | None:
    if isinstance(item, bool | Mapping):
        return None
    try:
        return float(item)
    except (TypeError, ValueError):
        return None


def _one(config: Config, item: Any, shared: Mapping[str, Any], weight: float | None) -> NamedSet:
    prefix = _find_prefix(config, item) if isinstance(item, str) else None
    if prefix is not None:
        if config.data.max_samples is not None:
            raise UserError(
                f"data.max_samples: {prefix}.idx is tokenised already and is used whole; leave max_samples "
                "out, or "
                "name the raw files"
            )
        return NamedSet(str(item), prefix=prefix, weight=weight)
    if isinstance(item, str):
        _suggest_prefix(config, item)
    named = item if isinstance(item, Mapping) or not shared else {**shared, "file_name": item}
    (entry,) = _entries(config, [named])
    return NamedSet(entry.name, entry, weight=weight)


def _find_prefix_of(config: Config) -> Any:
    return lambda item: isinstance(item, str) and _find_prefix(config, item) is not None


def _candidates(config: Config, item: str) -> list[Path]:
    path = Path(item).expanduser()
    if path.suffix in (".bin", ".idx"):
        path = path.with_name(path.stem)
    return [path] if path.is_absolute() else [Path(config.data.dataset_dir).expanduser() / path, path]


def _find_prefix(config: Config, item: str) -> Path | None:
    """The prefix that ``item`` means, if .bin/.idx files of that name are there."""
    candidates = _candidates(config, item)
    if config.training.stage == "sft":
        for path in candidates:
            if is_packed(path):
                return without_suffix(path).absolute()
        raise UserError(
            f"{KEY}: training.stage sft with data.data_manager_type mg trains on packed .bin/.idx files; "
            "there is "
            f"no {' or '.join(map(str, candidates))}_packed_input_ids_document.idx. Make them with "
            "`shardyard preprocess`, or set data.data_manager_type: lf to train on conversations as they are"
        )
    for path in candidates:
        if idx_path(path).is_file():
            return path.absolute()
        if bin_path(path).is_file():
            raise UserError(
                f"{KEY}: {bin_path(path)} has no {idx_path(path).name} beside it; both are needed"
            )
    return None


def _suggest_prefix(config: Config, item: str) -> None:
    """Point at `<item>_text_document`, which the reference would take for `<item>` without a word."""
    for path in _candidates(config, item):
        found = path.with_name(f"{path.name}_text_document")
        if idx_path(found).is_file() and not path.exists():
            raise UserError(f"{KEY}: there is no {path}; did you mean {found}?")
