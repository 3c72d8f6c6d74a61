"""Hugging Face -> Megatron-core -> Hugging Face: every bit of every tensor comes back."""

from __future__ import annotations

import itertools
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.mcore import CONFIGS, DictWeights, differences, random_weights, shapes, tiny_config

from shardyard.convert.mcore import McoreLayout, McoreWeights, write_mcore
from shardyard.errors import UserError


class Cell(NamedTuple):
    """One place in the matrix of issue 5."""

    tp: int
    stages: str
    ep: int
    groups: int
    tied: bool
    implementation: Any
    kind: str


STAGES: dict[str, dict[str, Any]] = {
    "pp1": {},
    "pp2": {"pp": 2},
    "uneven": {"pp": 3, "num_layer_list": (1, 2, 1)},
    "vpp": {"pp": 2, "vpp": 1},
}
MATRIX = [
    Cell(*values)
    for values in itertools.product(
        (1, 2, 4), STAGES, (1, 2, 4), (1, 2, 4), (True, False), ("local", "transformer_engine"),
        ("dense", "grouped", "per_expert"),
    )
]  # fmt: skip
SAMPLE = [
    Cell(1, "pp1", 1, 4, True, "local", "dense"),
    Cell(2, "pp2", 1, 2, True, "local", "dense"),
    Cell(4, "uneven", 1, 4, False, "transformer_engine", "dense"),
    Cell(2, "vpp", 1, 4, True, "transformer_engine", "dense"),
    Cell(2, "pp1", 4, 2, False, "local", "grouped"),
    Cell(4, "pp2", 1, 4, True, "local", "grouped"),
    Cell(1, "uneven", 2, 1, True, "local", "grouped"),
    Cell(2, "vpp", 2, 2, False, "transformer_engine", "grouped"),
    Cell(2, "pp1", 2, 4, True, "transformer_engine", "per_expert"),
    Cell(2, "pp2", 2, 2, False, "local", "per_expert"),
    Cell(1, "vpp", 4, 1, True, "local", "per_expert"),
    # and cells that cannot be
    Cell(2, "pp1", 1, 1, True, "local", "dense"),
    Cell(4, "pp2", 1, 2, False, "local", "grouped"),
    Cell(4, "uneven", 2, 1, True, "transformer_engine", "per_expert"),
    Cell(1, "pp1", 2, 4, True, "local", "dense"),
]


def refusal(cell: Cell) -> str | None:
    """What a cell that cannot be is refused for."""
    if cell.groups % cell.tp:
        return f"tp is {cell.tp}, which does not divide the {cell.groups} key-value heads"
    if cell.kind == "dense" and cell.ep > 1:
        return f"ep is {cell.ep}, but qwen3 as configured has no experts"
    return None


def check_cell(cell: Cell, folder: Path) -> None:
    family = "qwen3" if cell.kind == "dense" else "qwen3_moe"
    config = tiny_config(family, num_key_value_heads=cell.groups, tie_word_embeddings=cell.tied)
    layout = McoreLayout(
        tp=cell.tp,
        ep=cell.ep,
        grouped=cell.kind == "grouped",
        implementation=cell.implementation,
        **STAGES[cell.stages],
    )
    source = random_weights(folder / "hf", config)
    refused = refusal(cell)
    if refused:
        with pytest.raises(UserError, match=refused):
            write_mcore(source, folder / "mcore", layout)
        assert not (folder / "mcore").exists()
        return
    read = round_trip(source, folder / "mcore", layout)
    assert read.layout == layout
    assert len(list((folder / "mcore").rglob("model_optim_rng.pt"))) == cell.tp * layout.pp * cell.ep


def round_trip(source: DictWeights, folder: Path, layout: McoreLayout) -> McoreWeights:
    """Write, read without being told the layout, and compare with the source."""
    write_mcore(source, folder, layout)
    read = McoreWeights(folder)
    assert differences(source.tensors, read) == []
    return read


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: "-".join(map(str, cell)))
def test_a_sample_of_the_matrix_comes_back_bit_for_bit(cell: Cell, tmp_path: Path) -> None:
    check_cell(cell, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("kind", ["dense", "grouped", "per_expert"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_whole_matrix_comes_back_bit_for_bit(tp: int, kind: str, stages: str, tmp_path: Path) -> None:
    cells = [cell for cell in MATRIX if (cell.tp, cell.kind, cell.stages) == (tp, kind, stages)]
    assert len(cells) == 36
    for number, cell in enumerate(cells):
        check_cell(cell, tmp_path / str(number))


TP2_PP2 = McoreLayout(tp=2, pp=2)


@pytest.mark.parametrize("family", CONFIGS)
def test_each_family_comes_back(family: str, tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config(family))
    round_trip(source, tmp_path / "mcore", TP2_PP2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_biases_that_config_json_asks_for_come_back(family: str, tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config(family, attention_bias=True))
    assert "model.layers.0.self_attn.o_proj.bias" in source.facts
    round_trip(source, tmp_path / "mcore", TP2_PP2)


SPECIAL = {
    "experts whole on each tensor-parallel rank": (
        "qwen3_moe", {}, McoreLayout(tp=2, ep=4, expert_tp=1, grouped=True), 4),
    "experts whole, tp above ep": ("mixtral", {}, McoreLayout(tp=4, ep=2, expert_tp=1), 4),
    "experts over tp and ep, grouped": (
        "qwen3_moe", {}, McoreLayout(tp=2, ep=2, moe_tp_extend_ep=True, grouped=True), 4),
    "experts over tp and ep, one by one": ("mixtral", {}, McoreLayout(tp=2, ep=2, moe_tp_extend_ep=True), 4),
    "a stage without layers": ("qwen3", {}, McoreLayout(pp=3, noop_layers=(4, 5)), 3),
    "noop layers within virtual stages": ("qwen3", {}, McoreLayout(pp=2, vpp=2, noop_layers=(0, 3, 5, 7)), 2),
    "dualpipev": (
        "qwen3", {"tie_word_embeddings": True}, McoreLayout(tp=2, pp=2, schedules_method="dualpipev"), 4),
    "a padded vocabulary": (
        "qwen3", {"vocab_size": 101}, McoreLayout(tp=2, make_vocab_size_divisible_by=8), 2),
    "latent attention by the parts of heads": (
        "deepseek_v3", {}, McoreLayout(tp=2, pp=2, dialect="mindspeed", mla_mm_split=True), 4),
    "some layers without experts": (
        "qwen3_moe", {"mlp_only_layers": [0, 1, 2]},
        McoreLayout(pp=2, ep=2, implementation="transformer_engine"), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECIAL)
def test_special_layouts_come_back(case: str, tmp_path: Path) -> None:
    family, changes, layout, files = SPECIAL[case]
    source = random_weights(tmp_path / "hf", tiny_config(family, **changes))
    read = round_trip(source, tmp_path / "mcore", layout)
    assert read.layout == layout
    assert len(list((tmp_path / "mcore").rglob("model_optim_rng.pt"))) == files


MTP = {
    "deepseek_v3": ("deepseek_v3", 2, McoreLayout(tp=2, pp=2)),
    "deepseek_v3 for MindSpeed": ("deepseek_v3", 1, McoreLayout(tp=2, pp=2, ep=2, dialect="mindspeed")),
    "deepseek_v3 through Transformer Engine": (
        "deepseek_v3", 1, McoreLayout(tp=2, grouped=True, ep=2, implementation="transformer_engine")),
    "glm4_moe": ("glm4_moe", 1, McoreLayout(pp=2, vpp=1, grouped=True)),
    "dualpipev": ("glm4_moe", 1, McoreLayout(pp=2, schedules_method="dualpipev", dialect="mindspeed")),
}  # fmt: skip


@pytest.mark.parametrize("case", MTP)
def test_mtp_layers_come_back(case: str, tmp_path: Path) -> None:
    family, layers, layout = MTP[case]
    source = random_weights(tmp_path / "hf", tiny_config(family), mtp=layers)
    assert round_trip(source, tmp_path / "mcore", layout).layout == layout


def test_mtp_layers_are_left_out_and_named_where_none_are_asked_for(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    source = random_weights(tmp_path / "hf", config, mtp=1)
    written = write_mcore(source, tmp_path / "mcore", McoreLayout(mtp_layers=0))
    assert set(written.left_out) == {name for name in source.facts if name.startswith("model.layers.4.")}
    kept = {name: tensor for name, tensor in source.tensors.items() if name in shapes(config)}
    assert differences(kept, McoreWeights(tmp_path / "mcore")) == []


def test_an_mtp_layer_with_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("deepseek_v3"), mtp=1)
    own = dict(source.tensors)
    own["model.layers.4.embed_tokens.weight"] = own["lm_head.weight"]
    with pytest.raises(
        UserError, match=r"model\.layers\.4\.embed_tokens\.weight differs from model\.embed_tok"
    ):
        write_mcore(DictWeights(source.folder, source.config, own), tmp_path / "mcore", McoreLayout())


def test_facts_come_in_the_order_of_the_layers(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("qwen3"))
    names = list(round_trip(source, tmp_path / "mcore", McoreLayout(pp=2, vpp=1)).facts)
    numbers = [int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name))]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2, 3}
    assert (names[0], names[-2:]) == ("model.embed_tokens.weight", ["model.norm.weight", "lm_head.weight"])


@pytest.mark.soak  # two new processes that import torch
def test_several_workers_write_and_a_pickled_reader_reads_the_same(tmp_path: Path) -> None:
    source = random_weights(tmp_path / "hf", tiny_config("qwen3_moe"))
    told: list[tuple[int, int]] = []
    write_mcore(
        source, tmp_path / "mcore", McoreLayout(tp=2, pp=2), workers=2, progress=lambda *n: told.append(n)
    )
    read = pickle.loads(pickle.dumps(McoreWeights(tmp_path / "mcore")))
    assert differences(source.tensors, read) == []
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] and told == sorted(told)


def test_files_are_those_of_a_plain_torch_save(tmp_path: Path) -> None:
    """Namespace, version, iteration, one chunk; read with and without mapping; checksums of a sound zip."""
    source = random_weights(tmp_path / "hf", tiny_config("qwen3"))
    write_mcore(source, tmp_path / "mcore", McoreLayout(noop_layers=(2,)))
    assert (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").read_text() == "1"
    path = tmp_path / "mcore" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for mapped in (False, True):
        content = torch.load(path, weights_only=False, mmap=mapped)
        assert list(content) == ["args", "checkpoint_version", "iteration", "model"]
        assert (content["checkpoint_version"], content["iteration"]) == (3.0, 1)
        norm = source.tensors["model.layers.2.self_attn.q_norm.weight"].view(torch.int16)
        found = content["model"]["decoder.layers.3.self_attention.q_layernorm.weight"]  # place 2 is empty
        assert torch.equal(found.view(torch.int16), norm)
        said = vars(content["args"])
        expected = {"num_layers": 5, "num_hidden_layers": 4, "noop_layers": "2", "hidden_size": 16,
                    "ffn_hidden_size": 24, "kv_channels": 8, "tensor_model_parallel_size": 1,
                    "untie_embeddings_and_output_weights": True, "padded_vocab_size": 96}  # fmt: skip
        assert {key: said[key] for key in expected} == expected
