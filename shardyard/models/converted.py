"""Megatron-core folders as sources of weights: converted once into a cached Hugging Face folder.

The cached folder is complete or absent, and named by a fingerprint of what it was made from, so an unchanged
source is converted once however often a run starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from shardyard.durable import remove_leftovers, sync, temporary_name
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.models")

Convert = Callable[[Path, Path, Path], None]
"""(Megatron-core folder, folder of config.json, folder to make): writes a Hugging Face folder, or raises
UserError. The room of conversions hands it in from above."""

_FORM = 1
"""Of the cached folder: a converter that writes others must count it up."""


def is_megatron(folder: Path) -> bool:
    """Whether ``folder`` is a Megatron-core checkpoint or a folder of some, of either of its layouts."""
    if next(folder.glob("*.safetensors"), None):  # converted from one; what stood beside may have come along
        return False
    if (folder / "latest_checkpointed_iteration.txt").is_file():
        return True
    if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file():  # torch_dist
        return True
    return any(next(folder.glob(pattern), None) for pattern in ("mp_rank_*", "iter_*/mp_rank_*"))


def converted(source: Path, config: Path, cache: Path, convert: Convert) -> Path:
    """The Hugging Face folder of ``source`` in ``cache``; made now if it is not there.

    Raises:
        UserError: from ``convert``, or the cache cannot be written.
    """
    try:
        target = cache / _fingerprint(source, config)
        if target.is_dir():
            logger.info("%s was converted before: reading %s", source, target)
            return target
        cache.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        logger.info("converting %s into %s", source, target)
        making = temporary_name(target)
        try:
            making.mkdir()
            convert(source, config, making)
            for path in making.rglob("*"):
                sync(path)
            _publish(making, target)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"model.model_name_or_path: {source} cannot be converted into {cache}: {error.strerror or error}"
        ) from error
    return target


def _publish(making: Path, target: Path) -> None:
    sync(making)
    try:
        making.rename(target)
    except OSError:
        if not target.is_dir():  # else a machine that shares this disk was faster, with the same content
            raise
    sync(target.parent)


def _fingerprint(source: Path, config: Path) -> str:
    """Of every file's name, size and time, and of the config's text."""
    files = [
        (str(path.relative_to(source)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.rglob("*"))
        if path.is_file()
    ]
    facts = [_FORM, str(source.resolve()), files, (config / "config.json").read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
