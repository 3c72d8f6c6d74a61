"""Attention beside a compiled layer: eager, so that no graph depends on where documents end.

The number of documents and their lengths change with every micro-batch. Numbers that a graph has seen are
guarded, and each new number of documents would be a compilation. So the compiler gets to see one opaque
object, and leaves the attention to eager code: one break of the graph in each layer, at an operator that is a
kernel of its own in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from shardyard.ops.attention import NAME


@dataclass(frozen=True)
class DocumentLengths:
    """The keyword ``doc_lens`` on its way through compiled layers, which see its type and nothing else."""

    lens: tuple[int, ...]

    @classmethod
    def hidden(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """``arguments`` of a model's forward with their ``doc_lens``, if there are any, hidden."""
        doc_lens: Sequence[int] | None = arguments.get("doc_lens")
        return arguments if doc_lens is None else arguments | {"doc_lens": cls(tuple(doc_lens))}


def leave_attention_out_of_graphs() -> None:
    """Register the attention of documents anew, under its name, as one that no compiler looks into.

    For uncompiled models in the same process nothing changes.
    """
    attention: Any = AttentionInterface()[NAME]
    if getattr(attention, "_takes_hidden_lengths", False):
        return

    def outside(*args: Any, doc_lens: DocumentLengths | Sequence[int] | None = None, **kwargs: Any) -> Any:
        lens = doc_lens.lens if isinstance(doc_lens, DocumentLengths) else doc_lens
        return attention(*args, doc_lens=lens, **kwargs)

    registered: Any = torch.compiler.disable(outside, reason="documents end elsewhere in each micro-batch")
    registered._takes_hidden_lengths = True
    AttentionInterface.register(NAME, registered)
