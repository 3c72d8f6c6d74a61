"""megatron-core judges: it loads our folders, all tensors and no others, and computes what transformers does.

And it writes ``torch_dist`` checkpoints of its own, which are read back bit for bit.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.mcore import DictWeights, Marker, differences, random_weights, tiny_config
from support.mcore_peer import run_peer
from transformers import AutoModelForCausalLM

from shardyard.convert.mcore import Given, McoreLayout, TorchDistWeights, open_mcore, write_mcore
from shardyard.errors import UserError

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]


class Case(NamedTuple):
    family: str
    grouped: bool = False
    mtp: int = 0
    tasks: tuple[str, ...] = ("save_torch_dist", "logits")


CASES = {
    "qwen3": Case("qwen3"),
    "qwen2": Case("qwen2", tasks=("logits",)),
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe grouped": Case("qwen3_moe", grouped=True),
    "deepseek_v3": Case("deepseek_v3", tasks=("logits",)),
    "glm4_moe": Case("glm4_moe"),
    # GPTModel with MTP layers computes no logits without labels: loaded and saved only
    "deepseek_v3 with MTP": Case("deepseek_v3", mtp=1, tasks=("save_torch_dist",)),
}


class Peer(NamedTuple):
    """What megatron-core made of each case."""

    sources: dict[str, DictWeights]
    logits: dict[str, np.ndarray]
    torch_dist: dict[str, Path]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """All cases in one process: importing megatron-core takes longer than the cases."""
    folder = tmp_path_factory.mktemp("peer")
    sources, jobs, owners = {}, [], []
    for number, (name, case) in enumerate(CASES.items()):
        config = tiny_config(case.family, num_key_value_heads=4 if case.family == "deepseek_v3" else 2)
        sources[name] = normal_weights(folder / f"hf{number}", config, case.mtp)
        write_mcore(sources[name], folder / f"mcore{number}", McoreLayout(grouped=case.grouped))
        job = {"folder": str(folder / f"mcore{number}"), "config": config, "grouped": case.grouped,
               "mtp": case.mtp, "tokens": TOKENS, "target": str(folder / f"dist{number}")}  # fmt: skip
        jobs += [{**job, "do": task} for task in case.tasks]
        owners += [(name, task) for task in case.tasks]
    arrays = run_peer(jobs, folder)
    logits = {name: a for (name, task), a in zip(owners, arrays, strict=True) if task == "logits"}
    return Peer(sources, logits, {name: folder / f"dist{n}" for n, name in enumerate(CASES)})


def normal_weights(folder: Path, config: dict[str, Any], mtp: int) -> DictWeights:
    """fp32 numbers of a size at which every layer, norm and router matters."""
    source = random_weights(folder, config, mtp=mtp)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, tensor in source.tensors.items():
        noise = 0.2 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = noise if tensor.ndim > 1 else 1 + noise
    for name in tensors:
        if name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"]
        elif name.endswith(".embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"]
    return DictWeights(folder, config, tensors)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "logits" in case.tasks])
def test_megatron_core_computes_the_logits_of_transformers(name: str, peer: Peer, tmp_path: Path) -> None:
    source = peer.sources[name]
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    save_file({key: tensor.contiguous() for key, tensor in source.tensors.items()},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    assert expected.std() > 0.1  # no model of zeros
    np.testing.assert_allclose(peer.logits[name], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "save_torch_dist" in case.tasks])
def test_torch_dist_folders_of_megatron_core_are_read_bit_for_bit(name: str, peer: Peer) -> None:
    source = peer.sources[name]
    read = open_mcore(peer.torch_dist[name], source.config)
    assert isinstance(read, TorchDistWeights)
    assert differences(source.tensors, read) == []
    again = pickle.loads(pickle.dumps(read))
    assert torch.equal(again.read("model.norm.weight"), source.tensors["model.norm.weight"])


def copy_of(peer: Peer, name: str, folder: Path) -> Path:
    return Path(shutil.copytree(peer.torch_dist[name], folder / "copy"))


def test_a_torch_dist_folder_of_another_model_is_refused(peer: Peer) -> None:
    folder, config = peer.torch_dist["qwen3"], peer.sources["qwen3"].config
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_hidden_layers": 3}, r"shape \[4, .*\] is more than a qwen3 with this config.json has"),
        ({"num_hidden_layers": 5}, r"holds no decoder\.layers\.4\..*fewer layers or experts than"),
        ({"model_type": "llama"}, r"layers\.self_attention\.q_layernorm\.weight .*more than a llama"),
        ({"model_type": "qwen2"}, r"lacks decoder\.layers\.0\.self_attention\.linear_qkv\.bias"),
        ({"vocab_size": 97}, r"embedding.word_embeddings.weight does not fit .* 96 rows, the vocabulary 97"),
        ({"head_dim": 4}, r"linear_qkv.weight does not fit"),
    ]  # fmt: skip
    for changes, words in cases:
        with pytest.raises(UserError, match=words):
            open_mcore(folder, {**config, **changes})


def test_a_smaller_vocabulary_trims_the_padding(peer: Peer) -> None:
    source = peer.sources["qwen3"]
    read = open_mcore(peer.torch_dist["qwen3"], {**source.config, "vocab_size": 90})
    assert torch.equal(read.read("lm_head.weight"), source.tensors["lm_head.weight"][:90])


def test_noop_layers_of_a_torch_dist_folder_can_be_named(peer: Peer) -> None:
    """Places 0 and 2 of 4 hold nothing that the model of two layers wants; single layers are numbered so."""
    source = peer.sources["glm4_moe"]
    config = {**source.config, "num_hidden_layers": 2, "first_k_dense_replace": 0}
    with pytest.raises(UserError, match=r"decoder\.layers\.0\..* is more than a glm4_moe"):
        open_mcore(peer.torch_dist["glm4_moe"], config, given=Given(noop_layers=(0, 2)))


def test_hostile_parts_of_a_torch_dist_folder_do_not_run(peer: Peer, tmp_path: Path) -> None:
    config, marker = peer.sources["qwen3"].config, tmp_path / "marker"
    folder = copy_of(peer, "qwen3", tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    (folder / ".metadata").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(UserError, match=r"\.metadata is not read: it names .*open_marker"):
        open_mcore(folder, config)

    (folder / ".metadata").write_bytes(whole[".metadata"])
    torch.save({"args": Marker(marker)}, folder / "common.pt")
    with pytest.raises(UserError, match=r"common\.pt is not read: .*open_marker"):
        open_mcore(folder, config)

    (folder / "common.pt").write_bytes(whole["common.pt"])
    swap_in(folder, "decoder.final_layernorm.weight", Marker(marker))
    read = open_mcore(folder, config)
    with pytest.raises(UserError, match=r"swapped is not read where decoder\.final_layernorm.*open_marker"):
        read.read("model.norm.weight")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()  # it would have been made


def swap_in(folder: Path, key: str, value: Any) -> None:
    """Put another pickle where ``.metadata`` says a tensor is."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    torch.save(value, folder / "swapped")
    info.relative_path, info.offset = "swapped", 0
    info.length = (folder / "swapped").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_damaged_and_missing_parts_of_a_torch_dist_folder_are_named(peer: Peer, tmp_path: Path) -> None:
    source = peer.sources["qwen3"]
    folder = copy_of(peer, "qwen3", tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    data = [name for name in whole if name.endswith(".distcp")]

    def faults() -> list[str]:
        found = []
        try:
            read = open_mcore(folder, source.config)
            for name in read.facts:
                read.read(name)
        except UserError as error:
            found.append(str(error))
        return found

    assert faults() == []
    for name in ("metadata.json", ".metadata", *data):
        (folder / name).unlink()
        (message,) = faults()
        assert name in message and ("missing" in message or "holds no .metadata" in message)
        (folder / name).write_bytes(whole[name])
    for name in ("common.pt", ".metadata", *data):
        (folder / name).write_bytes(whole[name][: len(whole[name]) // 3])
        (message,) = faults()
        assert name in message and "not read" in message
        (folder / name).write_bytes(whole[name])
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (message,) = faults()
    assert "the back end is 'zarr'; only torch_dist is read" in message
