"""Attention sinks: gpt-oss with packed documents equals transformers' eager attention of each alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from shardyard.models.packing import refusal
from shardyard.ops import DOCUMENTS_ATTENTION

DOC_LENS = (7, 13, 1, 30)


@pytest.fixture(scope="module")
def model():
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=131072,
    )  # fmt: skip
    assert refusal(config) is None
    assert config.layer_types == ["sliding_attention", "full_attention"]
    model = transformers.GptOssForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else (1.0 if "sinks" in name else 0.2) * noise)
    return model


def run(model, attention, rows, positions, **extra):
    """Logits, and the gradients of the sum of their squares."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    logits = [
        model(input_ids=row, position_ids=position, use_cache=False, **extra).logits
        for row, position in zip(rows, positions, strict=True)
    ]
    together = torch.cat(logits, dim=1)
    together.square().sum().backward()
    return together.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packed_documents_are_those_of_the_eager_model_alone(model):
    ids = torch.randint(0, 97, (1, sum(DOC_LENS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in DOC_LENS])[None]
    packed, gradients = run(model, DOCUMENTS_ATTENTION, [ids], [positions], doc_lens=DOC_LENS)
    alone, expected = run(model, "eager", ids.split(DOC_LENS, 1), positions.split(DOC_LENS, 1))
    assert (packed - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert expected["model.layers.0.self_attn.sinks"].abs().max() > 1e-3
    for name, wanted in expected.items():
        assert (gradients[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name


def test_without_sinks_it_would_be_another_model(model):
    """So the test above sees the sinks."""
    ids, positions = torch.arange(20)[None], torch.arange(20)[None]
    with_sinks, _ = run(model, DOCUMENTS_ATTENTION, [ids], [positions], doc_lens=(20,))
    before = [layer.self_attn.sinks.detach().clone() for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    without, _ = run(model, DOCUMENTS_ATTENTION, [ids], [positions], doc_lens=(20,))
    for layer, sinks in zip(model.model.layers, before, strict=True):
        layer.self_attn.sinks.data.copy_(sinks)
    assert (with_sinks - without).abs().max() > 0.01 * with_sinks.abs().max()
