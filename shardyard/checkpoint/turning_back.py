"""What the tensors of a model become in its files, worked out on meta tensors.

transformers turns them back; nearly all keep their bytes and at most change their name, so that any rows of
them can be written on their own. The fused experts of a layer become tensors of each expert, and some experts
at a time will do as well. What else there is is turned back whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.core_model_loading import revert_weight_conversion

from shardyard.checkpoint.hf_files import Facts
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors that are turned back together.

    ``form`` says in which parts that may happen:
        same: the one input has the bytes of the one output, so any rows may.
        rows: row i of the one input becomes ``names[i]``, whatever the other rows are.
        whole: all inputs become ``names[0]`` together.
    """

    inputs: tuple[str, ...]
    form: Literal["same", "rows", "whole"]
    names: tuple[tuple[str, ...], ...]
    facts: Mapping[str, Facts]
    """Of each name on disk, with the dtype that it has in the model."""

    def turned_back(
        self, model: Any, tensors: dict[str, torch.Tensor], first_row: int = 0
    ) -> dict[str, torch.Tensor]:
        """The tensors on disk that come of the inputs, or of their rows from ``first_row`` on."""
        if self.form == "same":
            return {self.names[0][0]: tensors[self.inputs[0]]}
        on_disk = revert_weight_conversion(model, tensors)
        if self.form == "whole":
            return on_disk
        rows = len(tensors[self.inputs[0]])
        renamed: dict[str, torch.Tensor] = {}
        for row in range(rows):
            for counted, name in zip(self.names[row], self.names[first_row + row], strict=True):
                renamed[name] = on_disk[counted]
        return renamed


def units_of(model: Any, facts: Mapping[str, Facts]) -> list[Unit]:
    """All units of a model, in the order of ``facts``; ``model`` is any part of it that knows its config.

    Raises:
        UserError: the model's layers cannot be turned back one by one.
    """
    units: list[Unit] = []
    checked: dict[tuple[str, tuple[int, ...]], bool] = {}
    try:
        for group in _layers(facts):
            units += _units_of_layer(model, {name: facts[name] for name in group}, checked)
        whole = _shapes(revert_weight_conversion(model, on_meta(facts)))
    except Exception as error:  # whatever a conversion of transformers raises
        raise UserError(f"a {model.config.model_type} model cannot be turned back: {error}") from error
    found = [(name, shape) for unit in units for name, (shape, _) in unit.facts.items()]
    if dict(found) != whole or len(found) != len(whole):
        raise UserError(f"the layers of a {model.config.model_type} model cannot be turned back one by one")
    return units


def on_meta(facts: Mapping[str, Facts]) -> dict[str, torch.Tensor]:
    """Tensors without memory."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in facts.items()}


def _layers(names: Iterable[str]) -> list[list[str]]:
    """Tensors that one conversion may need together: a layer's, then the rest one by one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, []).append(name)
    return list(layers.values())


def _units_of_layer(
    model: Any, facts: dict[str, Facts], checked: dict[tuple[str, tuple[int, ...]], bool]
) -> list[Unit]:
    """One by one where that gives what the layer gives; else the layer is one unit."""
    joined = revert_weight_conversion(model, on_meta(facts))
    try:
        units = [_unit_of(model, name, kind, checked) for name, kind in facts.items()]
    except Exception as error:  # a conversion that needs its partners
        logger.debug("%s are turned back together: %s", min(facts), error)
        units = []
    found = {name: shape for unit in units for name, (shape, _) in unit.facts.items()}
    if found == _shapes(joined) and sum(len(unit.facts) for unit in units) == len(joined):
        return units
    return [Unit(tuple(facts), "whole", (tuple(joined),), _facts(joined))]


def _unit_of(model: Any, name: str, kind: Facts, checked: dict[tuple[str, tuple[int, ...]], bool]) -> Unit:
    given = on_meta({name: kind})
    on_disk = revert_weight_conversion(model, given)
    # The very object comes back, so nothing was done to its numbers.
    if len(on_disk) == 1 and next(iter(on_disk.values())) is given[name]:
        return Unit((name,), "same", (tuple(on_disk),), _facts(on_disk))
    by_row = _names_by_row(model, name, kind, on_disk)
    if by_row is not None:
        key = re.sub(r"\d+", "*", name), kind[0]
        if key not in checked:
            checked[key] = _rows_are_independent(model, name, kind[0], by_row)
        if checked[key]:
            ordered = [each for row in by_row for each in row]
            return Unit((name,), "rows", by_row, _facts({each: on_disk[each] for each in ordered}))
    return Unit((name,), "whole", (tuple(on_disk),), _facts(on_disk))


def _names_by_row(
    model: Any, name: str, kind: Facts, on_disk: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], ...] | None:
    """The names that each row becomes, where they differ by a number; None where it is not so."""
    shape, dtype = kind
    if not shape or not shape[0]:
        return None
    try:
        first = revert_weight_conversion(model, on_meta({name: ((1, *shape[1:]), dtype)}))
    except Exception as error:  # it needs all rows
        logger.debug("%s is turned back whole: %s", name, error)
        return None
    columns = [_numbered(each, shape[0], on_disk.keys()) for each in first]
    by_row = tuple(zip(*(column for column in columns if column), strict=True))
    distinct = {each for row in by_row for each in row}
    complete = distinct == on_disk.keys() and len(first) * shape[0] == len(on_disk)
    if not complete or _shapes(first) != {each: tuple(on_disk[each].shape) for each in first}:
        return None
    return by_row


def _numbered(first: str, count: int, known: Iterable[str]) -> list[str] | None:
    """``first`` with its 0 replaced by each number below ``count``, at the place where all are ``known``."""
    parts, known = first.split("."), set(known)
    for place, part in enumerate(parts):
        names = [".".join([*parts[:place], str(number), *parts[place + 1 :]]) for number in range(count)]
        if part == "0" and known.issuperset(names):
            return names
    return None


def _rows_are_independent(
    model: Any, name: str, shape: tuple[int, ...], by_row: tuple[tuple[str, ...], ...]
) -> bool:
    """Tried out with numbers, on a tensor that is thin in one of its dimensions, for the sake of memory."""
    rows = shape[0]
    for thin in range(len(shape) - 1, 0, -1):
        small = [1 if dim == thin else length for dim, length in enumerate(shape)]
        probe = torch.arange(torch.Size(small).numel()).reshape(small)
        try:
            whole = revert_weight_conversion(model, {name: probe})
            for row in sorted({0, rows // 2, rows - 1}):
                alone = revert_weight_conversion(model, {name: probe[row : row + 1]})
                pairs = zip(by_row[0], by_row[row], strict=True)
                if not all(torch.equal(alone[counted], whole[each]) for counted, each in pairs):
                    return False
        except Exception as error:  # it has to be cut along the dimension that is thin here
            logger.debug("%s %s: %s", name, small, error)
            continue
        return True
    return False


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Facts]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
