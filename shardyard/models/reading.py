"""May the tensors of a checkpoint be read slice by slice?

transformers reads, of each tensor in a file, the slice that the model's own tensor has on this rank, and only
then joins, cuts or turns what the file holds apart. That is right when it happens along another dimension
than the one that ranks share; along the same one each rank gets rows of the wrong places, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Split

from shardyard.errors import UserError

_ALONG_ONE_DIMENSION = (Concatenate, Chunk, Split)


def refuse_scrambled(model: Any) -> None:
    """Compare the conversions of a parallelised model with its shards.

    Raises:
        UserError: a tensor that would be read wrongly on this layout.
    """
    parameters = dict(model.named_parameters())
    for converter in get_model_conversion_mapping(model):
        for operation in getattr(converter, "operations", None) or ():
            if isinstance(operation, MergeModulelist):  # whole experts go to the ranks that hold them
                continue
            for name in _targets(converter, parameters):
                shape, shared = parameters[name].shape, _shared_dimensions(parameters[name])
                dim = operation.dim % len(shape) if isinstance(operation, _ALONG_ONE_DIMENSION) else None
                if shared and (dim is None or dim in shared):
                    raise UserError(
                        f"model.model_name_or_path: files of a {model.config.model_type} model hold {name} "
                        f"{list(shape)} in another form ({type(operation).__name__}), and transformers reads "
                        f"it wrongly where ranks share its dimension {min(shared)}. Name its module in "
                        "parallel.ignored_modules, or train on one rank"
                    )


def _targets(converter: Any, parameters: dict[str, torch.Tensor]) -> Iterator[str]:
    patterns = [re.compile(pattern.replace("*", r"\d+")) for pattern in converter.target_patterns]
    return (name for name in parameters if any(pattern.search(name) for pattern in patterns))


def _shared_dimensions(parameter: torch.Tensor) -> set[int]:
    """The dimensions that more than one rank has a part of."""
    if not isinstance(parameter, DTensor):
        return set()
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return {p.dim % parameter.ndim for p, size in sizes if size > 1 and not p.is_replicate()}  # type: ignore[attr-defined]
