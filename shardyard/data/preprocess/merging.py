"""Merging finished outputs: single data sets, or the several that packed samples consist of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardyard.data.indexed import idx_path
from shardyard.data.indexed.merge import merge
from shardyard.data.preprocess.packed import without_suffix
from shardyard.data.preprocess.sinks import PAIR_PARTS, SFT_PARTS, part_prefix
from shardyard.errors import UserError


def merge_outputs(prefixes: Sequence[Path], out: Path) -> list[Path]:
    """Merge data sets, in order, into ``out``; gives the prefixes that were written.

    Prefixes of packed samples (with or without ``_packed``) are merged part by part.

    Raises:
        UserError: see ``indexed.merge``; or sets of different kinds.
    """
    kinds = [_parts_of(prefix) for prefix in prefixes]
    if len(set(kinds)) > 1:
        other = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
        raise UserError(f"{prefixes[0]} and {prefixes[other]} are outputs of different kinds")
    if not kinds or not kinds[0]:
        merge(prefixes, out)
        return [out]
    written = []
    for part in kinds[0]:
        written.append(part_prefix(without_suffix(out), part))
        merge([part_prefix(without_suffix(prefix), part) for prefix in prefixes], written[-1])
    return written


def groups_of(folder: Path, keys: Sequence[str]) -> dict[str, list[Path]]:
    """For each key the data sets of ``folder`` whose name contains it, sorted by name.

    Raises:
        UserError: not a folder, or a key that no name contains.
    """
    if not folder.is_dir():
        raise UserError(f"--merge-group-keys: {folder} is not a folder")
    names = sorted(path.with_suffix("") for path in folder.iterdir() if path.suffix == ".idx")
    groups = {key: [prefix for prefix in names if key in prefix.name] for key in keys}
    for key, prefixes in groups.items():
        if not prefixes:
            raise UserError(f"--merge-group-keys: {folder} holds no .idx whose name contains {key!r}")
    return groups


def _parts_of(prefix: Path) -> tuple[str, ...]:
    """The parts of packed samples at ``prefix``; none if it is a single data set."""
    if idx_path(prefix).exists():
        return ()
    whole = without_suffix(prefix)
    for parts in (SFT_PARTS, PAIR_PARTS):
        if idx_path(part_prefix(whole, parts[0])).exists():
            return parts
    return ()
