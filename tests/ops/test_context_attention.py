"""Attention over several ranks equals one softmax written out, and so do all gradients."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.attention import relative_error, softmax_by_hand
from torch.utils.checkpoint import checkpoint

from shardyard.ops import documents_attention
from shardyard.parallel.sequence import SequenceLayout


@dataclass(frozen=True)
class Case:
    """Heads, key heads, width of queries and keys, width of values, and what else changes the numbers."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8
    window: int | None = None
    sinks: bool = False
    doc_lens: tuple[int, ...] = (1, 53, 2, 17, 3)
    dtype: torch.dtype = torch.float32
    tp_size: int = 1
    more: int = 0
    """Tokens that a pipeline adds to each rank's share."""
    recompute: bool = False

    @property
    def scale(self) -> float:
        return 0.9 * self.width**-0.5


CASES = {
    "grouped queries": Case(),
    "one key head": Case(kv_heads=1),
    "as many key heads": Case(kv_heads=4),
    "latent attention's widths": Case(kv_heads=4, width=12, value_width=8),
    "wider values": Case(width=6, value_width=10),
    "one document": Case(doc_lens=(29,)),
    "only short documents": Case(doc_lens=(1, 2, 3, 1)),
    "shared with tensor parallel ranks": Case(tp_size=3, doc_lens=(7, 4)),
    "padded for a pipeline": Case(doc_lens=(7, 4), more=12),
    "recomputed": Case(recompute=True),
    "sinks": Case(sinks=True),
    "sinks with one key head": Case(sinks=True, kv_heads=1, doc_lens=(40,)),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16 with sinks": Case(dtype=torch.bfloat16, sinks=True),
}
WINDOW_CASES = {
    "window": Case(window=5),
    "window of two": Case(window=2),
    "window as long as a document": Case(window=53),
    "window and sinks": Case(window=9, sinks=True),
    "window and sinks in bfloat16": Case(window=9, sinks=True, dtype=torch.bfloat16),
    "window over pieces of a long document": Case(window=150, doc_lens=(401, 5)),
}
METHODS = ["ulysses", "ring", "kvallgather"]


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """q, k, v, the gradient of the output, and sinks; the same on every rank."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(3))
    total = sum(case.doc_lens)
    made = {
        "q": draw(1, case.heads, total, case.width),
        "k": draw(1, case.kv_heads, total, case.width),
        "v": draw(1, case.kv_heads, total, case.value_width),
        "grad": draw(1, case.heads, total, case.value_width),
        "sinks": draw(case.heads),
    }
    return {name: tensor.to(case.dtype) for name, tensor in made.items()}


def expected(case: Case) -> dict[str, torch.Tensor]:
    given = inputs(case)
    leaves = {name: given[name].double().requires_grad_() for name in ("q", "k", "v", "sinks")}
    sinks = leaves["sinks"] if case.sinks else None
    out = softmax_by_hand(
        leaves["q"], leaves["k"], leaves["v"], case.doc_lens, case.scale, case.window, sinks
    )
    out.backward(given["grad"].double())
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def on_one_rank(case: Case, method: str) -> dict[str, torch.Tensor]:
    """This rank's tokens through the attention; what is padding holds noise, to show that nobody sees it."""
    layout = SequenceLayout(dist.get_world_size(), dist.get_rank(), method, case.tp_size, dist.group.WORLD)
    share = layout.share(case.doc_lens, layout.local_length(case.doc_lens) + case.more)
    token = share.cut(torch.arange(sum(case.doc_lens))[None], -1)[0]
    padding = token < 0

    def cut(tensor: torch.Tensor, noise: float) -> torch.Tensor:
        here = tensor[:, :, token]
        here[:, :, padding] = noise * torch.randn_like(here[:, :, padding])
        return here

    given = inputs(case)
    leaves = {name: cut(given[name], 1.0).requires_grad_() for name in ("q", "k", "v")}
    sinks = given["sinks"].requires_grad_() if case.sinks else None

    def attend(q, k, v):
        return documents_attention(
            torch.nn.Module(), q, k, v, None, scaling=case.scale, sliding_window=case.window, s_aux=sinks,
            **share.attention_kwargs(),
        )[0].transpose(1, 2)  # fmt: skip

    out: Any = (
        checkpoint(attend, *leaves.values(), use_reentrant=False)
        if case.recompute
        else attend(*leaves.values())
    )
    out.backward(cut(given["grad"], 0.0))
    results: dict[str, Any] = {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    assert all(tensor.dtype == case.dtype for tensor in results.values())
    return {
        name: share.restore(_gathered(tensor[0].transpose(0, 1)[None]))[0].transpose(0, 1)[None]
        for name, tensor in results.items()
    } | ({"sinks": _summed(sinks)} if sinks is not None else {})


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def _summed(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor that every rank has a part of."""
    assert leaf.grad is not None
    dist.all_reduce(leaf.grad)
    return leaf.grad


def errors(cases: dict[str, Case], method: str) -> dict[tuple[str, str], float]:
    found = {}
    for name, case in cases.items():
        result = on_one_rank(case, method)
        wanted = expected(case)
        assert result.keys() == wanted.keys()
        limit = 1.0 if case.dtype == torch.float32 else 2e3
        found |= {(name, key): relative_error(result[key], wanted[key]) / limit for key in wanted}
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4])
def test_outputs_and_gradients_are_those_of_one_softmax(ranks, cp, method):
    cases = CASES | (WINDOW_CASES if method != "ring" else {})
    found = ranks.run(cp, errors, cases, method)
    assert found[0] == found[-1]
    wrong = {key: error for key, error in found[0].items() if not error <= 1e-5}
    assert not wrong


def drawn_case(draw: random.Random, cp: int, method: str) -> Case:
    kv_heads = draw.choice([1, 2, 3, cp])
    width = draw.choice([4, 6, 8])
    return Case(
        heads=cp * kv_heads * draw.choice([1, 2]),
        kv_heads=kv_heads,
        width=width,
        value_width=draw.choice([width, 4, 8]),
        window=None if method == "ring" else draw.choice([None, 2, 7, 40]),
        sinks=draw.random() < 0.3,
        doc_lens=tuple(
            draw.choice([1, 2, 3, 11, 53, draw.randint(1, 90)]) for _ in range(draw.randint(1, 6))
        ),
        tp_size=draw.choice([1, 1, 2, 4]),
        more=draw.choice([0, 0, 8]),
        recompute=draw.random() < 0.2,
    )


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 3, 4, 6])
def test_drawn_shapes_over_drawn_ranks(ranks, cp, method):
    draw = random.Random(f"{cp} {method}")
    cases = {str(case): case for case in (drawn_case(draw, cp, method) for _ in range(50))}
    found = ranks.run(cp, errors, cases, method, timeout_s=600)
    wrong = {key: error for key, error in found[0].items() if not error <= 1e-5}
    assert not wrong
