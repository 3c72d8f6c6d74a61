"""Rank files worked out here by hand, element by element, from the published rules, against what is written.

Every element of the model has a number of its own, so a wrong row, column or order shows as a wrong number.
The loops here follow REFERENCE 6.2 one element at a time and use none of the package's rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.mcore import counted_weights, tiny_config

from shardyard.convert.mcore import McoreLayout, write_mcore

Rows = list[list[float]]
HIDDEN, HEAD_DIM, HEADS, GROUPS = 16, 8, 4, 2


def rank_file(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / "iter_0000001" / name / "model_optim_rng.pt", weights_only=False)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].tolist() == values, name


def by_hand_attention(hf: dict[str, Any], layer: int, tp: int, of: int) -> dict[str, Any]:
    """Queries of a group, its key, its value, for this rank's groups; o_proj's columns of its heads."""
    own = f"model.layers.{layer}.self_attn."
    per_group = HEADS // GROUPS
    joined: Rows = []
    for group in range(tp * GROUPS // of, (tp + 1) * GROUPS // of):
        for head in range(group * per_group, (group + 1) * per_group):
            for row in range(HEAD_DIM):
                joined.append(hf[own + "q_proj.weight"][head * HEAD_DIM + row])
        for part in "kv":
            for row in range(HEAD_DIM):
                joined.append(hf[f"{own}{part}_proj.weight"][group * HEAD_DIM + row])
    width = HEADS * HEAD_DIM // of
    return {
        "self_attention.linear_qkv.weight": joined,
        "self_attention.linear_proj.weight": [
            [row[column] for column in range(tp * width, (tp + 1) * width)]
            for row in hf[own + "o_proj.weight"]
        ],
        "self_attention.q_layernorm.weight": hf[own + "q_norm.weight"],
        "self_attention.k_layernorm.weight": hf[own + "k_norm.weight"],
        "input_layernorm.weight": hf[f"model.layers.{layer}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf[f"model.layers.{layer}.post_attention_layernorm.weight"],
    }


def by_hand_fc1(gate: Rows, up: Rows, tp: int, of: int) -> Rows:
    """The rank's rows of the gate, then its rows of the up projection."""
    share = len(gate) // of
    rows: Rows = []
    for matrix in (gate, up):
        for row in range(tp * share, (tp + 1) * share):
            rows.append(matrix[row])
    return rows


def by_hand_columns(matrix: Rows, tp: int, of: int) -> Rows:
    share = len(matrix[0]) // of
    return [row[tp * share : (tp + 1) * share] for row in matrix]


def test_dense_tp2_pp2_equals_the_files_worked_out_by_hand(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_key_value_heads=GROUPS, tie_word_embeddings=True)
    source = counted_weights(tmp_path / "hf", config)
    hf = {name: tensor.tolist() for name, tensor in source.tensors.items()}
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=2, pp=2))
    for stage, layers in ((0, (0, 1)), (1, (2, 3))):
        for tp in (0, 1):
            expected: dict[str, Any] = {}
            embedding = hf["model.embed_tokens.weight"][tp * 48 : (tp + 1) * 48]
            if stage == 0:
                expected["embedding.word_embeddings.weight"] = embedding
            for local, layer in enumerate(layers):
                mlp = f"model.layers.{layer}.mlp."
                parts = by_hand_attention(hf, layer, tp, 2)
                parts["mlp.linear_fc1.weight"] = by_hand_fc1(
                    hf[mlp + "gate_proj.weight"], hf[mlp + "up_proj.weight"], tp, 2
                )
                parts["mlp.linear_fc2.weight"] = by_hand_columns(hf[mlp + "down_proj.weight"], tp, 2)
                expected |= {f"decoder.layers.{local}.{name}": value for name, value in parts.items()}
            if stage == 1:  # tied, but the last stage has no embedding to share: a copy
                expected["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
                expected["output_layer.weight"] = embedding
            assert_same(rank_file(tmp_path / "mcore", f"mp_rank_0{tp}_00{stage}")["model"], expected)


def test_grouped_experts_ep2_tp2_equal_the_files_worked_out_by_hand(tmp_path: Path) -> None:
    """weight1: per expert the transposed [gate; up] of the rank, expert behind expert, read as H rows."""
    config = tiny_config("qwen3_moe", num_key_value_heads=GROUPS, num_hidden_layers=2, num_experts=4)
    source = counted_weights(tmp_path / "hf", config)
    hf = {name: tensor.tolist() for name, tensor in source.tensors.items()}
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=2, ep=2, grouped=True))
    for tp in (0, 1):
        for ep in (0, 1):
            expected: dict[str, Any] = {
                "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"][tp * 48 : (tp + 1) * 48],
                "output_layer.weight": hf["lm_head.weight"][tp * 48 : (tp + 1) * 48],
                "decoder.final_layernorm.weight": hf["model.norm.weight"],
            }
            for layer in (0, 1):
                own = f"model.layers.{layer}.mlp."
                parts = by_hand_attention(hf, layer, tp, 2)
                parts["mlp.router.weight"] = hf[own + "gate.weight"]
                first: list[float] = []
                second: list[float] = []
                for expert in (2 * ep, 2 * ep + 1):
                    gate, up, down = (
                        hf[f"{own}experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
                    )
                    fused = by_hand_fc1(gate, up, tp, 2)
                    for column in range(HIDDEN):  # the transpose of fused, row by row
                        for row in range(len(fused)):
                            first.append(fused[row][column])
                    for inner in range(tp * 4, tp * 4 + 4):  # the transpose of down's columns of this rank
                        for row in range(HIDDEN):
                            second.append(down[row][inner])
                width = len(first) // HIDDEN
                parts["mlp.experts.weight1"] = [first[r * width : (r + 1) * width] for r in range(HIDDEN)]
                parts["mlp.experts.weight2"] = [
                    second[r * HIDDEN : (r + 1) * HIDDEN] for r in range(len(second) // HIDDEN)
                ]
                expected |= {f"decoder.layers.{layer}.{name}": value for name, value in parts.items()}
            assert_same(rank_file(tmp_path / "mcore", f"mp_rank_0{tp}_00{ep}")["model"], expected)


def test_virtual_stages_and_transformer_engine_names_by_hand(tmp_path: Path) -> None:
    """One layer a chunk: stage 0 has layers 0 and 2, stage 1 has 1 and 3; norms go with projections."""
    config = tiny_config("qwen3", num_key_value_heads=GROUPS)
    source = counted_weights(tmp_path / "hf", config)
    write_mcore(source, tmp_path / "mcore", McoreLayout(pp=2, vpp=1, implementation="transformer_engine"))
    for stage, chunk, layer in ((0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)):
        content = rank_file(tmp_path / "mcore", f"mp_rank_00_00{stage}")
        assert "model" not in content
        found = content[f"model{chunk}"]
        own = f"model.layers.{layer}."
        expected = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        }
        for name, hf in expected.items():
            assert torch.equal(found[f"decoder.layers.0.{name}"], source.tensors[own + hf])
        assert ("embedding.word_embeddings.weight" in found) == (layer == 0)
        assert ("output_layer.weight" in found) == (layer == 3)


def test_transformer_engine_experts_by_hand(tmp_path: Path) -> None:
    """Expert K of the rank is weightK; layers with experts keep their norm apart."""
    source = counted_weights(tmp_path / "hf", tiny_config("qwen3_moe", num_hidden_layers=1))
    layout = McoreLayout(ep=4, grouped=True, implementation="transformer_engine")
    write_mcore(source, tmp_path / "mcore", layout)
    found = rank_file(tmp_path / "mcore", "mp_rank_00_003")["model"]
    hf = {name: tensor.tolist() for name, tensor in source.tensors.items()}
    for local, expert in ((0, 6), (1, 7)):
        own = f"model.layers.0.mlp.experts.{expert}."
        fused = hf[own + "gate_proj.weight"] + hf[own + "up_proj.weight"]
        assert found[f"decoder.layers.0.mlp.experts.linear_fc1.weight{local}"].tolist() == fused
        down = found[f"decoder.layers.0.mlp.experts.linear_fc2.weight{local}"]
        assert down.tolist() == hf[own + "down_proj.weight"]
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in found


def test_latent_attention_for_both_readers_by_hand(tmp_path: Path) -> None:
    """MindSpeed joins the latent projections, whole on each rank; megatron-core cuts each one's rows."""
    source = counted_weights(tmp_path / "hf", tiny_config("deepseek_v3", num_hidden_layers=1))
    hf = {name: tensor.tolist() for name, tensor in source.tensors.items()}
    own, attention = "model.layers.0.self_attn.", "decoder.layers.0.self_attention."
    query, key = hf[own + "q_a_proj.weight"], hf[own + "kv_a_proj_with_mqa.weight"]
    write_mcore(source, tmp_path / "mindspeed", McoreLayout(tp=2, dialect="mindspeed"))
    write_mcore(source, tmp_path / "megatron", McoreLayout(tp=2))
    for tp in (0, 1):
        mindspeed = rank_file(tmp_path / "mindspeed", f"mp_rank_0{tp}")["model"]
        megatron = rank_file(tmp_path / "megatron", f"mp_rank_0{tp}")["model"]
        assert mindspeed[f"{attention}linear_qkv.weight"].tolist() == query + key
        assert megatron[f"{attention}linear_q_down_proj.weight"].tolist() == query[tp * 4 : tp * 4 + 4]
        assert megatron[f"{attention}linear_kv_down_proj.weight"].tolist() == key[tp * 8 : tp * 8 + 8]
        for found in (mindspeed, megatron):
            up = hf[own + "kv_b_proj.weight"]
            assert found[f"{attention}linear_kv_up_proj.weight"].tolist() == up[tp * 32 : tp * 32 + 32]
            assert found[f"{attention}kv_layernorm.weight"].tolist() == hf[own + "kv_a_layernorm.weight"]


def test_latent_attention_by_the_parts_of_heads_by_hand(tmp_path: Path) -> None:
    """Heads of 8 rows without and 4 with position, of 8 key and 8 value rows; rank 1 has heads 2 and 3."""
    source = counted_weights(tmp_path / "hf", tiny_config("deepseek_v3", num_hidden_layers=1))
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=2, dialect="mindspeed", mla_mm_split=True))
    found = rank_file(tmp_path / "mcore", "mp_rank_01")["model"]
    query = source.tensors["model.layers.0.self_attn.q_b_proj.weight"].tolist()
    keys = source.tensors["model.layers.0.self_attn.kv_b_proj.weight"].tolist()
    expected = {
        "linear_qk_nope": [query[head * 12 + row] for head in (2, 3) for row in range(8)],
        "linear_qk_rope": [query[head * 12 + row] for head in (2, 3) for row in range(8, 12)],
        "linear_kv_nope": [keys[head * 16 + row] for head in (2, 3) for row in range(8)],
        "linear_v": [keys[head * 16 + row] for head in (2, 3) for row in range(8, 16)],
    }
    for name, rows in expected.items():
        assert found[f"decoder.layers.0.self_attention.{name}.weight"].tolist() == rows
    assert not [name for name in found if "up_proj" in name]


def test_experts_over_tp_and_ep_by_hand(tmp_path: Path) -> None:
    """Bucket ep x tp_size + tp has the experts, uncut."""
    source = counted_weights(tmp_path / "hf", tiny_config("mixtral", num_hidden_layers=1))
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=2, ep=2, moe_tp_extend_ep=True))
    for tp, ep, experts in ((0, 0, (0, 1)), (1, 0, (2, 3)), (0, 1, (4, 5)), (1, 1, (6, 7))):
        found = rank_file(tmp_path / "mcore", f"mp_rank_0{tp}_00{ep}")["model"]
        for local, expert in enumerate(experts):
            down = source.tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"]
            name = f"decoder.layers.0.mlp.experts.local_experts.{local}.linear_fc2.weight"
            assert torch.equal(found[name], down)


def test_padding_is_zeros_behind_the_last_row(tmp_path: Path) -> None:
    """101 rows, a multiple of 8 x tp 2: 112; the second rank has 45 rows of words and 11 of zeros."""
    source = counted_weights(tmp_path / "hf", tiny_config("qwen3", vocab_size=101))
    write_mcore(source, tmp_path / "mcore", McoreLayout(tp=2, make_vocab_size_divisible_by=8))
    content = rank_file(tmp_path / "mcore", "mp_rank_01")
    table = content["model"]["embedding.word_embeddings.weight"]
    assert table.shape == (56, 16) and content["args"].padded_vocab_size == 112
    assert torch.equal(table[:45], source.tensors["model.embed_tokens.weight"][56:])
    assert not table[45:].any()
