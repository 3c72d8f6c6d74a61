"""Sharing a sequence: every token once, nothing lost, padding that divides, the same work on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.parallel.sequence import DUMMY_TOKENS, SequenceLayout

layouts = st.builds(
    dict,
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    cp_type=st.sampled_from(["ulysses", "ring", "kvallgather"]),
    tp_size=st.sampled_from([1, 2, 3, 4]),
)
documents = st.lists(st.integers(1, 70), min_size=1, max_size=6)


def shares(layout: dict, doc_lens, local_tokens=None):
    layout = dict(cp_size=1, cp_type="ulysses") | layout
    sequences = [SequenceLayout(cp_rank=rank, **layout) for rank in range(layout["cp_size"])]
    return [sequence.share(tuple(doc_lens), local_tokens) for sequence in sequences]


def row_of(doc_lens):
    return torch.arange(1, 1 + sum(doc_lens))[None]


def positions_of(doc_lens):
    return torch.cat([torch.arange(n) for n in doc_lens])[None]


@settings(max_examples=60, deadline=None)
@given(layouts, documents, st.integers(0, 3))
def test_cut_then_restore_is_the_identity(layout, doc_lens, more):
    sequence = SequenceLayout(**layout)
    local = sequence.local_length(doc_lens) + more * sequence.unit
    ranks = shares(layout, doc_lens, local)
    row = row_of(doc_lens)
    parts = torch.stack([share.cut(row, -7) for share in ranks])
    assert parts.shape == (layout["cp_size"], 1, local)
    for rank, share in enumerate(ranks):
        assert torch.equal(share.real, parts[rank, 0] != -7)
        assert torch.equal(share.restore(parts), row)
    assert sorted(parts[parts != -7].tolist()) == row[0].tolist()
    with_features = torch.stack([parts, 2 * parts], dim=-1)
    assert torch.equal(ranks[0].restore(with_features), torch.stack([row, 2 * row], dim=-1))


@settings(max_examples=60, deadline=None)
@given(layouts, documents)
def test_padding_is_what_the_layout_needs_and_no_more(layout, doc_lens):
    sequence, share = SequenceLayout(**layout), shares(layout, doc_lens)[0]
    cp, tp = layout["cp_size"], layout["tp_size"]
    total = sum(share.doc_lens)
    assert share.local_tokens == sequence.local_length(doc_lens) == total // cp
    assert share.local_tokens % tp == 0
    if cp > 1 and layout["cp_type"] != "ulysses":
        assert all(length % (2 * cp) == 0 for length in share.doc_lens)
        assert all(0 <= new - old < 2 * cp for old, new in zip(doc_lens, share.doc_lens, strict=False))
        assert sum(share.doc_lens[len(doc_lens) :]) < 2 * cp * tp
    else:
        assert share.doc_lens[: len(doc_lens)] == tuple(doc_lens)
        assert 0 <= total - sum(doc_lens) < cp * tp


@settings(max_examples=40, deadline=None)
@given(layouts, documents, st.integers(0, 3))
def test_positions_are_the_datas_own_and_no_other_is_larger(layout, doc_lens, more):
    sequence = SequenceLayout(**layout)
    ranks = shares(layout, doc_lens, sequence.local_length(doc_lens) + more * sequence.unit)
    parts = torch.stack([share.cut_positions(positions_of(doc_lens)) for share in ranks])
    assert torch.equal(ranks[0].restore(parts), positions_of(doc_lens))
    assert parts.max() == positions_of(doc_lens).max()


@pytest.mark.parametrize("cp", [2, 4])
def test_head_tail_ranks_have_the_same_number_of_scores(cp):
    doc_lens = (1, 2, 3, 53, 17)
    padded = shares(dict(cp_size=cp, cp_type="ring"), doc_lens)[0].doc_lens
    ranks = shares(dict(cp_size=cp, cp_type="ring"), padded)
    work = [int((share.cut_positions(positions_of(padded)) + 1).sum()) for share in ranks]
    assert work == [sum(n * (n + 1) // 2 for n in padded) / cp] * cp


def test_a_head_tail_share_by_hand():
    """Documents of 5 and 2 tokens over 2 ranks: padded to 8 and 4, chunks of 2 and 1."""
    first, second = shares(dict(cp_size=2, cp_type="kvallgather"), (5, 2))
    row, positions = torch.tensor([[10, 11, 12, 13, 14, 20, 21]]), torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    assert first.doc_lens == (8, 4)
    assert first.cut(row, 0).tolist() == [[10, 11, 0, 0, 20, 0]]
    assert second.cut(row, 0).tolist() == [[12, 13, 14, 0, 21, 0]]
    assert first.cut_positions(positions).tolist() == [[0, 1, 4, 4, 0, 1]]
    assert second.cut_positions(positions).tolist() == [[2, 3, 4, 4, 1, 1]]
    assert second.real.tolist() == [True, True, True, False, True, False]


def test_a_contiguous_share_by_hand():
    """5 tokens over 2 ranks of 2 tensor-parallel ranks each: 8, of which a dummy of 3."""
    first, second = shares(dict(cp_size=2, cp_type="ulysses", tp_size=2), (3, 2))
    row, positions = torch.tensor([[10, 11, 12, 20, 21]]), torch.tensor([[0, 1, 2, 0, 1]])
    assert first.doc_lens == (3, 2, 3)
    assert first.cut(row, -100).tolist() == [[10, 11, 12, 20]]
    assert second.cut(row, -100).tolist() == [[21, -100, -100, -100]]
    assert second.cut_positions(positions).tolist() == [[1, 0, 0, 0]]


def test_one_rank_gets_the_row_itself():
    share = SequenceLayout().share((4, 3))
    row = row_of((4, 3))
    assert share.is_whole and share.cut(row, 0) is row and share.cut_positions(row) is row
    assert share.attention_kwargs() == {"doc_lens": (4, 3)}
    assert torch.equal(share.restore(row[None]), row)


@pytest.mark.parametrize("cp", [1, 4])
def test_dummy_documents_of_a_pipeline_are_short(cp):
    share = SequenceLayout(cp, 0, "ring").share((8,), 4000)
    dummies = share.doc_lens[1:]
    assert sum(dummies) == 4000 * cp - 8 and max(dummies) <= DUMMY_TOKENS
    assert len(dummies) == math.ceil(sum(dummies) / DUMMY_TOKENS)


@pytest.mark.parametrize("local_tokens", [2, 7])
def test_a_length_that_does_not_fit_is_refused(local_tokens):
    with pytest.raises(ValueError, match="at least 4 are needed, in multiples of 2"):
        SequenceLayout(2, 0, "ring").share((8,), local_tokens)
