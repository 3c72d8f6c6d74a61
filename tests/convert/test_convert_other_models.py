"""Folders that hold more or less than one model, and config.json files of other models: nothing passes as
converted that is not the model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.conversions import held_in
from support.models import write_tiny_model

from shardyard.errors import UserError


def run(source: Path, target: Path, to: Any = "hf", **options):
    from shardyard.convert.job import Conversion, convert

    return convert(Conversion(source, target, to, **options))


def refused(match: str, source: Path, target: Path, to: str = "hf", **options) -> None:
    with pytest.raises(UserError, match=match):
        run(source, target, to, **options)
    assert not target.exists()


def in_parts(tmp_path: Path, family: str = "qwen3") -> Path:
    """A model in several files with an index."""
    source = write_tiny_model(tmp_path / "source", family)
    run(source, tmp_path / "parts", shard_bytes=20_000)
    return tmp_path / "parts"


def test_of_one_file_and_an_index_the_file_counts_as_for_transformers(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    parts = in_parts(tmp_path)
    tensors = load_file(tmp_path / "source/model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, parts / "model.safetensors", metadata={"format": "pt"})
    taken = AutoModelForCausalLM.from_pretrained(parts, local_files_only=True).model.norm.weight
    assert torch.equal(taken, tensors["model.norm.weight"])
    run(parts, tmp_path / "out", check=True)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["model.norm.weight"], taken)


def test_a_file_of_a_set_that_is_missing_is_named_without_an_index(tmp_path):
    parts = in_parts(tmp_path)
    (parts / "model.safetensors.index.json").unlink()
    run(parts, tmp_path / "whole", check=True)
    assert held_in(tmp_path / "whole") == held_in(tmp_path / "source")
    files = sorted(parts.glob("*.safetensors"))
    files[1].unlink()
    said = rf"holds {len(files) - 1} of {len(files)} files model-\*-of-.*number 2 is missing"
    refused(said, parts, tmp_path / "out")
    shutil.copy(files[0], parts / "other.safetensors")
    files[1].write_bytes(files[2].read_bytes())
    refused(r"is also in model-00002-of-.*which one counts", parts, tmp_path / "out")


def test_files_of_torch_are_those_of_their_index(tmp_path):
    import torch
    from safetensors.torch import load_file

    source = write_tiny_model(tmp_path / "source", "qwen3")
    tensors = load_file(source / "model.safetensors")
    wanted = held_in(source)
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    first, second = (f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2))
    torch.save({name: tensors[name] for name in names[:5]}, source / first)
    refused(r"holds 1 of 2 files pytorch_model-\*-of-\*\.bin; number 2", source, tmp_path / "out")
    weight_map = {name: first if name in names[:5] else second for name in names}
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(rf"{second} .*No such file", source, tmp_path / "out")
    torch.save({name: tensors[name] for name in names[5:]}, source / second)
    torch.save({name: tensors[name] + 1 for name in names}, source / "pytorch_model-00003-of-00003.bin")
    run(source, tmp_path / "out", check=True)  # the file of an older save is not among those of the index
    assert held_in(tmp_path / "out") == wanted
    index.unlink()
    refused(r"is also in|holds 1 of 3 files", source, tmp_path / "again")


def test_an_adapter_is_no_model_and_one_beside_a_model_is_left_alone(tmp_path):
    import torch
    from safetensors.torch import save_file

    source = write_tiny_model(tmp_path / "source", "qwen3")
    wanted = held_in(source)
    save_file({"base_model.q_proj.lora_A.weight": torch.ones(2, 32)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}")
    run(source, tmp_path / "out", check=True)
    assert held_in(tmp_path / "out") == wanted
    assert not (tmp_path / "out/adapter_config.json").exists()  # transformers would look for the adapter
    (source / "model.safetensors").unlink()
    refused(r"an adapter is not converted by itself: merge it", source, tmp_path / "again")


def test_a_checkpoint_does_not_lose_parts_of_layers_to_another_model_s_config(tmp_path):
    """Only layers of multi-token prediction, and what is no layer, may be left out."""
    source = write_tiny_model(tmp_path / "source", "qwen3")
    config = json.loads((source / "config.json").read_text())

    def with_config(**changes) -> Path:
        folder = tmp_path / f"config{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    for changes, said in (
        ({"model_type": "llama"}, r"no place for model\.layers\.0\.self_attn\.k_norm\.weight"),
        (
            {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            r"no place for model\.layers\.1\.input_layernorm\.weight, one of 11 tensors",
        ),
        ({"hidden_size": "32"}, r"Validation error for field 'hidden_size'.*expected int"),
    ):
        for to in ("dcp", "hf"):
            refused(said, source, tmp_path / "out", to, config_dir=with_config(**changes))
    refused(r"makes a tensor \[199, 32\]", source, tmp_path / "out", config_dir=with_config(vocab_size=256))
    run(source, tmp_path / "out", config_dir=with_config(), check=True)
    assert held_in(tmp_path / "out") == held_in(source)


def test_pieces_that_do_not_make_up_a_tensor_are_refused(tmp_path):
    """What .metadata does not list would be what happened to be in memory."""
    import pickle

    source = write_tiny_model(tmp_path / "source", "qwen3")
    run(source, tmp_path / "dcp", "dcp")
    (tmp_path / "dcp/manifest.json").unlink()
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())  # ours, of a moment ago
    metadata.state_dict_metadata["model.model.norm.weight"].chunks = []
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    refused(
        r"the pieces of model\.model\.norm\.weight .* do not make it up", tmp_path / "dcp", tmp_path / "out"
    )


def test_a_megatron_folder_is_complete_only_with_what_stands_beside_the_weights(tmp_path, monkeypatch):
    """A full disk, or a kill, while the tokenizer is copied: the same command goes on."""
    source, target = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "mcore"
    (source / "tokenizer.json").write_text('{"a": 1}')

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(UserError, match="No space left on device"):
            run(source, target, "mcore")
    assert not (target / "latest_checkpointed_iteration.txt").exists()
    left = target / f"tokenizer.json.tmp-{_host()}-999999999-0"
    left.write_text("of a process that was killed")
    run(source, target, "mcore", check=True)
    assert (target / "tokenizer.json").read_text() == '{"a": 1}'
    assert not list(target.rglob("*.tmp-*"))


def _host() -> str:
    """As temporary names spell it."""
    import socket

    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())
