"""config.json with the user's overrides: each acts or is refused."""

from __future__ import annotations

import pytest
from support.models import tiny_config, write_tiny_model
from support.training import Recipe, build_step

from shardyard.config.families import PACKED
from shardyard.errors import UserError
from shardyard.models.packing import refusal
from shardyard.models.source import with_overrides


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_type": "default"}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 1e6, "factor": 2.0},
        ),
    ],
)
def test_rope_is_set_by_any_of_its_names(overrides, wanted):
    found = with_overrides(tiny_config("qwen3"), overrides).rope_parameters
    assert {key: found[key] for key in wanted} == wanted and "type" not in found
    assert "rope_theta" in found


def test_lists_with_an_entry_per_layer_follow_the_number_of_layers():
    made = with_overrides(tiny_config("qwen3"), {"num_hidden_layers": 5})
    assert made.num_hidden_layers == 5 and len(made.layer_types) == 5
    sliding = with_overrides(
        tiny_config("qwen3"), {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    )
    assert sliding.sliding_window == 4 and "sliding_attention" in sliding.layer_types


def test_a_family_s_own_names_are_reached_by_the_common_ones():
    import transformers

    made = with_overrides(transformers.GPT2Config(n_layer=4), {"num_hidden_layers": 2})
    assert made.n_layer == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layer": 1}, "did you mean num_hidden_layers"),
        ({"num_hidden_layers": 0}, "whole number"),
        ({"num_hidden_layers": "1"}, "whole number"),
        ({"rope_scaling": {"rope_type": "bogus"}}, "rope_type"),
        ({"sliding_window": 4}, "another key decides"),
    ],
)
def test_overrides_without_effect_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        with_overrides(tiny_config("qwen3"), overrides)


def build(folder, overrides):
    built, _, _ = build_step(
        folder, Recipe(model={"train_from_scratch": True, "config_overrides": overrides})
    )
    return built.unpacked


def test_what_the_family_s_code_cannot_build_is_the_user_s_mistake(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    with pytest.raises(AssertionError) as caught:
        ranks.run(1, build, folder, {"hidden_act": "bogus"})
    assert isinstance(caught.value.cause, UserError) and "bogus" in str(caught.value.cause)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (
            "longrope",
            {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8},
        )
    ],
)
def test_positions_that_follow_from_the_longest_document_are_not_packed(kind, extra):
    config = with_overrides(
        tiny_config("qwen3"), {"rope_scaling": {"rope_type": kind, "factor": 2.0, **extra}}
    )
    assert "longest position" in (refusal(config) or "")


def test_dynamic_positions_are_refused(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    with pytest.raises(AssertionError) as caught:
        ranks.run(1, build, folder, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert "resumed nor split" in str(caught.value.cause)


def pack_every_measured_family():
    """Builds a tiny model of each measured family from its default config, and runs the self-test."""
    import tempfile
    from pathlib import Path

    import transformers

    small = dict(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    found = {}
    for family in sorted(PACKED):
        default = transformers.AutoConfig.for_model(family)
        known = {*default.to_dict(), *default.attribute_map}
        config = transformers.AutoConfig.for_model(family, **{k: v for k, v in small.items() if k in known})
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            built, _, _ = build_step(Path(folder), Recipe(model={"train_from_scratch": True}))
            found[family] = built.unpacked
    return found


def test_every_measured_family_builds_and_keeps_documents_apart(ranks):
    assert ranks.run(1, pack_every_measured_family)[0] == dict.fromkeys(sorted(PACKED))
