"""The rank folders of a checkpoint and their files, each opened once and mapped, not read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardyard.convert.mcore.layout import Rank
from shardyard.convert.mcore.pickles import load_pt, plain_arguments
from shardyard.errors import UserError

LATEST, FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_TORCH_DIST = (".metadata", "metadata.json")
Chunk = Mapping[str, torch.Tensor]


def iteration_folder(folder: Path) -> Path:
    """The folder of the ranks: what ``latest_checkpointed_iteration.txt`` names, or ``folder`` itself.

    Raises:
        UserError: there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder")
    if any(_RANK.fullmatch(path.name) or path.name in _TORCH_DIST for path in folder.iterdir()):
        return folder
    try:
        text = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{folder} is no Megatron-core checkpoint: it holds no readable {LATEST}") from None
    if text != "release" and not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"{folder / LATEST} holds {text[:40]!r} instead of the number of an iteration")
    found = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise UserError(f"{folder / LATEST} names iteration {text}, but {found} is missing")
    return found


class RankFiles:
    """The files of all ranks that are there.

    Where folders are numbered in two dimensions, the second is the stage or the expert rank; ``staged`` says
    it can only be the stage.

    Raises:
        UserError: no rank is there, or the first one's file is not readable.
    """

    def __init__(self, folder: Path, *, staged: bool) -> None:
        self.folder = folder
        numbered = [
            (tuple(int(group) for group in match.groups() if group is not None), entry)
            for entry in sorted(folder.iterdir())
            if (match := _RANK.fullmatch(entry.name))
        ]
        if not numbered:
            raise UserError(f"{folder} holds no rank folders (mp_rank_00, ...)")
        first = _load(numbered[0][1] / FILE)
        self.arguments = plain_arguments(first)
        """What the first rank's file says about the run; empty if it says nothing."""
        staged = staged or _is_staged(self.arguments, first)
        self._run = _run_of(first)
        self._folders: dict[Rank, Path] = {}
        for key, path in numbered:
            if (rank := _rank_of(key, staged)) in self._folders:
                raise UserError(f"{path} and {self._folders[rank].name} are the same rank; which one counts?")
            self._folders[rank] = path
        self._contents: dict[Rank, dict[str, Any]] = {next(iter(self._folders)): first}

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._folders

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": {}}  # another process maps the files for itself

    def extent(self, dimension: int, said: str) -> int:
        """The size of a dimension of `Rank`: what is there, or what the argument ``said`` names if more."""
        seen = max(rank[dimension] for rank in self._folders) + 1
        value = self.arguments.get(said)
        return max(seen, value) if isinstance(value, int) else seen

    def path(self, rank: Rank) -> Path:
        return self._folders[rank] / FILE

    def chunk(self, rank: Rank, key: str) -> Mapping[str, Any]:
        """The state of one chunk (``model``, ``model0``, ...) of a rank.

        Raises:
            UserError: the file is not readable, or has no such chunk.
        """
        found = self._content(rank).get(key)
        if not isinstance(found, Mapping):
            raise UserError(f"{self.path(rank)} holds no entry {key}, which other ranks have")
        return found

    def stage(self, stage: int) -> list[Chunk]:
        """All chunks of some rank of a stage.

        Raises:
            UserError: none of the stage's ranks is there.
        """
        for rank in self._folders:
            if rank.pp == stage:
                content = self._content(rank)
                return [content[key] for key in _chunk_keys(content)]
        raise UserError(f"{self.folder / f'mp_rank_00_{stage:03d}'} is missing, as is all of its stage")

    def chunks(self, stages: int) -> Iterator[Chunk]:
        """The chunks of some rank of each stage."""
        for stage in range(stages):
            yield from self.stage(stage)

    def _content(self, rank: Rank) -> dict[str, Any]:
        if rank not in self._contents:
            found = _load(self.path(rank))
            for key, value in _run_of(found).items():
                if self._run.get(key, value) != value:
                    raise UserError(
                        f"{self.path(rank)} is of another checkpoint than the first rank's file: {key} is "
                        f"{value} here and {self._run[key]} there"
                    )
            self._contents[rank] = found
        return self._contents[rank]


def _load(path: Path) -> dict[str, Any]:
    content = load_pt(path)
    if not isinstance(content, dict) or not _chunk_keys(content):
        raise UserError(f"{path} holds no model (no entry model or model0)")
    return content


def _run_of(content: Mapping[str, Any]) -> dict[str, int]:
    """What all files of a checkpoint say alike, as far as they say it."""
    said = {**plain_arguments(content), "iteration": content.get("iteration")}
    sizes = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
    return {key: said[key] for key in ("iteration", *sizes) if isinstance(said.get(key), int)}


def _chunk_keys(content: Mapping[str, Any]) -> list[str]:
    """``model``, or ``model0``, ``model1``, ... as far as they are there without a gap."""
    if isinstance(content.get("model"), Mapping):
        return ["model"]
    keys: list[str] = []
    while isinstance(content.get(f"model{len(keys)}"), Mapping):
        keys.append(f"model{len(keys)}")
    return keys


def _is_staged(arguments: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether the run had stages: as its arguments say, or because the first file does not hold both ends."""
    stages = arguments.get("pipeline_model_parallel_size")
    if isinstance(stages, int):
        return stages > 1
    ends = {"decoder.final_layernorm.weight", "final_layernorm.weight"}
    return not any(ends & first[key].keys() for key in _chunk_keys(first))


def _rank_of(numbers: tuple[int, ...], staged: bool) -> Rank:
    if len(numbers) == 3:
        return Rank(*numbers)
    if len(numbers) == 1:
        return Rank(numbers[0], 0, 0)
    return Rank(numbers[0], numbers[1], 0) if staged else Rank(numbers[0], 0, numbers[1])
