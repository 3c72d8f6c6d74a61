"""The kernels behind attention: block by block, with the log-sum-exp, those of a device and plain ones."""

from __future__ import annotations

import pytest
import torch
from support.attention import relative_error, softmax_by_hand

from shardyard.ops import documents_attention, flash
from shardyard.ops.blocks import Block, Gradients, Merging, documents, stretch
from shardyard.ops.context.kvallgather import gathered_blocks
from shardyard.ops.context.ring import ring_blocks

SCALE = 0.31


def by_hand(q, k, v, reach):
    """Output and log-sum-exp in fp64 where the last query stands at the last key."""
    copies, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    q, k, v = q.double(), k.double().repeat_interleave(copies, 1), v.double().repeat_interleave(copies, 1)
    scores = q @ k.transpose(2, 3) * SCALE
    if reach is not None:
        for i in range(queries):
            own = i + keys - queries
            scores[:, :, i, own + 1 :] = -torch.inf
            scores[:, :, i, : max(0, own + 1 - reach)] = -torch.inf
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def draw(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def check_block(queries, keys, reach, kv_heads, value_width, limit, dtype=torch.float32, device="cpu"):
    q, k = draw(1, 4, queries, 8, dtype=dtype), draw(1, kv_heads, keys, 8, dtype=dtype)
    v, grad = draw(1, kv_heads, keys, value_width, dtype=dtype), draw(1, 4, queries, value_width, dtype=dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = by_hand(leaves[0], leaves[1], leaves[2], reach)
    expected_grads = torch.autograd.grad(expected[0], leaves, grad.double())
    q, k, v, grad = (tensor.to(device) for tensor in (q, k, v, grad))
    out, lse = flash.forward(q, k, v, reach, SCALE)
    assert lse.dtype == torch.float32 and out.dtype == dtype
    grads = flash.backward(grad, q, k, v, out, lse, reach, SCALE)
    for found, wanted in zip((out, lse, *grads), (*expected, *expected_grads), strict=True):
        assert relative_error(found.cpu(), wanted.detach()) <= limit


SHAPES = [
    (7, 7, flash.CAUSAL), (1, 1, flash.CAUSAL), (7, 12, None), (12, 7, None), (5, 11, flash.CAUSAL),
    (11, 11, 3), (5, 11, 4), (300, 420, 130),
]  # fmt: skip


@pytest.mark.parametrize(("kv_heads", "value_width"), [(1, 8), (2, 4), (4, 8)])
@pytest.mark.parametrize(("queries", "keys", "reach"), SHAPES)
def test_a_block_on_a_cpu(queries, keys, reach, kv_heads, value_width):
    check_block(queries, keys, reach, kv_heads, value_width, 1e-5)


@pytest.mark.parametrize(("kv_heads", "pieces"), [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize(("queries", "keys", "reach"), SHAPES)
def test_a_block_in_plain_products(monkeypatch, queries, keys, reach, kv_heads, pieces):
    """What devices without a kernel of their own get; in pieces, too, as long sequences are."""
    monkeypatch.setattr(flash, "_is_cpu", lambda q: False)
    if pieces:
        monkeypatch.setattr(flash, "_PLAIN_SCORES", 0)
    check_block(queries, keys, reach, kv_heads, 4, 1e-5)


@pytest.mark.hardware
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_blocks_on_a_gpu():
    for queries, keys, reach in SHAPES:
        for kv_heads in (1, 2, 4):
            check_block(queries, keys, reach, kv_heads, 4, 1e-5, torch.float32, "cuda")
            check_block(queries, keys, reach, kv_heads, 4, 2e-2, torch.bfloat16, "cuda")


@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_in_any_order_merge_to_the_whole(sinks):
    q, k, v, grad = draw(1, 4, 9, 8), draw(1, 2, 9, 8), draw(1, 2, 9, 8), draw(1, 4, 9, 8)
    score = draw(4) if sinks else None
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    whole = softmax_by_hand(leaves[0], leaves[1], leaves[2], (9,), SCALE, None, score)
    expected = torch.autograd.grad(whole, leaves, grad.double())
    blocks = [
        Block(slice(6, 9), slice(3, 6), None), *stretch(0, 3, query_at=0, key_at=0, window=None),
        *stretch(6, 9, query_at=6, key_at=0, window=None)[1:], Block(slice(6, 9), slice(0, 3), None),
        *stretch(3, 6, query_at=3, key_at=0, window=None),
    ]  # fmt: skip
    merging = Merging(q, 8, SCALE)
    for block in blocks:
        merging.meet(k, v, [block])
    out, lse = merging.finish(score)
    assert relative_error(out, whole.detach()) <= 1e-5
    back = Gradients(grad, q, out, lse, SCALE)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    back.meet(k, v, blocks, dk, dv)
    for found, wanted in zip((back.dq, dk, dv), expected, strict=True):
        assert relative_error(found, wanted) <= 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_with_sinks_are_the_derivative(window):
    """Against finite differences, in fp64."""
    q, k, v, sinks = (draw(*shape).double() for shape in ((1, 2, 6, 3), (1, 1, 6, 3), (1, 1, 6, 2), (2,)))

    def attend(q, k, v, sinks):
        return documents_attention(
            torch.nn.Module(), q, k, v, None, doc_lens=(2, 4), sliding_window=window, s_aux=sinks
        )[0]

    assert torch.autograd.gradcheck(attend, [t.requires_grad_() for t in (q, k, v, sinks)])


def seen(blocks):
    """The pairs (query, key) of blocks, each as often as it comes."""
    pairs = []
    for queries, keys, reach in blocks:
        last = keys.stop - queries.stop
        for i in range(queries.start, queries.stop):
            for j in range(keys.start, keys.stop):
                if reach is None or 0 <= i + last - j < reach:
                    pairs.append((i, j))
    return pairs


@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_documents_meet_only_their_own_keys(window):
    lens = (1, 0, 7, 2)
    starts = [0, 1, 1, 8]
    wanted = [
        (start + i, start + j)
        for start, length in zip(starts, lens, strict=True)
        for i in range(length)
        for j in range(i + 1)
        if window is None or i - j < window
    ]
    assert sorted(seen(documents(lens, window))) == sorted(wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ring_has_the_same_work_on_every_rank_in_every_step(size):
    local_lens = (2, 8, 4)
    for step in range(size):
        work = {len(seen(ring_blocks(local_lens, rank, (rank - step) % size))) for rank in range(size)}
        own = sum(n * (n + 1) // 2 for n in local_lens)
        assert work == {own if step == 0 else sum(n * n // 2 for n in local_lens)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_keys_make_the_same_work_on_every_rank(size):
    doc_lens = (2 * size, 6 * size, 4 * size)
    work = [len(seen(gathered_blocks(doc_lens, rank, size, None))) for rank in range(size)]
    assert work == [sum(n * (n + 1) // 2 for n in doc_lens) // size] * size
