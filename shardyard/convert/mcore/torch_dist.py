"""The ``torch_dist`` layout of current Megatron-core, for reading: a DCP folder that knows no ranks.

Tensors are whole, whatever the run's sizes were, under the names of a model on one rank; layers of one kind
are stacked in the first dimension, experts in the next (megatron-core 0.16.1, dist_checkpointing, modules'
``sharded_state_dict``). Names of norms are Transformer Engine's for most models, whoever wrote them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardyard.checkpoint.safe_reader import MetadataUnpickler, load_metadata
from shardyard.convert.mcore.discovery import Given
from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.layout import McoreLayout, Rank, parse_list
from shardyard.convert.mcore.pickles import Inert, load_pt, plain_arguments
from shardyard.convert.mcore.pieces import Link, Plan
from shardyard.convert.mcore.rank_files import iteration_folder
from shardyard.convert.mcore.read import McoreWeights, hugging_face_order, read_config
from shardyard.convert.mcore.sizes import check_shapes
from shardyard.convert.pickled import cause_of
from shardyard.convert.weights import Facts, Weights
from shardyard.errors import UserError

_INERT = re.compile(r"(megatron\.|torch\.distributed\.checkpoint\.planner$)")
"""The plans of the ranks that wrote it are kept in the metadata; nobody needs them."""
_OTHER = re.compile(r"(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)\b")
_NO_WEIGHTS = re.compile(r".*(\._extra_state(/.*)?|\.inv_freq|\.local_tokens_per_expert)$")
_ALIASES = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
)


class _Place(NamedTuple):
    """A tensor within a stored one: ``index`` picks a layer, an expert, or both."""

    key: str
    index: tuple[int, ...]


class TorchDistWeights:
    """`Weights` of a ``torch_dist`` checkpoint.

    Optimizer and random states are not touched; entries of bytes are never unpickled.

    Raises:
        UserError: no such folder, another back end, a file is missing, damaged or would run code, a tensor is
            missing or left over, or does not fit the model.
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
        self._files = iteration_folder(folder)
        _check_back_end(self._files)
        self.model = Model.of(self.config, model_type)
        self._metadata = load_metadata(self._files, _PlansInert)
        self._keys = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _OTHER.match(key)
        }
        self._plan = Plan(self.model, self._layout(given or Given()), self._mtp_layers())
        self._links = self._find_links()
        self._places = {link.name: self._place(link) for link in self._links}
        self._check_used()
        self._sources = {name: (link, which) for link in self._links for which, name in enumerate(link.hf)}
        self.facts = self._find_facts()
        check_shapes(self.model, self.facts, folder)

    def read(self, name: str) -> torch.Tensor:
        """See `Weights.read`."""
        link, which = self._sources[self._plan.copies().get(name, name)]
        return self._whole(link, which, self._tensor(self._places[link.name])).contiguous()

    def _layout(self, given: Given) -> McoreLayout:
        noops = given.noop_layers
        if noops is None:
            path = self._files / "common.pt"
            said = plain_arguments(load_pt(path)).get("noop_layers") if path.exists() else None
            noops = parse_list(said, f"{path}: noop_layers") if isinstance(said, str) else ()
        layout = McoreLayout(noop_layers=noops)
        layout.check(self.model)
        return layout

    def _mtp_layers(self) -> int:
        layers = 0
        while any(key.startswith(f"mtp.layers.{layers}.") for key in self._keys):
            layers += 1
        return layers

    def _find_links(self) -> list[Link]:
        found = self._plan.links(Rank(0, 0, 0))[0]
        names = [name for link in found for name in link.hf]
        assert len(names) == len(set(names)), "on one rank no tensor is stored twice"
        return found

    def _place(self, link: Link) -> _Place:
        for place in _candidates(link.name):
            entry = self._keys.get(place.key)
            if entry is None:
                continue
            for dimension, index in enumerate(place.index):
                if index >= entry.size[dimension]:
                    raise UserError(
                        f"{self._files}: {place.key} of shape {list(entry.size)} holds no {link.name}; the "
                        "checkpoint has fewer layers or experts than config.json"
                    )
            return place
        raise UserError(f"{self._files / '.metadata'} lacks {link.name}, which the model has")

    def _check_used(self) -> None:
        """Nothing of the model is left behind: neither a tensor nor a layer or expert of a stacked one."""
        taken: dict[str, set[tuple[int, ...]]] = {}
        for place in self._places.values():
            taken.setdefault(place.key, set()).add(place.index)
        for key, entry in self._keys.items():
            if _NO_WEIGHTS.match(key) or (self.model.tied and key == "output_layer.weight"):
                continue
            depth = len(next(iter(taken.get(key, {()}))))
            stored = torch.Size(entry.size[:depth]).numel()
            if key not in taken or stored != len(taken[key]):
                raise UserError(
                    f"{self._files}: {key} of shape {list(entry.size)} is more than a "
                    f"{self.model.model_type} with this config.json has"
                )

    def _find_facts(self) -> dict[str, Facts]:
        names = [*self._sources, *self._plan.copies()]
        layers = self.model.layers + self._plan.mtp_layers
        facts = {}
        for name in sorted(names, key=lambda name: hugging_face_order(name, layers)):
            link, which = self._sources[self._plan.copies().get(name, name)]
            place = self._places[link.name]
            entry = self._keys[place.key]
            shape = entry.size[len(place.index) :]
            piece = torch.empty(shape, dtype=entry.properties.dtype, device="meta")
            whole = self._whole(link, which, piece)
            facts[name] = (tuple(whole.shape), whole.dtype)
        return facts

    def _whole(self, link: Link, which: int, piece: torch.Tensor) -> torch.Tensor:
        try:
            return link.rule.whole([piece], which)
        except (ValueError, RuntimeError) as error:
            key = self._places[link.name].key
            raise UserError(f"{self._files}: {key} does not fit the model: {error}") from error

    def _tensor(self, place: _Place) -> torch.Tensor:
        """One layer's (expert's) part of a stored tensor, from the chunks that hold it."""
        entry = self._keys[place.key]
        depth = len(place.index)
        start = [*place.index, *(0 for _ in entry.size[depth:])]
        stop = [*(index + 1 for index in place.index), *entry.size[depth:]]
        found = torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            lows = [max(a, offset) for a, offset in zip(start, chunk.offsets, strict=True)]
            highs = [min(b, o + s) for b, o, s in zip(stop, chunk.offsets, chunk.sizes, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(lows, highs, chunk.offsets, strict=True))
            here = tuple(slice(a - s, b - s) for a, b, s in zip(lows, highs, start, strict=True))
            part = self._chunk(place.key, chunk)[there]
            found[here] = part
            filled += part.numel()
        if filled != found.numel():
            raise UserError(f"{self._files}: {place.key} has gaps; parts of it were not saved")
        return found[(0,) * depth]

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = (self._metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise UserError(f"{self._files / '.metadata'} does not say where {key} is")
        path = self._files / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                stored = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"{path} is missing; {key} is in it") from None
        except Exception as error:  # damaged data raises nearly anything
            raise UserError(f"{path} is not read where {key} is: {cause_of(error)}") from error
        if not isinstance(stored, torch.Tensor) or stored.shape != chunk.sizes:
            raise UserError(f"{path} is damaged: {key} is not the tensor that .metadata describes")
        return stored


def open_mcore(
    folder: Path,
    config: Mapping[str, Any] | Path | None = None,
    *,
    model_type: str | None = None,
    given: Given | None = None,
) -> Weights:
    """A Megatron-core checkpoint of either layout: a folder for each rank, or ``torch_dist``.

    Raises:
        UserError: see `McoreWeights` and `TorchDistWeights`.
    """
    kind = TorchDistWeights if is_torch_dist(folder) else McoreWeights
    return kind(folder, config, model_type=model_type, given=given)


def is_torch_dist(folder: Path) -> bool:
    """Whether ``folder`` (of a checkpoint, or of its newest iteration) is of this layout."""
    try:
        found = iteration_folder(folder)
    except UserError:
        return False
    return any((found / name).exists() for name in (".metadata", "metadata.json"))


def _candidates(name: str) -> Iterator[_Place]:
    """Where a tensor of a model on one rank may be, by the names of the modules that saved it."""
    names = [name]
    for one, other in _ALIASES:
        names += [
            name.removesuffix(end) + new for end, new in ((one, other), (other, one)) if name.endswith(end)
        ]
    for stacked, found in product((True, False), names):
        index: list[int] = []
        layer = re.match(r"(decoder\.layers\.)(\d+)\.(.*)", found)
        if stacked and layer:
            found = layer[1] + layer[3]
            index.append(int(layer[2]))
        elif stacked:
            continue
        expert = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)", found)
        if expert:
            found = f"{expert[1]}.experts.{expert[3]}"
            index.append(int(expert[2]))
        yield _Place(found, tuple(index))


def _check_back_end(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        back_end = json.loads(path.read_text(encoding="utf-8")).get("sharded_backend")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the checkpoint is not complete") from None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not read: {error}") from error
    if back_end != "torch_dist":
        raise UserError(f"{path}: the back end is {back_end!r}; only torch_dist is read")


class _PlansInert(MetadataUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Inert if _INERT.match(module) else super().find_class(module, name)
