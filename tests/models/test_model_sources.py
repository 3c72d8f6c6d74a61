"""Which folders a model's config, weights and tokenizer come from; conversions happen once or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardyard.config import ModelConfig
from shardyard.errors import UserError
from shardyard.models.source import ModelSource, resolve_source, tokenizer_options

CONFIG = json.dumps({"model_type": "qwen3"})


def make(folder: Path, *names: str, config: bool = False) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "config.json").write_text(CONFIG)
    return folder


def resolve(folder: Path, config: Path | None = None, **hooks) -> ModelSource:
    options = ModelConfig(
        model_name_or_path=str(folder), config_name_or_path=None if config is None else str(config)
    )
    return resolve_source(options, fetch_first=lambda fetch: fetch(), **hooks)


def test_a_hugging_face_folder_is_all_three(tmp_path):
    folder = make(tmp_path / "m", "model.safetensors", config=True)
    assert resolve(folder) == ModelSource(folder, folder, "files")
    assert resolve(folder, folder) == ModelSource(folder, folder, "files")
    assert resolve(folder, folder / "config.json") == ModelSource(folder, folder, "files")
    options = ModelConfig(model_name_or_path=str(folder))
    assert tokenizer_options(options, resolve(folder)) is options
    make(folder, "latest_checkpointed_iteration.txt")  # as some converters leave it there
    assert resolve(folder) == ModelSource(folder, folder, "files")


def test_a_named_config_is_for_folders_without_one(tmp_path):
    bare, other = make(tmp_path / "bare", "model.safetensors"), make(tmp_path / "other", config=True)
    own = make(tmp_path / "own", "model.safetensors", config=True)
    assert resolve(bare, other) == ModelSource(other, bare, "files")
    with pytest.raises(UserError, match=r"config_name_or_path: .*own has a config.json.*config_overrides"):
        resolve(own, other)
    with pytest.raises(UserError, match=r"holds no config.json.*config_name_or_path"):
        resolve(bare)
    with pytest.raises(UserError, match=r"config_name_or_path: .*bare holds no config.json"):
        resolve(bare, bare)
    with pytest.raises(UserError, match=r"config_name_or_path: no folder .*nowhere"):
        resolve(bare, tmp_path / "nowhere")


MEGATRON = {
    "tracker": ("latest_checkpointed_iteration.txt",),
    "iterations": ("iter_0000001/mp_rank_00/model_optim_rng.pt",),
    "one": ("mp_rank_00_000/model_optim_rng.pt",),
    "torch_dist": (".metadata", "metadata.json", "__0_0.distcp"),
}


@pytest.mark.parametrize("kind", MEGATRON)
def test_a_megatron_folder_is_converted_once_while_it_stays_the_same(tmp_path, kind):
    source = make(tmp_path / "mcore", *MEGATRON[kind])
    config, cache = make(tmp_path / "config", config=True), tmp_path / "run/.converted"
    calls = []

    def convert(folder: Path, config_dir: Path, target: Path) -> None:
        calls.append((folder, config_dir))
        make(target, "model.safetensors", config=True)

    first = resolve(source, config, convert=convert, cache=cache)
    assert first.config == config and first.form == "files" and first.weights.parent == cache
    assert (first.weights / "model.safetensors").is_file()
    assert resolve(source, config, convert=convert, cache=cache) == first
    assert calls == [(source, config)]
    make(source, "iter_0000002/mp_rank_00/model_optim_rng.pt")
    assert resolve(source, config, convert=convert, cache=cache).weights != first.weights
    (config / "config.json").write_text(CONFIG + "\n")
    resolve(source, config, convert=convert, cache=cache)
    assert len(calls) == 3
    options = ModelConfig(model_name_or_path=str(source))
    assert tokenizer_options(options, first).tokenizer_name_or_path == str(config)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path):
    source = make(tmp_path / "mcore", *MEGATRON["one"], config=True)
    cache = tmp_path / "run/.converted"

    def convert(folder: Path, config_dir: Path, target: Path) -> None:
        make(target, "model.safetensors")
        raise UserError("layer 3 is missing")

    with pytest.raises(UserError, match="layer 3 is missing"):
        resolve(source, convert=convert, cache=cache)
    assert list(cache.iterdir()) == []
    with pytest.raises(UserError, match="shardyard convert"):
        resolve(source)
    blocked = make(tmp_path / "blocked", "file")
    with pytest.raises(UserError, match="cannot be converted into"):
        resolve(source, convert=convert, cache=blocked / "file" / "cache")


def test_a_conversion_is_the_work_of_one_rank(tmp_path):
    source = make(tmp_path / "mcore", *MEGATRON["one"], config=True)

    def convert(folder: Path, config_dir: Path, target: Path) -> None:
        make(target, "model.safetensors")

    told = []

    def leads(fetch):
        told.append(fetch())
        return told[-1]

    options = ModelConfig(model_name_or_path=str(source))
    first = resolve_source(options, fetch_first=leads, convert=convert, cache=tmp_path / "c")
    other = resolve_source(options, fetch_first=lambda fetch: told[0])
    assert first == other and len(told) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "32"}, r"Validation error for field 'hidden_size': .*expected int, got str"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"]},
            r"error for validator .*: .*layer_types",
        ),
        ({"model_type": "qwen33"}, r"qwen33"),
    ],
)
def test_a_config_that_its_class_refuses_is_one_message_with_the_reason(tmp_path, changes, said):
    from shardyard.models.source import load_model_config

    folder = make(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **changes}))
    with pytest.raises(UserError, match=rf"the config\.json of .* cannot be used: .*{said}"):
        load_model_config(ModelConfig(model_name_or_path=str(folder)), folder)
