"""A Megatron-core checkpoint folder as the weights of a Hugging Face model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardyard.convert.mcore.discovery import Given, discover
from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.layout import McoreLayout, Rank
from shardyard.convert.mcore.pieces import WORD_EMBEDDINGS, Link, Plan
from shardyard.convert.mcore.rank_files import RankFiles, iteration_folder
from shardyard.convert.mcore.rules import Rule
from shardyard.convert.mcore.sizes import check_shapes
from shardyard.convert.weights import Facts, same_bits
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.convert")

_NO_WEIGHTS = re.compile(r".*(\._extra_state\d*|\.inv_freq|\.local_tokens_per_expert)$")
"""Entries of a model's state that are no weights."""


class _Source(NamedTuple):
    """Where the pieces of one Hugging Face tensor are, in whose tensors, and the rule that joins them."""

    ranks: tuple[Rank, ...]
    chunk: int
    names: tuple[str, ...]
    rule: Rule
    which: int


class McoreWeights:
    """`Weights` of a Megatron-core folder.

    How it is cut is found out from the rank folders, the checkpoint's arguments and the names of its tensors;
    ``given`` says what these do not tell. Optimizer and random states in the files are not touched.

    Raises:
        UserError: no such folder, a rank's folder or tensor is missing, damaged or does not fit the model, or
            a file holds tensors that the model of this config.json does not have.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | Path | None = None,
        *,
        model_type: str | None = None,
        given: Given | None = None,
    ) -> None:
        self.folder = folder
        self.config = read_config(folder, config)
        model = Model.of(self.config, model_type)
        given = given or Given()
        staged = not model.experts or given.schedules_method is not None
        self._files = RankFiles(iteration_folder(folder), staged=staged)
        layout, mtp_layers = discover(self._files, model, given)
        self._plan = Plan(model, layout, mtp_layers)
        self._sources = self._find_sources()
        self._check_tied()
        self.facts = self._find_facts()
        check_shapes(model, self.facts, folder)

    @property
    def layout(self) -> McoreLayout:
        """How the checkpoint is cut."""
        return self._plan.layout

    @property
    def model(self) -> Model:
        """The model's sizes."""
        return self._plan.model

    def read(self, name: str) -> torch.Tensor:
        """See `Weights.read`."""
        source = self._sources[self._plan.copies().get(name, name)]
        return self._joined(source, self._pieces(source)).contiguous()

    def _pieces(self, source: _Source) -> list[torch.Tensor]:
        return [self._tensor(rank, source.chunk, name) for name in source.names for rank in source.ranks]

    def _find_sources(self) -> dict[str, _Source]:
        shards: dict[str, dict[int, tuple[Rank, int, Link, int]]] = {}
        apart: list[str] = []
        for rank in self._plan.layout.ranks():
            for chunk, links in self._plan.links(rank).items():
                self._check_names(rank, chunk, links)
                for link in links:
                    first = shards.get(link.hf[0], {}).get(link.index)
                    if (
                        first is not None
                        and (first[1], first[2].name) == (chunk, link.name)
                        and not self._is_replica(link, chunk, rank, first[0])
                    ):
                        apart.append(link.name)
                    for which, name in enumerate(link.hf):
                        shards.setdefault(name, {}).setdefault(link.index, (rank, chunk, link, which))
        if apart:
            logger.warning(
                "%s: %d norms of queries and keys, such as %s, differ between ranks; those of the first rank "
                "are taken", self.folder, len(apart), apart[0],
            )  # fmt: skip
        return {name: _source(found) for name, found in shards.items()}

    def _is_replica(self, link: Link, chunk: int, rank: Rank, first: Rank) -> bool:
        """Whether two ranks that hold the same vector do. False only where training may have let them drift:
        some trainers do not sum the gradients of these norms over the ranks.

        Raises:
            UserError: they differ elsewhere.
        """
        mine, other = (self._tensor(one, chunk, link.name) for one in (rank, first))
        if mine.ndim != 1 or same_bits(mine, other):  # larger ones would be read once for each copy
            return True
        if re.search(r"\.[qk]_layernorm\.weight$", link.name):
            return False
        raise UserError(
            f"{self._files.path(rank)}: {link.name} is not that of {self._files.path(first)}, though both "
            "ranks hold the same tensor; are these files of one checkpoint?"
        )

    def _check_names(self, rank: Rank, chunk: int, links: list[Link]) -> None:
        there = self._chunk(rank, chunk)
        path = self._files.path(rank)
        wanted = {link.name for link in links}
        for name in wanted:
            if not isinstance(there.get(name), torch.Tensor):
                raise UserError(f"{path} lacks {name}, which this rank of the layout has")
        known = wanted | ({"output_layer.weight"} if self.model.tied else set())
        extra = [name for name in there if name not in known and not _NO_WEIGHTS.match(name)]
        extra = [name for name in extra if isinstance(there[name], torch.Tensor)]
        if extra:
            raise UserError(
                f"{path} holds {extra[0]}, for which a {self.model.model_type} with this config.json "
                "has no place"
            )

    def _check_tied(self) -> None:
        """A head of its own beside a config.json that ties it would be lost without a word."""
        if not self.model.tied:
            return
        stage, chunk = self.layout.last(self.model)
        for rank in self.layout.ranks():
            if rank.pp != stage or rank.ep:
                continue
            head = self._chunk(rank, chunk).get("output_layer.weight")
            first = Rank(rank.tp, 0, rank.ep)
            if head is not None and not same_bits(head, self._tensor(first, 0, WORD_EMBEDDINGS)):
                raise UserError(
                    f"{self._files.path(rank)}: output_layer.weight is not the embedding, but config.json "
                    "has tie_word_embeddings; set it to false to keep both"
                )

    def _find_facts(self) -> dict[str, Facts]:
        names = [*self._sources, *self._plan.copies()]
        layers = self.model.layers + self._plan.mtp_layers
        facts = {}
        for name in sorted(names, key=lambda name: hugging_face_order(name, layers)):
            source = self._sources[self._plan.copies().get(name, name)]
            whole = self._joined(source, [piece.to(device="meta") for piece in self._pieces(source)])
            facts[name] = (tuple(whole.shape), whole.dtype)
        return facts

    def _joined(self, source: _Source, pieces: list[torch.Tensor]) -> torch.Tensor:
        try:
            return source.rule.whole(pieces, source.which)
        except (ValueError, RuntimeError) as error:
            path = self._files.path(source.ranks[0])
            raise UserError(f"{path}: {source.names[0]} does not fit the model: {error}") from error

    def _tensor(self, rank: Rank, chunk: int, name: str) -> torch.Tensor:
        return self._chunk(rank, chunk)[name]

    def _chunk(self, rank: Rank, chunk: int) -> Mapping[str, Any]:
        return self._files.chunk(rank, self._plan.chunk_key(chunk))


def _source(shards: dict[int, tuple[Rank, int, Link, int]]) -> _Source:
    ranks = tuple(shards[index][0] for index in sorted(shards))
    _, chunk, link, which = shards[0]
    return _Source(ranks, chunk, (link.name, *link.also), link.rule, which)


def hugging_face_order(name: str, layers: int) -> int:
    """Sorts names: embedding, layer 0, 1, ..., norm, head."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return int(parts[2])
    return {"model.embed_tokens.weight": -1, "model.norm.weight": layers}.get(name, layers + 1)


def read_config(folder: Path, config: Mapping[str, Any] | Path | None) -> Mapping[str, Any]:
    """config.json as given, of the folder given, or of the checkpoint's own folder.

    Raises:
        UserError: there is none, or it is no JSON object.
    """
    if isinstance(config, Mapping):
        return config
    path = (config or folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; name the folder of the model's config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object")
    return found
