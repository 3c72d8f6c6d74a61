"""ChunkMBS: a module runs over a few rows of the micro-batch at a time, and its outputs are put together.

Rows lie end to end in one sequence [1, T], so a piece is a stretch of ``chunk_mbs`` documents, cut at their
ends, which attention never looks across: the result is the same. What a module needs inside is then bounded
by the longest piece, above all with recompute, where each piece is computed again on its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from shardyard.config import ParallelConfig
from shardyard.errors import UserError
from shardyard.parallel.blocks import select_blocks
from shardyard.parallel.experts.select import fused_experts
from shardyard.parallel.meshes import Meshes

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Pieces:
    """How the calls of one module are cut."""

    module: str
    rows: int
    positions: tuple[int, ...]
    """Positional arguments that are cut."""
    keywords: tuple[str, ...]

    def lengths(self, doc_lens: Sequence[int]) -> list[tuple[int, ...]]:
        """The documents of each piece."""
        return [tuple(doc_lens[start : start + self.rows]) for start in range(0, len(doc_lens), self.rows)]

    def cut(
        self, args: Sequence[Any], kwargs: dict[str, Any], sizes: list[int]
    ) -> list[tuple[list[Any], dict[str, Any]]]:
        """The arguments of each piece; what is not named is the same for all.

        Raises:
            UserError: an argument that is not named has one entry per token.
        """
        tokens = sum(sizes)
        for name, value in [*enumerate(args), *kwargs.items()]:
            if name not in self.positions and name not in self.keywords and _has_tokens(value, tokens):
                key = "arg_indexs" if isinstance(name, int) else "kwarg_names"
                raise UserError(
                    f"parallel.chunk_mbs_{key}: argument {name} of {self.module} has a value per token and "
                    f"is not listed, so its pieces would not fit the others; add {name}"
                )
        columns = [_cut(v, sizes) if i in self.positions else [v] * len(sizes) for i, v in enumerate(args)]
        named = {k: _cut(v, sizes) if k in self.keywords else [v] * len(sizes) for k, v in kwargs.items()}
        return [
            ([column[i] for column in columns], {key: column[i] for key, column in named.items()})
            for i in range(len(sizes))
        ]


def apply_chunks(model: nn.Module, parallel: ParallelConfig, meshes: Meshes) -> None:
    """Make the modules of ``chunk_mbs_modules`` run over pieces of ``chunk_mbs`` rows.

    After recompute, so that each piece recomputes alone; before FSDP, whose hooks gather a unit once for all
    pieces.

    Raises:
        UserError: patterns that match nothing, a module that does not learn where documents end, one inside
            which ranks exchange something, or ranks that hold a part of each sequence only.
    """
    if not parallel.enable_chunk_batch:
        return
    if meshes.layout.tp > 1 or meshes.layout.cp > 1:
        raise UserError(
            "parallel.enable_chunk_batch: pieces are whole documents, and with parallel.tp_size or "
            "parallel.cp_size a rank holds a part of each sequence; leave it out, recompute bounds memory too"
        )
    positions, keywords = parallel.chunk_mbs_arg_indexs, parallel.chunk_mbs_kwarg_names
    if 0 in positions:  # the same argument, which a layer gets by position and its attention by name
        keywords = (*keywords, "hidden_states")
    for name, module in select_blocks(model, parallel, "chunk_mbs_modules"):
        _refuse_unsuited(name, module, model, parallel, meshes)
        pieces = Pieces(name, parallel.chunk_mbs, positions, keywords)
        module.forward = functools.partial(_in_pieces, module.forward, pieces)


def _refuse_unsuited(
    name: str, module: nn.Module, model: nn.Module, parallel: ParallelConfig, meshes: Meshes
) -> None:
    key = f"parallel.chunk_mbs_modules: {name}"
    accepted = inspect.signature(type(module).forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in accepted):
        raise UserError(f"{key} does not learn where documents end; name whole layers, or their attention")
    inside = set(module.modules()) - {module}
    units = {"fsdp_modules": select_blocks(model, parallel, "fsdp_modules")}
    if parallel.ignored_modules:
        units["ignored_modules"] = select_blocks(model, parallel, "ignored_modules")
    if meshes.layout.ep > 1:
        units["ep_modules"] = list(fused_experts(model))
    for field, blocks in units.items():
        if met := [other for other, child in blocks if child in inside]:
            raise UserError(
                f"{key} holds {met[0]} of parallel.{field}, for which ranks would exchange something in each "
                "piece, and their numbers of pieces differ; name modules beside it, or leave one of them out"
            )


def _in_pieces(forward: Callable[..., Any], pieces: Pieces, *args: Any, **kwargs: Any) -> Any:
    """``forward`` over pieces; as it is where documents are not known, for then there is one document."""
    doc_lens = kwargs.get("doc_lens")
    if doc_lens is None or len(doc_lens) <= pieces.rows:
        return forward(*args, **kwargs)
    documents = pieces.lengths(doc_lens)
    sizes = [sum(lens) for lens in documents]
    calls = pieces.cut(args, {k: v for k, v in kwargs.items() if k != "doc_lens"}, sizes)
    outputs = [
        forward(*its_args, **its_kwargs, doc_lens=lens)
        for (its_args, its_kwargs), lens in zip(calls, documents, strict=True)
    ]
    return _join(outputs, sizes)


def _has_tokens(value: Any, tokens: int) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_tokens(item, tokens) for item in value)
    return isinstance(value, torch.Tensor) and value.shape[:2] == (1, tokens)


def _cut(value: Any, sizes: list[int]) -> list[Any]:
    """The part of each piece: of a tensor [1, T, ...], or of each such tensor of a tuple."""
    if isinstance(value, (tuple, list)):
        columns = [_cut(item, sizes) for item in value]
        return [type(value)(column[i] for column in columns) for i in range(len(sizes))]
    if not _has_tokens(value, sum(sizes)):
        return [value] * len(sizes)
    return list(value.split(sizes, SEQUENCE_DIM))


def _join(outputs: list[Any], sizes: list[int]) -> Any:
    """The outputs of all pieces as one: tensors end to end, tuples item by item, what has no tokens once."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_join([output[i] for output in outputs], sizes) for i in range(len(first)))
    if not isinstance(first, torch.Tensor):
        return first
    dim = SEQUENCE_DIM if _has_tokens(first, sizes[0]) else 0
    return torch.cat(outputs, dim)
