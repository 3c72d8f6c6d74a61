"""Two names for each tensor: that of the files and that of transformers' model in memory.

A family may keep in memory what its files hold apart (experts one by one, joined to [E, 2I, H]) or call it
otherwise. transformers' own conversions say how, in both directions. They are run a unit at a time: the
tensors that one conversion needs together, most often one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from shardyard.checkpoint.state import persistent_tensors
from shardyard.checkpoint.weights_only import tied_names
from shardyard.convert.weights import Facts
from shardyard.errors import UserError, opening
from shardyard.models.causal_lm import base_class

_LAYER = re.compile(r"(.*?\.)\d+\.")
"""How the name of a tensor in a stack of layers begins."""
_NO_WEIGHTS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of the names of constants that older files store in each layer."""


class Unit(NamedTuple):
    """Tensors that are converted together: ``sources`` of one side become ``results`` of the other."""

    sources: tuple[str, ...]
    results: Mapping[str, Facts]


class _Move(NamedTuple):
    """What transformers calls a file's tensor, and the pattern of the conversion that takes it, if any."""

    renamed: str
    pattern: str | None


class ModelNames:
    """The names of the model that a config.json makes; the model itself exists without memory.

    Raises:
        UserError: transformers has no causal language model of that type.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.config, self.folder = config, folder
        self._model = _meta_model(config, folder)
        held = persistent_tensors(self._model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        """Of the model's tensors in memory, tied ones under their first name."""
        self.buffers = self.shapes.keys() & {name for name, _ in self._model.named_buffers()}
        self.tied = tied_names(self._model)
        """Other name of a tied tensor -> the name that counts."""
        # As revert_weight_conversion for a model without files: old files' names are not restored.
        self._model._weight_conversions = [
            one
            for one in get_model_conversion_mapping(self._model, add_legacy=False)
            if not isinstance(one, PrefixChange)
        ]
        forward = get_model_conversion_mapping(self._model)
        converters = [one for one in forward if isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._moves: dict[str, _Move] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelNames, (self.config, self.folder), {"_moves": self._moves}

    def units_to_disk(self, held: Mapping[str, Facts]) -> list[Unit]:
        """How the tensors in memory, of these shapes and dtypes, become those of files."""
        reverse = [one.reverse_transform() for one in self._model._weight_conversions[::-1]]
        converters = [one for one in reverse if isinstance(one, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in held:
            groups.setdefault(apply_converters(name, converters)[0], []).append(name)
        return [Unit(tuple(names), _facts(self.to_disk(_on_meta(names, held)))) for names in groups.values()]

    def to_disk(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one unit, turned back."""
        return revert_weight_conversion(self._model, tensors)

    def units_to_memory(self, on_disk: Mapping[str, Facts]) -> tuple[list[Unit], list[str]]:
        """How the tensors of files become those in memory, and the names that the model has no place for.

        Raises:
            UserError: the model wants tensors that the files lack, or of another shape, or has no place for
                some that belong to its layers.
        """
        groups: dict[str, list[str]] = {}
        dropped: list[str] = []
        for name, move in self._plan_moves(on_disk).items():
            if move is None:
                dropped.append(name)
            else:
                groups.setdefault(move.renamed, []).append(name)
        units = [
            Unit(tuple(names), _facts(self.to_memory(_on_meta(names, on_disk)))) for names in groups.values()
        ]
        self._check(units)
        self._refuse_lost(dropped, on_disk)
        return units, dropped

    def to_memory(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one unit of `units_to_memory` as the model holds them; empties ``tensors``.

        Raises:
            UserError: they do not fit together.
        """
        names = sorted(tensors, key=dot_natural_key)  # experts in their order
        moves = [self._moves[name] for name in names]
        first = moves[0]
        mapping: Any = (
            deepcopy(self._converters[first.pattern])
            if first.pattern
            else WeightRenaming(names[0], first.renamed)
        )
        for name, move in zip(names, moves, strict=True):
            mapping.add_tensor(move.renamed, name, move.pattern or name, tensors.pop(name))
        try:
            made = mapping.convert(first.renamed, model=self._model, config=self._model.config)
        except Exception as error:  # whatever an operation raises for shapes that it cannot join
            raise UserError(
                f"{self.folder}: {names[0]} and what belongs to it do not fit together: {_line(error)}"
            ) from error
        whole: dict[str, torch.Tensor] = {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }
        return {self.tied.get(name, name): tensor for name, tensor in whole.items()}

    def _plan_moves(self, on_disk: Mapping[str, Facts]) -> dict[str, _Move | None]:
        """By name of a file's tensor; None where the model has no place for it."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        known, prefix = self._model.state_dict(), self._model.base_model_prefix
        found: dict[str, _Move | None] = {}
        for name in sorted(on_disk, key=dot_natural_key):
            move = _Move(*rename_source_key(name, renamings, converters, prefix, known))
            if move.renamed not in known and name in known:  # it has its name in memory already
                move = _Move(*rename_source_key(name, [], [], prefix, known))
            found[name] = move if move.renamed in known else None
        self._moves = {name: move for name, move in found.items() if move}
        return found

    def _refuse_lost(self, dropped: list[str], on_disk: Mapping[str, Facts]) -> None:
        """What stands outside the layers (towers of other senses) may be left out, and layers of multi-token
        prediction; but a model that has no place for a part of a layer is another model.
        """
        stacks = {match[1] for name in self.shapes if (match := _LAYER.match(name))}
        for name in dropped:
            match = _LAYER.match(name)
            if match is None or match[1] not in stacks or name.endswith(_NO_WEIGHTS):
                continue
            if f"{match[0]}eh_proj.weight" not in on_disk:
                raise UserError(
                    f"{self.folder}: config.json's {self.config.get('model_type')} model has no place for "
                    f"{name}, one of {len(dropped)} tensors; is it the config.json of another model?"
                )

    def _check(self, units: list[Unit]) -> None:
        """All tensors of the model, in its shapes, each once."""
        made: dict[str, tuple[Facts, str]] = {}
        for unit in units:
            for name, facts in unit.results.items():
                if name in made:
                    raise UserError(
                        f"{self.folder}: {unit.sources[0]} and {made[name][1]} are the same tensor"
                    )
                made[name] = facts, unit.sources[0]
        for name, shape in self.shapes.items():
            if name not in made:
                raise UserError(
                    f"{self.folder}: the weights lack {name}, which config.json's "
                    f"{self.config.get('model_type')} model has"
                )
            (found, _), source = made[name]
            if found != shape:
                raise UserError(
                    f"{self.folder}: {source} makes a tensor {list(found)}, but config.json asks for "
                    f"{list(shape)} ({name})"
                )


def _meta_model(config: Mapping[str, Any], folder: Path) -> Any:
    kind: Any = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{folder}: config.json says model_type {kind!r}, which transformers does not know")
    try:
        parsed = CONFIG_MAPPING[kind].from_dict(dict(config))
        base, parsed = base_class(parsed, str(folder), trust_remote_code=False)
        with torch.device("meta"):
            model = base._from_config(parsed, dtype=torch.float32)
        model.tie_weights()
    except UserError as error:
        raise UserError(str(error).removeprefix("model.model_name_or_path: ")) from error
    except Exception as error:  # whatever a config class or a model's constructor raises
        raise UserError(f"{folder}: config.json makes no {kind} model: {_line(error)}") from error
    return model


def _on_meta(names: list[str], facts: Mapping[str, Facts]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(facts[name][0], dtype=facts[name][1], device="meta") for name in names}


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Facts]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {opening(error) or 'no message'}"
