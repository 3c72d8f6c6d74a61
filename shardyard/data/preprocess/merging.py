"""Merging finished outputs: single data sets, or the several that packed samples consist of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardyard.data.indexed import idx_path
from shardyard.data.indexed.merge import merge, open_fitting
from shardyard.data.preprocess.manifest import key_of, manifest_path, write_manifest
from shardyard.data.preprocess.packed import without_suffix
from shardyard.data.preprocess.sinks import PAIR_PARTS, SFT_PARTS, files_of, part_prefix
from shardyard.data.preprocess.spool import file_errors
from shardyard.errors import UserError


def merge_outputs(prefixes: Sequence[Path], out: Path, *, overwrite: bool = False) -> list[Path]:
    """Merge data sets, in order, into ``out``; gives the prefixes that were written.

    Prefixes of packed samples (with or without ``_packed``) are merged part by part. The manifest of the
    whole tells the tokenizer, if those of all sets do.

    Raises:
        UserError: see ``indexed.merge``; sets of different kinds or tokenizers; ``out`` is there already,
            unless ``overwrite``.
    """
    kinds = [_parts_of(prefix) for prefix in prefixes]
    if len(set(kinds)) > 1:
        other = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
        raise UserError(f"{prefixes[0]} and {prefixes[other]} are outputs of different kinds")
    parts = kinds[0] if kinds else ()
    name = without_suffix(out) if parts else out
    written = [part_prefix(name, part) for part in parts] or [out]
    if not overwrite and idx_path(written[0]).exists():
        raise UserError(
            f"{idx_path(written[0])} is there already; give another --output-prefix, or --overwrite-cache to "
            "replace it"
        )
    inputs = [[part_prefix(without_suffix(one), part) for one in prefixes] for part in parts] or [
        list(prefixes)
    ]
    key = _common_key(inputs[0])
    for sets, merged in zip(inputs, written, strict=True):
        open_fitting(sets, merged)
    with _all_or_none(written):
        manifest_path(name).unlink(missing_ok=True)
        for sets, merged in zip(inputs, written, strict=True):
            merge(sets, merged)
    if key is not None:
        with file_errors(name):
            write_manifest(name, key, files_of(written), counts={})
    return written


@contextlib.contextmanager
def _all_or_none(written: Sequence[Path]) -> Iterator[None]:
    """Several sets are one output: never some of them new and some old, whenever it ends."""
    if len(written) > 1:
        for prefix in written:
            idx_path(prefix).unlink(missing_ok=True)
    try:
        yield
    except UserError:
        for path in files_of(list(written)) if len(written) > 1 else ():
            path.unlink(missing_ok=True)
        raise


def _common_key(prefixes: Sequence[Path]) -> dict[str, Any] | None:
    """What a manifest of all sets together can tell: their tokenizer, and what they agree on."""
    keys = [key_of(prefix) for prefix in prefixes]
    known = [(prefix, key) for prefix, key in zip(prefixes, keys, strict=True) if key is not None]
    for prefix, key in known[1:]:
        if key.get("tokenizer") != known[0][1].get("tokenizer"):
            raise UserError(
                f"{prefix} was tokenised with another tokenizer than {known[0][0]}; their ids differ"
            )
    if len(known) < len(keys) or not known:
        return None
    first = known[0][1]
    shared = {name: value for name, value in first.items() if all(key.get(name) == value for _, key in known)}
    return {**shared, "merged": [prefix.name for prefix in prefixes]}


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
