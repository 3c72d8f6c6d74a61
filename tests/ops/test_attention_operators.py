"""The kernels behind the attention of documents: what an attention module gets, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.attention import relative_error, softmax_by_hand
from support.models import tiny_config
from support.saved import saved_bytes
from transformers import AutoModelForCausalLM

from shardyard.config import OptimizationConfig
from shardyard.errors import UserError
from shardyard.ops import DOCUMENTS_ATTENTION, documents_attention
from shardyard.ops.apply import apply_operators
from shardyard.ops.attention_kernels import ATTENTION, AttentionKind, find_attention
from shardyard.ops.documents import attend_documents, lean_documents
from shardyard.ops.registry import Situation

CPU = Situation(torch.device("cpu"), torch.float32)


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(widths: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """As projections give them: [1, T, H, D] in memory; two query heads to a key head."""
    sizes = ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    return [
        _random(1, 23, heads, width, seed=number, dtype=dtype).transpose(1, 2)
        for number, (heads, width) in enumerate(sizes)
    ]


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("lens", [(23,), (9, 0, 1, 13), (1, 1, 21)])
@pytest.mark.parametrize("widths", [(8, 8), (12, 8)], ids=["one width", "latent"])
def test_lean_equals_the_softmax_written_out(
    lens: tuple[int, ...], window: int | None, widths: tuple[int, int]
) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in _qkv(widths)]
    cotangent = _random(1, 4, 23, widths[1], seed=5)
    out = lean_documents(*leaves, doc_lens=lens, scale=0.3, window=window)
    expected = softmax_by_hand(*leaves, [n for n in lens if n], 0.3, window, None)
    assert relative_error(out, expected) < 2e-6
    found = torch.autograd.grad(out, leaves, cotangent)
    for have, want in zip(found, torch.autograd.grad(expected, leaves, cotangent.double()), strict=True):
        assert relative_error(have, want.double()) < 5e-6


def test_bf16_is_that_of_pytorch_s_attention() -> None:
    q, k, v = _qkv(dtype=torch.bfloat16)
    settings: dict[str, Any] = dict(doc_lens=(9, 14), scale=0.3, window=None)
    torch.testing.assert_close(lean_documents(q, k, v, **settings), attend_documents(q, k, v, **settings))


def test_gradients_are_those_of_finite_differences() -> None:
    leaves = [tensor[:, :, :5].double().requires_grad_() for tensor in _qkv((4, 4))]
    assert torch.autograd.gradcheck(
        lambda q, k, v: lean_documents(q, k, v, doc_lens=(2, 3), scale=0.4, window=None), tuple(leaves)
    )


def test_one_output_is_kept_and_the_next_layer_reads_it_as_it_lies() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in _qkv()]
    module, weight = torch.nn.Module(), _random(32, 32, seed=6).requires_grad_()

    def through() -> torch.Tensor:
        out, _ = documents_attention(module, *leaves, None, doc_lens=(9, 14))
        return out.flatten(2) @ weight

    output, per_query = 23 * 4 * 8 * 4, 23 * 4 * 4
    eager = saved_bytes(through, but=[*leaves, weight])
    module.documents_kernel = lean_documents
    assert saved_bytes(through, but=[*leaves, weight]) == output + per_query
    assert eager >= 2 * output + per_query


def _model(family: str, attention: str = DOCUMENTS_ATTENTION) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=attention)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3", AttentionKind(4, 2, 8, 8, None, False)),
        ("llama_tied", AttentionKind(4, 2, 8, 8, None, False)),
        ("deepseek_v3", AttentionKind(4, 4, 16, 8, None, False)),
        ("gpt_oss", AttentionKind(4, 2, 8, 8, 8, True)),
    ],
)
def test_the_attention_of_a_family_is_found(family: str, kind: AttentionKind) -> None:
    model = _model(family)
    sites = find_attention(model).sites
    assert len(sites) == model.config.num_hidden_layers and sites[0].kind == kind
    (row,) = (
        row for row in apply_operators(model, OptimizationConfig(), CPU) if row.operation == "attention"
    )
    assert row.runs == "lean"
    assert all(site.module.documents_kernel is lean_documents for site in sites)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_dropout_of_probabilities_is_pytorch_s_and_the_table_says_so(family: str) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2)  # it drops out by default
    if family == "qwen3":
        config = tiny_config("qwen3")
        config.attention_dropout = 0.2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=DOCUMENTS_ATTENTION)
    rows = apply_operators(model, OptimizationConfig(), CPU)
    (row,) = (row for row in rows if row.operation == "attention")
    assert row.runs == "sdpa" and "drops out attention probabilities" in row.why
    with pytest.raises(UserError, match=r"use_flash_attn: true cannot be had .*drops out"):
        apply_operators(model, OptimizationConfig(use_flash_attn=True), CPU)


def test_false_is_one_attention_of_pytorch_per_document() -> None:
    model = _model("qwen3")
    rows = apply_operators(model, OptimizationConfig(use_flash_attn=False), CPU)
    assert next(row.runs for row in rows if row.operation == "attention") == "sdpa"
    assert not any(hasattr(module, "documents_kernel") for module in model.modules())


def test_an_attention_of_transformers_is_told_and_its_switch_refused() -> None:
    model = _model("qwen3", "eager")
    rows = apply_operators(model, OptimizationConfig(), CPU)
    assert next(row.runs for row in rows if row.operation == "attention") == "eager, of transformers"
    with pytest.raises(UserError, match="use_flash_attn: true, but this model runs eager, of transformers"):
        apply_operators(model, OptimizationConfig(use_flash_attn=True), CPU)


def test_pytorch_s_own_fused_attention_is_what_true_asks_for() -> None:
    model = _model("qwen3", "sdpa")
    rows = apply_operators(model, OptimizationConfig(use_flash_attn=True), CPU)
    assert next(row.runs for row in rows if row.operation == "attention") == "sdpa, of transformers"
    with pytest.raises(UserError, match="use_flash_attn: lean, but this model runs sdpa"):
        apply_operators(model, OptimizationConfig(use_flash_attn="lean"), CPU)


def test_what_a_device_lacks_is_said() -> None:
    by_name = {implementation.name: implementation for implementation in ATTENTION.implementations}
    cuda = Situation(torch.device("cuda", 0), torch.float32)
    assert "bf16 or fp16 only" in (by_name["varlen"].missing(cuda) or "")
    assert by_name["flash_attn"].missing(cuda) == "flash-attn is not installed"
    assert by_name["flex"].missing(CPU) == "it runs on cuda only"
    (site, *_) = find_attention(_model("gpt_oss")).sites
    assert "sinks" in (by_name["varlen"].unsuited(site, cuda) or "")
