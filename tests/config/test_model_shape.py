"""What is read of a model's config.json, in the words of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.config import ModelConfig, ModelShape, read_shape
from shardyard.config.model_shape import shape_of

DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 500,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "sliding_window": None,
}  # fmt: skip
MOE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 96, "moe_intermediate_size": 24, "vocab_size": 500,
    "n_routed_experts": 16, "n_shared_experts": 2, "first_k_dense_replace": 3, "kv_lora_rank": 12,
    "q_lora_rank": None, "v_head_dim": 10,
}  # fmt: skip


def test_a_dense_model() -> None:
    assert shape_of(DENSE) == ModelShape(
        model_type="qwen3", layers=6, hidden=64, heads=8, kv_heads=2, head_dim=16, vocab=500,
        intermediate=96, dense_layers=6, tied=True, max_positions=4096,
    )  # fmt: skip


def test_a_model_whose_layers_all_have_experts_has_no_dense_width() -> None:
    shape = shape_of(MOE)
    assert (shape.experts, shape.experts_per_token, shape.expert_intermediate) == (8, 2, 24)
    assert (shape.dense_layers, shape.intermediate, shape.shared_intermediate) == (0, None, None)


def test_latent_attention_and_shared_experts() -> None:
    shape = shape_of(LATENT)
    assert (shape.kv_rank, shape.query_rank, shape.value_dim) == (12, None, 10)
    assert (shape.experts, shape.dense_layers, shape.intermediate) == (16, 3, 96)
    assert shape.shared_intermediate == 2 * 24


@pytest.mark.parametrize(
    ("change", "dense_layers"),
    [
        ({"mlp_only_layers": [0, 4]}, 2),
        ({"decoder_sparse_step": 2}, 3),  # layers 1, 3 and 5 have experts
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 4),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "dense"]}, 2),
        ({"first_k_dense_replace": 50}, 6),
    ],
)
def test_layers_without_experts_are_counted(change: dict[str, Any], dense_layers: int) -> None:
    shape = shape_of({**MOE, **change})
    assert (shape.dense_layers, shape.intermediate) == (dense_layers, 96)


@pytest.mark.parametrize(
    ("config", "slides"),
    [
        ({"model_type": "gpt_oss", "sliding_window": 128}, True),
        ({"model_type": "mistral", "sliding_window": 4096}, True),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "qwen2", "sliding_window": 131072}, False),
        ({"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}, False),
        ({"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": True}, True),
        ({"model_type": "x", "sliding_window": 8, "layer_types": ["full_attention"] * 2}, False),
        ({"model_type": "x", "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_sliding_windows(config: dict[str, Any], slides: bool) -> None:
    assert shape_of(config).sliding_window is slides


def test_the_names_of_older_families() -> None:
    shape = shape_of(
        {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "attn_pdrop": 0.1, "n_positions": 64}
    )
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (3, 32, 4, 4, 8)
    assert (shape.attention_dropout, shape.max_positions, shape.experts) == (0.1, 64, 0)


def test_a_nested_text_config_counts() -> None:
    outer = {"model_type": "gemma3", "hidden_size": 9, "text_config": {**DENSE, "model_type": "gemma3_text"}}
    assert shape_of(outer).model_type == "gemma3_text"
    assert shape_of(outer).hidden == 64
    assert shape_of(outer, {"text_config": {"num_hidden_layers": 2}}).layers == 2


def test_overrides_win_under_either_name() -> None:
    shape = shape_of(LATENT, {"num_hidden_layers": 2, "num_experts": 4, "first_k_dense_replace": 0})
    assert (shape.layers, shape.experts, shape.dense_layers) == (2, 4, 0)


@pytest.mark.parametrize("value", ["32", True, -4, 0, 2.5, None, [8]])
def test_what_is_no_size_is_not_known(value: object) -> None:
    assert shape_of({"model_type": "x", "vocab_size": value}).vocab is None


def test_a_folder_is_read_with_the_runs_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE), encoding="utf-8")
    model = ModelConfig(model_name_or_path=str(tmp_path), config_overrides={"num_hidden_layers": 3})
    shape, unknown = read_shape(model)
    assert unknown is None and shape is not None and shape.layers == 3


def write_config(folder: Path, layers: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": layers}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("file", ["", "config.json"])
def test_the_config_of_a_checkpoint_is_beside_it_in_its_assets_or_where_the_yaml_says(
    tmp_path: Path, file: str
) -> None:
    weights, named = tmp_path / "global_step_5", write_config(tmp_path / "named", 2)
    weights.mkdir()
    model = ModelConfig(model_name_or_path=str(weights), config_name_or_path=str(named / file))
    layers = []
    for folder in (None, weights / "assets", weights):
        if folder is not None:
            write_config(folder, 3 if folder.name == "assets" else 4)
        shape, unknown = read_shape(model)
        assert shape is not None and unknown is None
        layers.append(shape.layers)
    assert layers == [2, 3, 4]


def test_where_a_config_was_looked_for_is_told(tmp_path: Path) -> None:
    beside = read_shape(ModelConfig(model_name_or_path=str(tmp_path)))[1] or ""
    assert str(tmp_path / "assets/config.json") in beside and "model.config_name_or_path" in beside
    named = ModelConfig(model_name_or_path=str(tmp_path), config_name_or_path=str(tmp_path / "other"))
    assert str(tmp_path / "other/config.json") in (read_shape(named)[1] or "")
    hub = read_shape(ModelConfig(model_name_or_path="organisation/model"))[1]
    assert hub == "organisation/model/config.json is not on this machine"
    assert read_shape(ModelConfig(model_name_or_path="x" * 5000)) == (
        None, "config.json is not on this machine",
    )  # fmt: skip


def test_a_named_config_that_is_not_there_is_a_warning_of_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_config(tmp_path / "weights", 2)
    words = [f"model.model_name_or_path={weights}", f"training.output_dir={tmp_path}/out"]
    assert main(["check", *words, f"model.config_name_or_path={tmp_path}/gone"]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    named = [line for line in warned if "model." in line]
    assert named == [f"warning: model.config_name_or_path: {tmp_path}/gone does not exist on this machine"]
