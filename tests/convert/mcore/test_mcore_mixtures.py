"""Megatron-core folders made of files of several checkpoints, and config.json files of other sizes: tensors
of fitting shapes would make a model that nobody trained.
"""

from __future__ import annotations

import logging
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mcore import differences, random_weights, shapes, tiny_config

from shardyard.convert.mcore import Given, McoreLayout, write_mcore
from shardyard.convert.mcore.families import Model
from shardyard.convert.mcore.rank_files import FILE
from shardyard.convert.mcore.read import McoreWeights
from shardyard.convert.mcore.sizes import check_shapes
from shardyard.convert.mcore.write import ITERATION
from shardyard.errors import UserError

TP2 = McoreLayout(tp=2, pp=2)
EXPERTS = McoreLayout(tp=2, ep=2, grouped=True)


def written(tmp_path: Path, family: str, layout: McoreLayout, **changes: Any):
    source = random_weights(tmp_path / "hf", tiny_config(family, **changes))
    write_mcore(source, tmp_path / "mcore", layout)
    return source, tmp_path / "mcore"


def rank_file(folder: Path, rank: str) -> Path:
    return folder / ITERATION / rank / FILE


def changed(path: Path, **values: Any) -> None:
    """Set entries of a rank's file, or of its ``args`` or ``model``."""
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(path, weights_only=False)
    for key, value in values.pop("model", {}).items():
        content["model"][key] = value(content["model"][key])
    for key, value in values.pop("args", {}).items():
        setattr(content["args"], key, value)
    torch.save({**content, **values}, path, pickle_protocol=4)


def test_every_tensor_s_shape_is_that_of_config_json():
    """Against the shapes that the tests' own models have, which are those of the published families."""
    for family in (
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "deepseek_v3",
        "deepseek_v2",
        "glm4_moe",
    ):
        config = tiny_config(family, num_key_value_heads=2)
        mtp = int(family in ("deepseek_v3", "glm4_moe"))
        right = {name: (shape, torch.float32) for name, shape in shapes(config, mtp=mtp).items()}
        model = Model.of(config)
        check_shapes(model, right, Path("folder"))
        for name, (shape, dtype) in right.items():
            if re.search(r"layers\.[23]\.|experts\.[1-9]", name):
                continue
            for place in range(len(shape)):
                wrong = tuple(length + (dim == place) for dim, length in enumerate(shape))
                with pytest.raises(UserError, match=rf"{name} is .*, but config\.json asks for"):
                    check_shapes(model, {name: (wrong, dtype)}, Path("folder"))


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [
        ("qwen3", TP2, {"hidden_size": 32}),
        ("qwen3", TP2, {"intermediate_size": 48}),
        ("qwen3_moe", EXPERTS, {"num_experts": 16}),
        ("qwen3_moe", EXPERTS, {"num_experts": 4}),
        ("qwen3_moe", EXPERTS, {"moe_intermediate_size": 16}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_config_of_another_size_is_refused_in_both_directions(
    tmp_path: Path, family: str, layout: McoreLayout, changes: dict[str, int]
) -> None:
    source, folder = written(tmp_path, family, layout)
    other = {**source.config, **changes}
    with pytest.raises(UserError, match=r"config\.json"):
        McoreWeights(folder, other)
    source.config = other
    with pytest.raises(UserError, match=r"config\.json"):
        write_mcore(source, tmp_path / "again", layout)
    assert not (tmp_path / "again").exists()


def test_heads_of_another_size_are_seen_in_the_arguments(tmp_path: Path) -> None:
    """Twice the heads of half the size make tensors of the same shapes, in another order."""
    source, folder = written(tmp_path, "llama", TP2)
    other = {**source.config, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    with pytest.raises(UserError, match=r"num_attention_heads of the .*arguments is 4, config\.json says 8"):
        McoreWeights(folder, other)


def test_a_layer_that_config_json_forgets_is_no_layer_of_multi_token_prediction(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("deepseek_v3"))
    source.config = {**source.config, "num_hidden_layers": 3}
    with pytest.raises(UserError, match=r"holds model\.layers\.3\..*which has no place"):
        write_mcore(source, tmp_path / "mcore", McoreLayout())
    assert not (tmp_path / "mcore").exists()


def test_a_rank_s_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "qwen3", TP2)
    changed_norm = {"model": {"decoder.layers.0.input_layernorm.weight": lambda norm: norm + 1}}
    second = rank_file(folder, "mp_rank_01_000")
    whole = second.read_bytes()
    changed(second, **changed_norm)
    with pytest.raises(
        UserError, match=r"mp_rank_01_000.*input_layernorm\.weight is not that of .*rank_00_0"
    ):
        McoreWeights(folder)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"iteration": 7}, "iteration is 7 here and 1 there"),
        ({"args": {"tensor_model_parallel_size": 4}}, "parallel_size is 4 here and 2 there"),
    ]
    for said, key in cases:
        second.write_bytes(whole)
        changed(second, **said)
        with pytest.raises(UserError, match=f"mp_rank_01_000.*of another checkpoint.*{key}"):
            McoreWeights(folder)
    second.write_bytes(whole)
    shutil.copytree(second.parent, second.parent.with_name("mp_rank_1_000"))
    with pytest.raises(UserError, match="are the same rank; which one counts"):
        McoreWeights(folder)


def test_norms_of_queries_and_keys_may_have_drifted_apart_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, folder = written(tmp_path, "qwen3", TP2)
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    changed(rank_file(folder, "mp_rank_01_000"), model={name: lambda norm: norm + 1})
    with caplog.at_level(logging.WARNING, logger="shardyard"):
        read = McoreWeights(folder)
    assert differences(source.tensors, read) == []
    assert f"1 norms of queries and keys, such as {name}, differ between ranks" in caplog.text


def test_what_is_said_against_the_checkpoint_s_own_word_is_refused(tmp_path: Path) -> None:
    """Experts whole on more ranks, or cut on fewer, make joined tensors of the same shapes."""
    _, folder = written(tmp_path, "qwen3_moe", EXPERTS)
    with pytest.raises(UserError, match=r"moe_tp_extend_ep: .* was written without it; leave it out"):
        McoreWeights(folder, given=Given(moe_tp_extend_ep=True))
    with pytest.raises(UserError, match=r"expert_tp: experts in .* are cut in 2; leave it out"):
        McoreWeights(folder, given=Given(expert_tp=1))


def test_joined_experts_of_a_folder_that_says_nothing_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, folder = written(tmp_path, "qwen3_moe", EXPERTS)
    with caplog.at_level(logging.WARNING, logger="shardyard"):
        McoreWeights(folder)
        assert not caplog.records
        for path in folder.rglob(FILE):
            content = torch.load(path, weights_only=False)
            del content["args"]
            torch.save(content, path, pickle_protocol=4)
        assert differences(source.tensors, McoreWeights(folder)) == []
    assert "give --moe-tp-extend-ep" in caplog.text
