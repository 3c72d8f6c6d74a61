"""Which rank has which layers, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.mcore import DictWeights, random_weights, tiny_config

from shardyard.convert.mcore import FAMILIES, McoreLayout, Model, find_family, parse_list, write_mcore
from shardyard.convert.mcore.layout import Rank
from shardyard.errors import UserError


def places(layers: int, **fields: Any) -> list[list[list[int]]]:
    """Per stage and chunk the layers, each at its local number (-1: no layer there)."""
    layout = McoreLayout(**fields)
    model = Model.of(tiny_config("qwen3", num_hidden_layers=layers))
    layout.check(model)
    found: list[list[list[int]]] = [[[] for _ in range(layout.chunks(model))] for _ in range(layout.pp)]
    for layer, place in enumerate(layout.places(model)):
        chunk = found[place.pp][place.chunk]
        chunk += [-1] * (place.local - len(chunk))
        assert len(chunk) == place.local
        chunk.append(layer)
    return found


@pytest.mark.parametrize(
    ("layers", "fields", "expected"),
    [
        (4, {"pp": 2}, [[[0, 1]], [[2, 3]]]),
        (4, {"pp": 2, "num_layer_list": (3, 1)}, [[[0, 1, 2]], [[3]]]),
        (8, {"pp": 2, "vpp": 2}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (8, {"pp": 2, "vpp": 1}, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
        (8, {"pp": 2, "schedules_method": "dualpipev"}, [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]),
        (8, {"pp": 4, "schedules_method": "dualpipev"}, [[[0], [7]], [[1], [6]], [[2], [5]], [[3], [4]]]),
        (5, {"pp": 2, "noop_layers": (2,)}, [[[0, 1]], [[2, 3, 4]]]),
        (2, {"pp": 3, "noop_layers": (0, 2, 4, 5)}, [[[-1, 0]], [[-1, 1]], [[]]]),
        (6, {"pp": 2, "vpp": 2, "noop_layers": (4, 5)}, [[[0, 1], []], [[2, 3], [4, 5]]]),
    ],
)  # fmt: skip
def test_layers_are_where_megatron_looks_for_them(layers: int, fields: dict[str, Any], expected: Any) -> None:
    assert places(layers, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "rank", "name"),
    [
        ({}, Rank(0, 0, 0), "mp_rank_00"),
        ({"tp": 16}, Rank(11, 0, 0), "mp_rank_11"),
        ({"pp": 2}, Rank(1, 1, 0), "mp_rank_01_001"),
        ({"ep": 4}, Rank(1, 0, 3), "mp_rank_01_003"),
        ({"pp": 2, "ep": 4}, Rank(1, 1, 3), "mp_rank_01_001_003"),
    ],
)
def test_folders_of_ranks_are_named_as_megatron_names_them(fields: Any, rank: Rank, name: str) -> None:
    assert McoreLayout(**fields).folder_of(rank) == name


@pytest.mark.parametrize(
    ("tp", "ep", "pairs"),
    [
        (2, 4, [(0, 0), (1, 1), (0, 2), (1, 3)]),
        (4, 2, [(0, 0), (2, 0), (1, 1), (3, 1)]),
        (2, 2, [(0, 0), (1, 1)]),
        (2, 1, [(0, 0), (1, 0)]),
    ],
)
def test_with_whole_experts_only_matching_ranks_have_files(tp: int, ep: int, pairs: Any) -> None:
    assert [(r.tp, r.ep) for r in McoreLayout(tp=tp, ep=ep, expert_tp=1).ranks()] == pairs


REFUSED = [
    ("qwen3", {}, {"tp": 0}, r"tp is 0; a whole number above 0"),
    ("qwen3", {"num_key_value_heads": 2}, {"tp": 4}, r"tp is 4, .* the 2 key-value heads .*; 1, 2 would"),
    ("deepseek_v3", {}, {"tp": 8}, r"tp is 8, which does not divide the 4 attention heads"),
    ("qwen3", {"num_key_value_heads": 3}, {}, r"num_attention_heads \(4\) is no multiple of .*\(3\)"),
    ("qwen3", {"vocab_size": 101}, {"tp": 2}, r"vocabulary of 101; make_vocab_size_divisible_by: 1 pads"),
    ("qwen3", {}, {"make_vocab_size_divisible_by": 0}, r"make_vocab_size_divisible_by is 0"),
    ("qwen3", {}, {"pp": 3}, r"pp is 3, which does not divide 4 layers; .*num_layer_list.*noop_layers"),
    ("qwen3", {}, {"pp": 4, "noop_layers": (1,)}, r"pp is 4, .* 5 layers \(with 1 noop\)"),
    ("qwen3", {}, {"pp": 2, "vpp": 2}, r"vpp is 2 .* is the whole stage"),
    ("qwen3", {"num_hidden_layers": 6}, {"pp": 2, "vpp": 2}, r"vpp is 2 .* does not divide the 3 layers"),
    ("qwen3", {}, {"vpp": 2}, r"vpp cuts the stages of a pipeline, and pp is 1"),
    ("qwen3", {}, {"pp": 4, "schedules_method": "dualpipev"}, r"dualpipev halves stages; a stage has 1"),
    ("qwen3", {}, {"pp": 2, "schedules_method": "dualpipev", "vpp": 2}, r"halves the 2 layers .*; vpp is 2"),
    ("qwen3", {}, {"schedules_method": "1f1b"}, r"schedules_method is '1f1b'; there is dualpipev"),
    ("qwen3", {}, {"implementation": "te"}, r"transformer_impl is 'te'; there are local and"),
    ("qwen3", {}, {"noop_layers": (1, 1)}, r"noop_layers names a place twice: 1,1"),
    ("qwen3", {}, {"noop_layers": (1, 6)}, r"noop_layers names place 6; .* make places 0 to 5"),
    ("qwen3", {}, {"pp": 2, "num_layer_list": (1, 2, 1)}, r"num_layer_list names 3 stages, but pp is 2"),
    ("qwen3", {}, {"pp": 2, "num_layer_list": (2, 3)}, r"num_layer_list 2,3 makes 5 layers; the model has 4"),
    ("qwen3", {}, {"pp": 2, "num_layer_list": (2, 2), "vpp": 1}, r"num_layer_list and vpp exclude"),
    ("qwen3", {}, {"pp": 2, "num_layer_list": (2, 3), "noop_layers": (1,)}, r"num_layer_list and noop_lay"),
    ("qwen3", {}, {"ep": 2}, r"ep is 2, but qwen3 as configured has no experts"),
    ("qwen3", {}, {"grouped": True}, r"grouped is asked for, but qwen3 .* no experts"),
    ("qwen3_moe", {}, {"ep": 3}, r"ep is 3, which does not divide the 8 experts; 1, 2, 4, 8 would"),
    ("qwen3_moe", {}, {"ep": 4, "tp": 4, "moe_tp_extend_ep": True}, r"ep x tp is 16, which does not divide"),
    ("qwen3_moe", {}, {"tp": 4, "expert_tp": 2}, r"expert_tp is 2; experts are cut as tp says \(4\) or not"),
    ("qwen3_moe", {}, {"tp": 2, "expert_tp": 1, "moe_tp_extend_ep": True}, r"drop expert_tp: 1"),
    ("qwen3_moe", {"num_experts": 12, "num_key_value_heads": 4}, {"tp": 2, "ep": 3, "expert_tp": 1},
     r"expert_tp: 1 needs tp \(2\) to divide ep \(3\)"),
    ("deepseek_v3", {}, {"mla_mm_split": True}, r"mla_mm_split is MindSpeed's form"),
    ("deepseek_v3", {}, {"mtp_layers": -1}, r"mtp_num_layers is -1; a whole number from 0 on"),
    ("qwen3", {}, {"mtp_layers": 1}, r"mtp_num_layers is 1, but qwen3 has no MTP layers"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "fields", "words"), REFUSED)
def test_a_layout_that_cannot_be_is_refused(family: str, changes: Any, fields: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        McoreLayout(**fields).check(Model.of(tiny_config(family, **changes)))


def test_lists_of_numbers_are_read_strictly() -> None:
    assert (parse_list("94, 95", "noop_layers"), parse_list(" ", "noop_layers")) == ((94, 95), ())
    for text in ("1,,2", "1;2", "[1, 2]", "__import__('os').abort()", "-1", "1.0", "²", "1,2,", "9" * 10):
        with pytest.raises(UserError, match=r"noop_layers is .*whole numbers with commas"):
            parse_list(text, "noop_layers")


def test_families_are_found_by_both_names_and_others_are_refused_by_name() -> None:
    expected = {"qwen3": "qwen3", "qwen3-moe": "qwen3_moe", "qwen25": "qwen2", "llama2": "llama",
                "deepseek3": "deepseek_v3", "glm45-air": "glm4_moe", "mixtral": "mixtral",
                "glm4_moe": "glm4_moe"}  # fmt: skip
    assert {name: find_family(name)[0] for name in expected} == expected
    with pytest.raises(UserError) as refused:
        find_family("mamba2")
    assert "'mamba2'" in str(refused.value)
    assert all(name in str(refused.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": "4"}, r"config.json: num_hidden_layers is '4'"),
        ({"hidden_size": 0}, r"config.json: hidden_size is 0"),
        ({"vocab_size": None}, r"config.json: vocab_size is None"),
        ({"num_attention_heads": True}, r"config.json: num_attention_heads is True"),
        ({"model_type": None}, r"config.json names no model_type"),
    ],
)
def test_a_config_without_a_size_is_refused_by_its_key(changes: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Model.of({**tiny_config("qwen3"), **changes})


def changed(source: DictWeights, tensors: dict[str, torch.Tensor | None]) -> DictWeights:
    """``source`` with tensors replaced, added, or (None) removed."""
    kept = {name: tensor for name, tensor in {**source.tensors, **tensors}.items() if tensor is not None}
    return DictWeights(source.folder, source.config, kept)


def test_a_source_that_is_not_the_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("qwen3"))
    name = "model.layers.1.self_attn.q_proj"
    query = source.tensors[f"{name}.weight"]
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"lm_head.weight": None}, r"lacks lm_head\.weight, which qwen3 .* has"),
        ({"model.layers.9.mlp.down_proj.weight": query}, r"holds model\.layers\.9\.mlp.* no place in"),
        ({f"{name}.bias": query}, r"holds model\.layers\.1\.self_attn\.q_proj\.bias, which has no place"),
        ({f"{name}.weight": query[:-1]}, r"q_proj\.weight does not fit .*31 rows"),
        ({f"{name}.weight": query.float()}, r"q_proj.* several dtypes: .*float32"),
        ({"model.embed_tokens.weight": query}, r"model\.embed_tokens\.weight does not fit .* 32 rows"),
    ]
    for tensors, words in cases:
        with pytest.raises(UserError, match=words):
            write_mcore(changed(source, tensors), tmp_path / "mcore", McoreLayout(tp=2))
        assert not (tmp_path / "mcore").exists()


def test_frequencies_that_old_files_store_are_passed_over(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("llama"))
    old = changed(source, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert write_mcore(old, tmp_path / "mcore", McoreLayout()).left_out == ()
