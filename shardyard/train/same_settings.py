"""All ranks of a run must have been given the same settings: each machine reads its own file and words."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from shardyard.config import Config
from shardyard.config.schema import FIELDS, get
from shardyard.device import ProcessGroup
from shardyard.errors import UserError

_OF_THE_MACHINE = re.compile(
    r"(_dir|_path|dataset|resume_from_checkpoint|num_workers|pin_memory|prefetch_factor|persistent_workers)$"
)
"""Where things lie and how they are fetched may differ from machine to machine."""


def refuse_different_settings(config: Config, group: ProcessGroup) -> None:
    """All ranks call it, before anything depends on a setting; one small collective when they agree.

    Raises:
        UserError: on every rank, naming the settings that differ and who has which value.
    """
    mine = {path: repr(get(config, path)) for path in FIELDS if not _OF_THE_MACHINE.search(path)}
    text = json.dumps(mine, sort_keys=True)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact as a float
    if len(set(group.gather([digest])[:, 0].tolist())) == 1:
        return
    everyone: list[dict[str, Any]] = group.gather_objects(mine)
    different = [path for path in mine if len({settings.get(path) for settings in everyone}) > 1]
    raise UserError(
        "the ranks of this run were started with different settings: "
        + "; ".join(_who_has_what(path, everyone) for path in different[:3])
        + ("; ..." if len(different) > 3 else "")
        + ". Start it on every machine with the same file and overrides."
    )


def _who_has_what(path: str, everyone: list[dict[str, Any]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, settings in enumerate(everyone):
        holders.setdefault(str(settings.get(path)), []).append(rank)
    values = ", ".join(f"{value} on rank(s) {_ranks(ranks)}" for value, ranks in holders.items())
    return f"{path} is {values}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown}, ... {ranks[-1]}" if len(ranks) > 4 else shown
