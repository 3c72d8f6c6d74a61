"""What a whole decoder layer keeps between forward and backward, in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import tiny_config
from support.saved import saved_bytes
from transformers import AutoModelForCausalLM

from shardyard.config import OptimizationConfig
from shardyard.ops import DOCUMENTS_ATTENTION
from shardyard.ops.apply import apply_operators
from shardyard.ops.registry import Situation

TOKENS, DOCUMENTS = 40, (25, 15)
HIDDEN, INNER, HEADS, KEY_HEADS, WIDTH = 32, 56, 4, 2, 8  # of the tiny families


def _kept(family: str, wish: Any) -> int:
    """Bytes beside the layer's input, its parameters, cosines and sines."""
    model: Any = AutoModelForCausalLM.from_config(
        tiny_config(family), attn_implementation=DOCUMENTS_ATTENTION
    )
    switches = dict.fromkeys(
        ("use_fused_rmsnorm", "use_fused_rotary_pos_emb", "use_flash_attn", "use_fused_swiglu"), wish
    )
    apply_operators(model, OptimizationConfig(**switches), Situation(torch.device("cpu"), torch.float32))
    layer = model.model.layers[0]
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    tables = model.model.rotary_emb(x, positions)

    def forward() -> Any:
        return layer(x, position_embeddings=tables, attention_mask=None, doc_lens=DOCUMENTS)

    return saved_bytes(forward, but=[x, *tables, *layer.parameters()])


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_a_layer_keeps_what_its_products_need_and_no_more(family: str) -> None:
    per_token = HEADS * WIDTH + 2 * KEY_HEADS * WIDTH  # q, k, v, as attention reads them
    per_token += HEADS * WIDTH + HEADS  # its output and log-sum-exp
    per_token += HIDDEN  # the stream between attention and MLP
    per_token += 2  # a number of each norm's row
    per_token += 2 * INNER  # gate and up
    if family == "qwen3":  # q and k before their norms, and a number of each row
        per_token += (HEADS + KEY_HEADS) * (WIDTH + 1)
    assert _kept(family, "auto") == TOKENS * per_token * 4
    # The family's code: each norm's rows twice more (scaled or not), the MLP's two more, attention's copies.
    assert _kept(family, False) >= TOKENS * (per_token + 4 * HIDDEN + 2 * INNER + HEADS * WIDTH) * 4
