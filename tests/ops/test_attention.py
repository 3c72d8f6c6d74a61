"""Attention per document equals each document's own softmax, written out."""

from __future__ import annotations

import math

import pytest
import torch

from shardyard.ops import documents_attention


def by_hand(q, k, v, window=None):
    """One document, all heads: q [H, n, D], k and v [Hkv, n, D] -> [n, H, D]."""
    heads, length, width = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[0], 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(width)
    for i in range(length):
        for j in range(length):
            if j > i or (window is not None and i - j >= window):
                scores[:, i, j] = -math.inf
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lens", [(9,), (4, 5), (1, 7, 1)])
def test_each_document_attends_to_itself_only(lens, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    output, _ = documents_attention(
        torch.nn.Module(), q, k, v, None, scaling=1 / math.sqrt(8), doc_lens=lens, sliding_window=window
    )
    pieces = [
        by_hand(*(t[0][:, s : s + n] for t in (q, k, v)), window)
        for s, n in zip(_starts(lens), lens, strict=True)
    ]
    torch.testing.assert_close(output[0], torch.cat(pieces), atol=1e-5, rtol=1e-5)


def _starts(lens):
    return [sum(lens[:i]) for i in range(len(lens))]


@pytest.mark.parametrize("argument", ["softcap", "position_bias"])
def test_what_it_does_not_implement_it_refuses(argument):
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match=argument):
        documents_attention(torch.nn.Module(), q, q, q, None, **{argument: torch.ones(1)})


def test_a_mask_is_refused_rather_than_ignored():
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="mask"):
        documents_attention(torch.nn.Module(), q, q, q, torch.ones(2, 2))
