"""Which parameters decay."""

from __future__ import annotations

import pytest
import torch

from shardyard.optim.groups import decays


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 2), True),
        ("model.embed_tokens.weight", (4, 2), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 4, 2), True),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.self_attn.q_norm.weight", (2, 4), False),  # Cohere's, of each head
        ("model.norm_head.proj.weight", (4, 2), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (3, 4), False),
    ],
)
def test_matrices_decay_norms_and_biases_do_not(name, shape, expected):
    assert decays(name, torch.zeros(shape)) is expected
