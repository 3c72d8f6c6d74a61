"""What attention over several ranks does not do, it says, before anything is exchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardyard.ops import documents_attention


def attend(method: str, heads: int = 4, **settings):
    context: Any = SimpleNamespace(method=method, group=None, rank=0, size=4)
    q = torch.randn(1, heads, 2, 4)
    return documents_attention(torch.nn.Module(), q, q, q, None, doc_lens=(8,), context=context, **settings)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("ring", {"sliding_window": 3}, "ring has no sliding window.*use kvallgather or ulysses"),
        ("ring", {"dropout": 0.1}, "ring has no dropout.*use ulysses"),
        ("kvallgather", {"dropout": 0.1}, "kvallgather has no dropout.*use ulysses"),
    ],
)
def test_what_a_method_lacks(method, settings, message):
    with pytest.raises(NotImplementedError, match=message):
        attend(method, **settings)


def test_ulysses_needs_heads_that_the_ranks_divide():
    with pytest.raises(ValueError, match="4 ranks of a sequence do not divide 6 attention heads"):
        attend("ulysses", heads=6)


def test_dropout_does_not_go_with_sinks():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=r"dropout.*sinks"):
        documents_attention(torch.nn.Module(), q, q, q, None, dropout=0.1, s_aux=torch.zeros(2))


def test_documents_of_a_shared_sequence_must_be_told():
    q = torch.randn(1, 4, 2, 4)
    context: Any = SimpleNamespace(method="ring", group=None, rank=0, size=4)
    with pytest.raises(ValueError, match="lengths of the documents"):
        documents_attention(torch.nn.Module(), q, q, q, None, context=context)
