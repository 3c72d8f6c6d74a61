"""Attention that stops at a document's end.

Rows of a micro-batch lie end to end in one sequence [1, T]. This runs one causal scaled-dot-product
attention per
document, so no mask matrix exists and no document sees another. It is registered with transformers under
`NAME`; the
lengths travel as the private keyword `doc_lens` from the model's forward to here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "shardyard_documents"

# Arguments that change the result and that this function does not implement.
_UNSUPPORTED = ("s_aux", "softcap", "position_bias")


def documents_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    doc_lens: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Raises:
        NotImplementedError: a mask, or an argument that this attention would have to honour and does not.
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise NotImplementedError(f"{NAME} does not take {', '.join(unsupported) or 'an attention mask'}")
    lens = list(doc_lens) if doc_lens is not None else [query.shape[2]]
    outputs = [
        _attend(q, k, v, scaling, dropout, sliding_window)
        for q, k, v in zip(query.split(lens, 2), key.split(lens, 2), value.split(lens, 2), strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _attend(q, k, v, scaling: float | None, dropout: float, sliding_window: int | None) -> torch.Tensor:
    length = q.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


AttentionInterface.register(NAME, documents_attention)
