"""The closed form of a step's operations, against torch's own count of those that ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import tiny_config
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForCausalLM

from shardyard.models.flops import model_flops, visible_pairs

aten = torch.ops.aten
LENGTH = 24
DENSE, SPARSE = ("llama_tied", "qwen3", "qwen3_tied"), ("qwen3_moe", "deepseek_v3", "glm4_moe")


def build(family: str, attention: str, **config: Any) -> Any:
    made = tiny_config(family)
    for key, value in config.items():
        setattr(made, key, value)
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=torch.float32)


def step(model: Any) -> None:
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("family", (*DENSE, *SPARSE))
def test_the_closed_form_is_what_runs_when_every_product_is_a_plain_one(family: str) -> None:
    """Eager attention computes all pairs, those behind the mask too, and each expert by plain products."""
    model = build(family, "eager", _experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        step(model)
    flops = model_flops(model)
    assert flops is not None and len(flops.windows) == model.config.num_hidden_layers
    all_pairs = flops.pair * LENGTH**2 * len(flops.windows)
    products = flops.forward([LENGTH], LENGTH) - flops.attention([LENGTH])
    assert counter.get_total_flops() == 3 * (products + all_pairs)


def test_fused_attention_and_grouped_products_count_the_same() -> None:
    """Kernels that torch's counter does not know, their operations taken from the shapes they were given."""

    def grouped(a: Any, b: Any, *args: Any, out_shape: Any, **kwargs: Any) -> int:
        inner = a[-1]
        if len(a) == 2 and len(b) == 2:  # the gradient of the weights: each row meets one expert
            return 2 * a[0] * a[1] * b[1] if len(out_shape) == 3 else 0
        return 2 * a[0] * inner * b[-1]

    def flash(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, query, query)

    def flash_backward(grad: Any, query: Any, *args: Any, **kwargs: Any) -> int:
        return 2 * sdpa_flop_count(query, query, query)  # scores that are computed again not counted

    model = build("qwen3_moe", "sdpa", _experts_implementation="grouped_mm")
    model.to(torch.bfloat16)  # what the grouped kernel takes on every machine
    mapping = {
        aten._grouped_mm: grouped,
        aten._scaled_dot_product_flash_attention_for_cpu: flash,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flash_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        step(model)
    counts = counter.get_flop_counts()["Global"]
    assert {aten._grouped_mm, aten._scaled_dot_product_flash_attention_for_cpu} <= counts.keys()
    flops = model_flops(model)
    assert flops is not None
    all_pairs = flops.pair * LENGTH**2 * len(flops.windows)
    products = flops.forward([LENGTH], LENGTH) - flops.attention([LENGTH])
    assert counter.get_total_flops() == 3 * (products + all_pairs)


def test_a_step_of_two_documents_with_few_labels_by_hand() -> None:
    """Qwen3: hidden 32, 4 heads of 8 with 2 for keys, mlp 56, 2 layers, 199 words; documents of 5 and 3."""
    flops = model_flops(build("qwen3", "sdpa"))
    assert flops is not None
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 56
    pairs = 5 * 6 // 2 + 3 * 4 // 2
    forward = 2 * 8 * 2 * layer + 2 * 4 * 199 * 32 + 2 * pairs * (2 * 4 * 8 + 2 * 4 * 8)
    assert flops.forward([5, 3], 4) == forward
    assert flops.training([5, 3], 4) == 3 * forward


@pytest.mark.parametrize("length", (1, 2, 7, 12))
@pytest.mark.parametrize("window", (None, 1, 3, 7, 20))
def test_visible_pairs_are_those_of_a_loop(length: int, window: int | None) -> None:
    seen = sum(min(query + 1, window or length) for query in range(length))
    assert visible_pairs(length, window) == seen


def test_a_meta_model_counts_the_same_and_tied_weights_change_only_the_embedding() -> None:
    with torch.device("meta"):
        meta = model_flops(build("deepseek_v3", "sdpa"))
    assert meta == model_flops(build("deepseek_v3", "sdpa"))
    assert model_flops(build("qwen3", "sdpa")) == model_flops(build("qwen3_tied", "sdpa"))


def test_sliding_layers_see_their_window() -> None:
    flops = model_flops(build("gpt_oss", "eager"))
    assert flops is not None and set(flops.windows) == {None, 8}
    assert flops.attention([20]) == flops.pair * (visible_pairs(20, 8) + visible_pairs(20))


def test_an_architecture_that_is_more_than_attention_has_no_closed_form() -> None:
    from transformers import Lfm2Config

    config: Any = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model_flops(model) is None
