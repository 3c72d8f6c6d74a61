"""Output layer and cross entropy in one function, against torch's own on whole logits."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.live_memory import LivePeak

from shardyard.ops.linear_cross_entropy import HeadLoss, Tail, linear_cross_entropy_sum
from shardyard.ops.vocabulary import LossTerms

ROWS, HIDDEN, WORDS = 13, 8, 21
CHUNKS = (None, 1, 7, ROWS, ROWS + 7)
TAILS = (Tail(), Tail(0.3), Tail(1.0, 1.5), Tail(2.0, 1.5))
TERMS = (LossTerms(), LossTerms(z_loss=0.1), LossTerms(smoothing=0.2), LossTerms(0.1, 0.2))
UPSTREAM = 0.37


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float64, bias: bool = True) -> list[torch.Tensor]:
    """Hidden states, weight, bias if asked for, targets; one of these is not trained."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(rows, HIDDEN), (WORDS, HIDDEN), *([(WORDS,)] if bias else [])]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    targets = torch.randint(0, WORDS, (rows,), generator=generator)
    if rows > 3:
        targets[0], targets[1], targets[2] = 0, WORDS - 1, -100
    return [*(tensor.requires_grad_() for tensor in made), targets]


def by_torch(hidden: Any, weight: Any, bias: Any, targets: Any, loss: HeadLoss) -> torch.Tensor:
    """Whole logits; the tail and the terms written out."""
    logits = F.linear(hidden, weight, bias) * loss.tail.scale
    if loss.tail.cap is not None:
        logits = loss.tail.cap * torch.tanh(logits / loss.tail.cap)
    smoothing, z_loss = loss.terms.smoothing, loss.terms.z_loss
    plain = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return plain + z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()


def both(tensors: list[torch.Tensor], loss: HeadLoss) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(value and gradients of ours, of torch's), all of ``UPSTREAM`` times the loss."""
    *leaves, targets = tensors
    hidden, weight, bias = leaves if len(leaves) == 3 else (*leaves, None)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    ours = linear_cross_entropy_sum(hidden, weight, targets, bias, loss)
    theirs = by_torch(hidden, weight, bias, targets, loss)
    return (
        [ours.detach(), *torch.autograd.grad(UPSTREAM * ours, trained)],
        [theirs.detach(), *torch.autograd.grad(UPSTREAM * theirs, trained)],
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_value_and_gradients_equal_torch_on_whole_logits(chunk, tail):
    for terms, bias in product(TERMS, (False, True)):
        ours, theirs = both(inputs(bias=bias), HeadLoss(tail, terms, chunk))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_few_rows_or_none(rows, chunk):
    ours, theirs = both(inputs(rows), HeadLoss(Tail(0.5, 2.0), LossTerms(0.1, 0.2), chunk))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert rows or not any(tensor.any() for tensor in ours)


@pytest.mark.parametrize("chunk", [None, 4])
def test_in_fp32_the_rounding_is_that_of_torch(chunk):
    ours, theirs = both(inputs(dtype=torch.float32), HeadLoss(chunk=chunk))
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 4])
def test_narrow_dtypes_keep_the_loss_in_fp32(chunk, dtype):
    narrow = inputs(dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in narrow[:-1]] + narrow[-1:]
    ours, _ = both(narrow, HeadLoss(Tail(0.5), chunk=chunk))
    _, theirs = both(wide, HeadLoss(Tail(0.5)))
    assert [t.dtype for t in ours] == [torch.float32, dtype, dtype, dtype]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).abs().max() <= 0.03 * other.abs().max()


def test_fp16_does_not_lose_what_the_loss_scale_is_there_to_keep():
    """Probabilities of about 1e-9 are none in fp16; scaled by 2^20 afterwards their gradient is 1e-3."""
    hidden = torch.tensor([[1.0]], dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[10.0]] + [[-8.0]] * 15, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, weight, torch.tensor([0]))
    (2.0**20 * loss).backward()
    assert weight.grad is not None
    probability = torch.tensor([10.0] + [-8.0] * 15, dtype=torch.float64).softmax(-1)[1].item()
    assert weight.grad[1:].double() == pytest.approx(2.0**20 * probability, rel=0.02)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("upstream", [2.0**-20, 2.0**-12])
def test_in_fp16_the_gradient_of_the_weight_outlives_a_small_factor_on_the_loss(chunk, upstream):
    """Many trained tokens and a scale that has fallen: 30 x 2^-20 / 1024 is nothing in fp16, and the gradient
    that it is a factor of is a number that fp16 has.
    """
    narrow = inputs(dtype=torch.float16)
    with torch.no_grad():
        narrow[0].mul_(30)
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow[:-1]]
    hidden, weight, bias, targets = narrow
    (upstream * linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(chunk=chunk))).backward()
    (upstream * by_torch(*wide, targets, HeadLoss())).backward()
    assert weight.grad is not None and wide[1].grad is not None
    largest = wide[1].grad.abs().max()
    # Half a step of fp16 where its steps are the smallest, and what rounding does elsewhere.
    assert (weight.grad.double() - wide[1].grad).abs().max() <= 2.0**-24 + 2.0**-9 * largest


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1)])
def test_what_is_frozen_gets_no_gradient_and_the_others_are_right(chunk, frozen):
    tensors = inputs()
    for index in frozen:
        tensors[index].requires_grad_(False)
    ours, theirs = both(tensors, HeadLoss(Tail(0.5, 2.0), chunk=chunk))
    assert len(ours) == 4 - len(frozen)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_large_logits_are_no_infinity(scale):
    tensors = inputs(dtype=torch.float32)
    hidden, weight, bias, targets = tensors
    loss = linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(Tail(scale), chunk=4))
    assert torch.isfinite(loss) and loss > 0


def test_two_accumulated_losses_add_their_gradients():
    hidden, weight, bias, targets = inputs()
    for chunk in (3, None):
        linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(chunk=chunk)).backward()
    reference = torch.autograd.grad(
        by_torch(hidden, weight, bias, targets, HeadLoss()), [hidden, weight, bias]
    )
    for tensor, gradient in zip((hidden, weight, bias), reference, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient, rtol=1e-10, atol=1e-12)


def test_a_second_backward_of_chunks_is_an_error_not_a_wrong_number():
    hidden, weight, bias, targets = inputs()
    loss = linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(chunk=4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward of this loss has run"):
        loss.backward()


def test_the_parameter_takes_the_gradient_that_was_made_without_a_copy():
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    loss = linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(chunk=4))
    made = loss.grad_fn.made[1].data_ptr()  # type: ignore[union-attr]
    loss.backward()
    assert weight.grad is not None and weight.grad.data_ptr() == made


@pytest.mark.parametrize("chunk", [None, 4])
def test_without_gradients_nothing_is_kept(chunk):
    hidden, weight, bias, targets = inputs()
    loss = HeadLoss(Tail(0.5, 2.0), LossTerms(0.1, 0.2), chunk)
    with torch.no_grad():
        value = linear_cross_entropy_sum(hidden, weight, targets, bias, loss)
    torch.testing.assert_close(value, by_torch(hidden, weight, bias, targets, loss), rtol=1e-10, atol=1e-12)
    assert value.grad_fn is None
    frozen = [tensor.detach() for tensor in (hidden, weight, bias)]
    assert linear_cross_entropy_sum(frozen[0], frozen[1], targets, frozen[2], loss).grad_fn is None


def test_logits_of_chunks_are_gone_when_the_forward_returns():
    hidden, weight, bias, targets = inputs(rows=64)
    with LivePeak() as live:
        loss = linear_cross_entropy_sum(hidden, weight, targets, bias, HeadLoss(chunk=16))
        left = live.now()
    gradients = 8 * (64 * HIDDEN + WORDS * HIDDEN + WORDS)
    assert loss.grad_fn is not None
    assert gradients <= left <= gradients + 64  # a chunk's logits would be 16 x 21 of 8 bytes


PEAK_ROWS, PEAK_CHUNK, PEAK_HIDDEN = 96, 16, 4


def peak_of(words: int, chunk: int | None, cap: float | None = None) -> int:
    """The most bytes alive of a forward and backward, beside the inputs."""
    hidden = torch.randn(PEAK_ROWS, PEAK_HIDDEN, requires_grad=True)
    weight = torch.randn(words, PEAK_HIDDEN, requires_grad=True)
    targets = torch.randint(0, words, (PEAK_ROWS,))
    with LivePeak() as live:
        loss = linear_cross_entropy_sum(hidden, weight, targets, None, HeadLoss(Tail(cap=cap), chunk=chunk))
        loss.backward()
    return live.peak


def test_memory_grows_with_the_vocabulary_by_the_gradient_and_one_chunk_of_logits():
    sizes = [32_000, 64_000, 152_000]
    peaks = [peak_of(words, PEAK_CHUNK) for words in sizes]
    each = 4 * (PEAK_HIDDEN + PEAK_CHUNK)  # bytes a word: gradient of the weight, logits of a chunk
    for (small, large), (less, more) in zip(pairwise(sizes), pairwise(peaks), strict=True):
        assert (more - less) / (large - small) == pytest.approx(each, rel=0.02)


def test_by_default_a_chunk_has_as_many_rows_as_fit_the_bound():
    loss, capped = HeadLoss(), HeadLoss(Tail(cap=30.0))
    size, wide, narrow = 1024, torch.float32, torch.bfloat16
    for words in (32_000, 64_000, 151_936):
        bound = max(64 * 2**20, words * size)  # a quarter of the fp32 weight: above 64 MiB for the last one
        most = bound // (4 * words)
        assert loss.rows(most, words, size, wide, "cpu") == most  # what fits is one chunk
        assert loss.rows(most + 1, words, size, wide, "cpu") == -(-(most + 1) // 2)  # else equal ones
        assert 0.9 * most < loss.rows(20 * most + 1, words, size, wide, "cpu") <= most
        assert loss.rows(10_000, words, size, narrow, "cpu") * words * 8 <= bound
        assert capped.rows(10_000, words, size, wide, "cpu") * words * 8 <= bound
        # In bf16 a word costs whole rows 8 bytes each; chunks as much, and 4 for each of the hidden size.
        most = bound // (8 * words) + size * 4 // 8
        assert loss.rows(most, words, size, narrow, "cpu") == most
        assert loss.rows(most + 1, words, size, narrow, "cpu") * words * 8 <= bound
    assert loss.rows(10_000, 2_000_000, 64, wide, "cpu") == 32
    assert loss.rows(10_000, 151_936, size, wide, "cuda") > 3_000
    assert loss.rows(0, 151_936, size, wide, "cpu") == 1
