"""The manifest beside an output: what it was made from, and how.

``key`` is all that a byte of the output depends on; two runs of equal keys give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardyard import __version__
from shardyard.data.indexed import idx_path
from shardyard.data.key import FileHasher, differences, tokenizer_parts
from shardyard.data.preprocess.spool import write_json
from shardyard.data.sources import DatasetEntry
from shardyard.errors import UserError

CODE_VERSION = 1
"""Raise it whenever the same input and options give other bytes than before."""

_TOKENIZER = "tokenizer"
"""The part of a key that is the tokenizer's content."""

MEMO = Path("~/.cache/shardyard/tokenized/files.json")
"""Remembers the hashes of large files."""


def describe(
    entries: Iterable[DatasetEntry], tokenizer: Any, options: Mapping[str, Any], memo: Path = MEMO
) -> dict[str, Any]:
    """The key of a run, under names that a message can show.

    Raises:
        UserError: an input file cannot be read.
    """
    hasher = FileHasher(memo.expanduser())
    parts: dict[str, Any] = {"code version": CODE_VERSION, **options}
    for number, entry in enumerate(entries, start=1):
        described = dataclasses.asdict(entry)
        del described["name"], described["files"]
        for name, value in described.items():
            parts[f"input {number}: {name}"] = value
        parts[f"input {number}: contents"] = [
            {"file": file.name, "size": file.stat().st_size, "sha256": hasher.facts(file).sha256}
            for file in entry.files
        ]
    return json.loads(json.dumps(parts | tokenizer_parts(tokenizer), default=str))


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}_manifest.json")


def is_there(prefix: Path, key: Mapping[str, Any], outputs: Iterable[Path]) -> bool:
    """Whether the manifest of ``prefix`` says that these very outputs were finished, and they are there.

    ``outputs`` are all files that the run would write.

    Raises:
        UserError: outputs of another key, or without a manifest, are in the way.
    """
    there = [path for path in outputs if path.exists()]
    path = manifest_path(prefix)
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or not isinstance(before.get("key"), dict):
        if there:
            raise UserError(
                f"{there[0]} is there, but no manifest ({path.name}) that says how it was made; give another "
                "--output-prefix, or --overwrite-cache to replace it"
            )
        return False
    changes = differences(before["key"], key)
    if changes and there:
        raise UserError(
            f"{there[0]} was made otherwise: {'; '.join(changes)}. Give another --output-prefix, or "
            "--overwrite-cache to replace it"
        )
    sizes = before.get("outputs", {})
    whole = (path.is_file() and sizes.get(path.name) == path.stat().st_size for path in outputs)
    return not changes and all(whole)


def key_of(tokens: Path) -> dict[str, Any] | None:
    """What the token files at the prefix ``tokens`` were made from; None where no manifest tells."""
    suffix = "_manifest.json"
    for path in sorted(tokens.parent.glob(f"*{suffix}")):
        if not tokens.name.startswith(path.name.removesuffix(suffix)):
            continue
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and idx_path(tokens).name in manifest.get("outputs", {}):
            return manifest.get("key")
    return None


def check_tokenizer(tokens: Path, tokenizer: Any) -> None:
    """Refuse token files whose manifest names another tokenizer: their ids would mean other words.

    Raises:
        UserError: another tokenizer made them.
    """
    key = key_of(tokens)
    if key is not None and key.get(_TOKENIZER) not in (None, tokenizer_parts(tokenizer)[_TOKENIZER]):
        raise UserError(
            f"data.dataset: {tokens} was tokenised with another tokenizer than {tokenizer.name_or_path}, so "
            "its "
            "ids mean other words; preprocess again with this one, or set model.tokenizer_name_or_path to "
            "that "
            "one (if both give the same ids, remove the manifest beside the files)"
        )


def counts_of(prefix: Path) -> dict[str, dict[str, Any]]:
    """The counts that the manifest of finished outputs tells."""
    return json.loads(manifest_path(prefix).read_text(encoding="utf-8")).get("counts", {})


def write_manifest(
    prefix: Path, key: Mapping[str, Any], outputs: Iterable[Path], counts: Mapping[str, Any]
) -> None:
    """Say that the outputs are complete."""
    versions = {name: version(name) for name in ("tokenizers", "transformers", "numpy")}
    told = {
        "key": key,
        "counts": counts,
        "outputs": {path.name: path.stat().st_size for path in outputs},
        "versions": {"shardyard": __version__, "python": platform.python_version(), **versions},
    }
    write_json(manifest_path(prefix), told)
