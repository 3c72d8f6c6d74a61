"""The kernels behind the attention of documents, and which of them an attention module gets.

All take q [1, H, T, D], k and v [1, Hkv, T, D] with the documents' lengths, and give [1, H, T, D of v].
Attention sinks, dropout and a sequence that ranks share have ways of their own (documents.py, context/).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from shardyard.ops.attention import KERNEL, NAME
from shardyard.ops.documents import Kernel, attend_documents, lean_documents
from shardyard.ops.flash import padded
from shardyard.ops.registry import Example, Found, Implementation, Operation, Site, Situation
from shardyard.ops.rotary import own_forward
from shardyard.ops.self_check import random

Tensor = torch.Tensor
_HALF = (torch.bfloat16, torch.float16)


class AttentionKind(NamedTuple):
    """Sizes of an attention."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int | None
    sinks: bool
    drops: bool = False
    """Probabilities are dropped out in training, for which there is PyTorch's attention only."""


@functools.lru_cache(maxsize=64)
def _ends(doc_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [N + 1]: where documents end, 0 first. Cached, for all layers of a forward ask for the same."""
    ends = F.pad(torch.tensor(doc_lens, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return ends.to(device, non_blocking=True)


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """[1, H, T, D] -> [T, H, D], all of one width: zeros change neither scores nor other columns."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [padded(tensor, width)[0].transpose(0, 1) for tensor in tensors]


def _heads_first(out: Tensor, width: int) -> Tensor:
    return out[..., :width].transpose(0, 1)[None]


def varlen_documents(
    q: Tensor, k: Tensor, v: Tensor, *, doc_lens: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """PyTorch's attention of sequences of several lengths. Untested on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    lens = tuple(filter(None, doc_lens))
    ends, longest = _ends(lens, q.device), max(lens)
    reach = (-1 if window is None or window >= longest else window - 1, 0)
    query, key, value = _tokens_first(q, k, v)
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=reach,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return _heads_first(out, v.shape[-1])


def flash_attn_documents(
    q: Tensor, k: Tensor, v: Tensor, *, doc_lens: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """The flash-attn package's. Untested on a GPU."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    lens = tuple(filter(None, doc_lens))
    ends, longest = _ends(lens, q.device), max(lens)
    reach = (-1 if window is None or window >= longest else window - 1, 0)
    out = flash_attn_varlen_func(
        *_tokens_first(q, k, v), ends, ends, longest, longest, softmax_scale=scale, causal=True,
        window_size=reach,
    )  # fmt: skip
    return _heads_first(out, v.shape[-1])


@functools.lru_cache(maxsize=16)
def _block_mask(doc_lens: tuple[int, ...], window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    lens = torch.tensor(doc_lens)
    document = torch.repeat_interleave(torch.arange(len(doc_lens)), lens).to(device)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (document[query] == document[key]) & (query >= key)
        return visible if window is None else visible & (query - key < window)

    total = sum(doc_lens)
    return create_block_mask(seen, None, None, total, total, device=str(device))


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_documents(
    q: Tensor, k: Tensor, v: Tensor, *, doc_lens: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """PyTorch's FlexAttention, which compiles. Untested on a GPU."""
    mask = _block_mask(doc_lens, window, q.device)
    return _compiled_flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _npu_mask(device: torch.device) -> Tensor:
    """The one mask that Ascend's sparse modes read, for any length."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)


def npu_documents(
    q: Tensor, k: Tensor, v: Tensor, *, doc_lens: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """Ascend's fusion attention, tokens first. Untested on an NPU."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    lens = tuple(filter(None, doc_lens))
    ends = torch.tensor(lens).cumsum(0).tolist()
    causal, band = 3, 4
    before = 2**31 - 1 if window is None or window >= max(lens) else window - 1
    out = torch_npu.npu_fusion_attention(
        *_tokens_first(q, k, v), q.shape[1], input_layout="TND", scale=scale,
        atten_mask=_npu_mask(q.device), actual_seq_qlen=ends, actual_seq_kvlen=ends,
        sparse_mode=causal if before == 2**31 - 1 else band, pre_tockens=before, next_tockens=0,
    )[0]  # fmt: skip
    return _heads_first(out, v.shape[-1])


def find_attention(model: nn.Module) -> Found:
    """The attention modules that call the attention of documents."""
    config: Any = getattr(model, "config", None)
    used = getattr(config, "_attn_implementation", None)
    if used != NAME:
        return Found([], [], f"{used}, of transformers" if used else None, used != "eager")
    sites: list[Site] = []
    for name, module in model.named_modules():
        forward = own_forward(module)
        if forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names:
            sites.append(Site(name, module, _kind_of(module)))
    return Found(sites, [])


def _kind_of(module: Any) -> AttentionKind:
    config = module.config
    heads = config.num_attention_heads
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    width = width or config.hidden_size // heads
    latent = hasattr(module, "kv_b_proj")  # its keys are made anew for every head
    return AttentionKind(
        heads, heads if latent else getattr(config, "num_key_value_heads", None) or heads, width,
        getattr(module, "v_head_dim", None) or width, getattr(module, "sliding_window", None),
        getattr(module, "sinks", None) is not None, _drops(module),
    )  # fmt: skip


def _drops(module: Any) -> bool:
    """Whether it drops out probabilities; families have the rate, or a module with it."""
    found = (getattr(module, name, None) for name in ("attention_dropout", "attn_dropout"))
    rates = (getattr(rate, "p", rate) for rate in found)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def _example(site: Site, situation: Situation) -> Example:
    """Three documents, one of a single token; a window that is shorter than the longest."""
    kind: AttentionKind = site.kind
    sizes = ((kind.heads, kind.width), (kind.key_heads, kind.width), (kind.key_heads, kind.value_width))
    inputs = tuple(  # as projections give them: [1, T, H, D] in memory
        random((1, situation.tokens, heads, width), 41 + n, situation.dtype, situation.device).transpose(1, 2)
        for n, (heads, width) in enumerate(sizes)
    )
    lens = situation.tokens - 17, 1, 16
    return Example(functools.partial(attend_documents, doc_lens=lens, **_settings(kind)), inputs, (lens,))


def _settings(kind: AttentionKind) -> dict[str, Any]:
    return {"scale": kind.width**-0.5, "window": None if kind.window is None else min(kind.window, 8)}


def _implementation(name: str, kernel: Kernel, **limits: Any) -> Implementation:
    def install(site: Site) -> None:
        setattr(site.module, KERNEL, kernel)

    def run(site: Site) -> Any:
        return lambda q, k, v, doc_lens: kernel(q, k, v, doc_lens=doc_lens, **_settings(site.kind))

    return Implementation(name, install, run, **limits)


def _half_precision(situation: Situation) -> str | None:
    if situation.dtype not in _HALF:
        return "it computes in bf16 or fp16 only (parallel.param_dtype)"
    return None


def _flash_lacking(situation: Situation) -> str | None:
    """What this device lacks for FlashAttention."""
    if situation.device.type != "cuda":
        return None
    if reason := _half_precision(situation):
        return reason
    major, minor = torch.cuda.get_device_capability(situation.device)
    return None if major >= 8 else f"it wants compute capability 8.0, and this GPU has {major}.{minor}"


def _no_dropout(site: Site, _: Situation) -> str | None:
    return f"{site.name} drops out attention probabilities" if site.kind.drops else None


def _no_sinks(site: Site, situation: Situation) -> str | None:
    return f"{site.name} has attention sinks" if site.kind.sinks else _no_dropout(site, situation)


def _no_sinks_of_one_width(site: Site, situation: Situation) -> str | None:
    if site.kind.width != site.kind.value_width:
        return f"{site.name} has values of another width than its keys"
    return _no_sinks(site, situation)


ATTENTION = Operation(
    name="attention", switch="use_flash_attn", module="attention", find=find_attention, example=_example,
    implementations=(
        _implementation(
            "lean", lean_documents, devices=("cpu", "cuda"), lacking=_flash_lacking, unsuited=_no_dropout
        ),
        _implementation(
            "varlen", varlen_documents, devices=("cuda",), lacking=_flash_lacking, unsuited=_no_sinks
        ),
        _implementation(
            "flash_attn", flash_attn_documents, devices=("cuda",), package=("flash-attn", "flash_attn"),
            lacking=_flash_lacking, unsuited=_no_sinks,
        ),
        _implementation("flex", flex_documents, devices=("cuda",), unsuited=_no_sinks_of_one_width),
        _implementation(
            "npu", npu_documents, devices=("npu",), package=("torch_npu", "torch_npu"),
            lacking=_half_precision, unsuited=_no_sinks,
        ),
    ),
    fused={"cuda": ("varlen", "flash_attn", "lean"), "npu": ("npu",), "": ("lean",)},
    automatic={
        "cpu": {"lean": "one output of all documents is kept, not two of each"},
        "cuda": {"varlen": "one kernel for all documents", "lean": "one kernel per document"},
        "npu": {"npu": "one kernel for all documents"},
    },
    plain="sdpa", beside_compiler=True,
)  # fmt: skip
