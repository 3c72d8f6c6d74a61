"""Attention that stops at a document's end.

Rows of a micro-batch lie end to end in one sequence [1, T]. This runs one causal attention per document, so
no mask matrix exists and no document sees another. It is registered with transformers under `NAME`. The
lengths travel as the private keyword `doc_lens` from the model's forward to here, and where several ranks
share the sequence, so does `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from shardyard.ops.context import ContextShare, context_attention
from shardyard.ops.documents import attend_documents

NAME = "shardyard_documents"

KERNEL = "documents_kernel"
"""The attribute of an attention module that holds the kernel which was chosen for it (attention_kernels.py);
without it there is one attention of PyTorch per document.
"""

# Arguments that change the result and that this function does not implement.
_UNSUPPORTED = ("softcap", "position_bias")


def documents_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    doc_lens: Sequence[int] | None = None,
    context: ContextShare | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D of value].

    ``s_aux`` [H] are attention sinks: a score per head that takes part in the softmax and is then dropped.
    With ``context`` T counts this rank's tokens, and ``doc_lens`` those of all ranks that share the sequence.

    Raises:
        NotImplementedError: a mask, or an argument that this attention would have to honour and does not.
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise NotImplementedError(f"{NAME} does not take {', '.join(unsupported) or 'an attention mask'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    settings: dict[str, Any] = dict(
        scale=scale, dropout=dropout, window=sliding_window, sinks=s_aux, kernel=getattr(module, KERNEL, None)
    )
    if context is None:
        lens = doc_lens if doc_lens is not None else [query.shape[2]]
        output = attend_documents(query, key, value, doc_lens=lens, **settings)
    else:
        if doc_lens is None:
            raise ValueError(f"{NAME} over several ranks needs the lengths of the documents")
        output = context_attention(context, query, key, value, doc_lens=doc_lens, **settings)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, documents_attention)
