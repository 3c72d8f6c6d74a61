"""Rotary position embedding: pairs of numbers of a head are turned by the angle of their position.

A family's attention calls a function of its module for it. The replacement is a copy of the attention's
forward, on the instance, in whose globals that name stands for ours; the module itself is not touched.
Families differ in which numbers form a pair, in where the result lies and in how the cosines are laid out.
Which of these a function does is found by trying it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable

from shardyard.ops.registry import Example, Found, Implementation, Operation, Site, Situation
from shardyard.ops.self_check import random, tried

Tensor = torch.Tensor
Layout = Literal["halves", "pairs"]
_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


class Turn(NamedTuple):
    """What a function does to the first 2n numbers of a head; the others stay."""

    input: Layout
    """A pair is (i, i + n), or (2i, 2i + 1)."""
    output: Layout
    table: Literal["halves", "pairs", "first_half", "whole"]
    """Where the n cosines of the first numbers of pairs stand, and those of the second: the last two kinds
    have one for both."""


class RotaryKind(NamedTuple):
    """The functions that an attention calls, by name, and sizes to try them on."""

    turns: tuple[tuple[str, Turn], ...]
    heads: int
    key_heads: int
    width: int
    table_width: int


TURNS = (
    Turn("halves", "halves", "halves"), Turn("halves", "halves", "whole"), Turn("pairs", "pairs", "pairs"),
    Turn("pairs", "pairs", "first_half"), Turn("pairs", "halves", "first_half"),
)  # fmt: skip


def _split(x: Tensor, layout: str, half: int) -> tuple[Tensor, Tensor]:
    """Views of the first and the second numbers of all pairs."""
    if layout == "pairs":
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _tables(table: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    if turn.table == "whole":
        return table, table
    half = table.shape[-1] // 2
    first, second = _split(table, turn.table, half)
    return (first, first) if turn.table == "first_half" else (first, second)


def _combine(x: Tensor, cos: Tensor, sin: Tensor, turn: Turn, *, back: bool) -> Tensor:
    """(a, b) -> (a c1 - b s1, b c2 + a s2), or the transposed of this."""
    (c1, c2), (s1, s2) = _tables(cos, turn), _tables(sin, turn)
    half = c1.shape[-1]
    here, there = (turn.output, turn.input) if back else (turn.input, turn.output)
    out = torch.empty_like(x)
    (a, b), (first, second) = _split(x, here, half), _split(out, there, half)
    torch.mul(a, c1, out=first)
    torch.mul(b, c2, out=second)
    if back:
        s1, s2 = -s2, -s1
    first.addcmul_(b, s1, value=-1)
    second.addcmul_(a, s2)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        return _combine(q, cos, sin, turn, back=False), _combine(k, cos, sin, turn, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(_combine(grad, cos, sin, ctx.turn, back=True) for grad in grads), None, None, None


def lean_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D], k [B, Hkv, T, D], cos and sin [B, 1, T, .] -> both turned; keeps cos and sin."""
    return _Rotate.apply(q, k, cos, sin, turn)  # pyright: ignore[reportReturnType]


def liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Liger's Triton kernel. Untested on a GPU."""
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]

    return LigerRopeFunction.apply(q, k, cos.squeeze(1), sin.squeeze(1))


def npu_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Ascend's kernel. Untested on an NPU."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


def find_rotary(model: nn.Module) -> Found:
    """The attentions whose forward calls a rotary function that is known."""
    sites: list[Site] = []
    strangers: list[str] = []
    for name, module in model.named_modules():
        forward = own_forward(module)
        called = [n for n in _NAMES if forward is not None and n in forward.__code__.co_names]
        if forward is None or not called:
            continue
        functions: list[Any] = [forward.__globals__.get(n) for n in called]  # None: a method of that name
        turns = [(n, t) for n, f in zip(called, functions, strict=True) if f and (t := _turn_of(f))]
        sizes = tried(_sizes, module, functions[0], turns[0][1]) if len(turns) == len(called) else None
        if sizes is not None:
            sites.append(Site(name, module, RotaryKind(tuple(turns), *sizes)))
        elif not strangers:
            strangers.append(f"{name} ({type(module).__name__}) turns positions in a way of its own")
    return Found(sites, strangers)


def own_forward(module: nn.Module) -> types.FunctionType | None:
    """The class's forward below wrappers that rename old arguments; None where there are others, or where an
    instance has one of its own.
    """
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        if not forward.__code__.co_filename.endswith("deprecation.py"):
            return None
        forward = forward.__wrapped__
    return forward if isinstance(forward, types.FunctionType) else None


@functools.cache
def _turn_of(function: Callable[..., Any]) -> Turn | None:
    """The kind whose numbers the function gives, on heads that are turned in part or whole."""
    for width, table_width in ((12, 8), (8, 8), (8, 4)):
        q, k, cos, sin = _samples(width, table_width)
        theirs = tried(function, q, k, cos, sin)
        if not isinstance(theirs, tuple) or len(theirs) != 2:
            continue
        for turn in TURNS:
            if (turn.table == "whole") != (table_width == 4):
                continue
            ours = lean_rotary(q, k, cos[:, None], sin[:, None], turn)
            if all(
                x.shape == y.shape and torch.allclose(x, y, atol=1e-6)
                for x, y in zip(theirs, ours, strict=True)
            ):
                return turn
    return None


def _samples(width: int, table_width: int) -> tuple[Tensor, ...]:
    """q, k, cos, sin"""
    q, k = (random((1, heads, 5, width), seed, torch.float32, "cpu") for heads, seed in ((2, 31), (1, 32)))
    cos, sin = (random((1, 5, table_width), seed, torch.float32, "cpu") for seed in (33, 34))
    return q, k, cos, sin


@functools.cache
def _leaves_the_rest(function: Callable[..., Any]) -> bool:
    """Whether it takes whole heads where a part is turned, or that part, which its caller has split off."""
    return tried(function, *_samples(12, 8)) is not None


def _sizes(module: Any, function: Callable[..., Any], turn: Turn) -> tuple[int, int, int, int]:
    """Heads, key heads, width of what is turned in a head or passed on with it, and of the cosines. A config
    that does not say them raises in its own way: some families have them for each layer.
    """
    config = module.config
    heads = config.num_attention_heads
    width = getattr(module, "qk_rope_head_dim", None) or getattr(module, "head_dim", None)
    width = width or config.hidden_size // heads
    parameters = getattr(config, "rope_parameters", None) or {}
    part = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if hasattr(module, "qk_rope_head_dim"):
        part = 1.0  # the part is split off before
    turned = int(width * part) // 2 * 2
    if not _leaves_the_rest(function):
        width = turned
    return (
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        width,
        (turned // 2 if turn.table == "whole" else turned),
    )


@functools.cache
def _with_functions(forward: types.FunctionType, names: tuple[tuple[str, Any], ...]) -> types.FunctionType:
    """A copy of ``forward`` for which the names stand for other functions."""
    copy = types.FunctionType(
        forward.__code__, {**forward.__globals__, **dict(names)}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__doc__ = forward.__doc__
    return copy


@functools.cache
def _as_called(function: Callable[..., Any], turn: Turn, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if q is None or k is None:  # layers that share keys turn their queries alone
            return theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return function(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), turn)

    return apply_rotary_pos_emb


def _example(site: Site, situation: Situation) -> Example:
    kind: RotaryKind = site.kind
    name, _ = kind.turns[0]
    forward = own_forward(site.module)
    assert forward is not None
    where = situation.dtype, situation.device
    shapes = ((1, situation.tokens, heads, kind.width) for heads in (kind.heads, kind.key_heads))
    q, k = (random(shape, 35 + n, *where).transpose(1, 2) for n, shape in enumerate(shapes))
    angles = random((1, situation.tokens, kind.table_width), 37, torch.float32, situation.device)
    if kind.turns[0][1].table != "whole":
        first, _ = angles.chunk(2, dim=-1)
        paired = kind.turns[0][1].table == "pairs"
        angles = first.repeat_interleave(2, dim=-1) if paired else torch.cat([first, first], dim=-1)
    cos, sin = angles.cos().to(situation.dtype), angles.sin().to(situation.dtype)
    theirs = forward.__globals__[name]
    return Example(lambda q, k: theirs(q, k, cos, sin), (q, k), (cos[:, None], sin[:, None]))


def _implementation(name: str, function: Any, **limits: Any) -> Implementation:
    def install(site: Site) -> None:
        forward = own_forward(site.module)
        assert forward is not None
        names = tuple(
            (called, _as_called(function, turn, forward.__globals__[called]))
            for called, turn in site.kind.turns
        )
        site.module.forward = types.MethodType(_with_functions(forward, names), site.module)

    def run(site: Site) -> Any:
        return lambda q, k, cos, sin: function(q, k, cos, sin, site.kind.turns[0][1])

    return Implementation(name, install, run, **limits)


def _whole_halves(site: Site, _: Situation) -> str | None:
    kind: RotaryKind = site.kind
    if all(turn == TURNS[0] for _, turn in kind.turns) and kind.table_width == kind.width:
        return None
    return f"{site.name} pairs numbers, or turns a part of a head, as it does not"


ROTARY = Operation(
    name="rotary", switch="use_fused_rotary_pos_emb", module="rotary position embedding", find=find_rotary,
    example=_example,
    implementations=(
        _implementation("lean", lean_rotary),
        _implementation(
            "liger", liger_rotary, devices=("cuda", "npu"), package=("liger-kernel", "liger_kernel"),
            unsuited=_whole_halves,
        ),
        _implementation(
            "npu", npu_rotary, devices=("npu",), package=("torch_npu", "torch_npu"), unsuited=_whole_halves
        ),
    ),
    fused={"cuda": ("liger", "lean"), "npu": ("npu", "lean"), "": ("lean",)},
    automatic={
        "cpu": {"lean": "turns in place of copying halves"},
        "cuda": {"liger": "one kernel each way", "lean": "turns in place of copying halves"},
        "npu": {"npu": "one kernel each way"},
    },
)  # fmt: skip
