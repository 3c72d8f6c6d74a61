"""Weight files of every kind: read by the slice, only as tensors, and never with code."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.models import write_tiny_model
from support.tokenizers import byte_tokenizer
from support.training import Recipe, build_step, make_rows, refusal_of, train_rows


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (5, 1), (3, 4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_slice_of_a_file_is_that_of_the_tensor(tmp_path, shape, dtype):
    import torch
    from safetensors.torch import save_file

    from shardyard.models.weight_files import WeightFiles

    count = int(np.prod(shape))
    whole = torch.arange(count, dtype=torch.float32).reshape(shape).to(getattr(torch, dtype))
    save_file({"before": torch.ones(3), "x": whole, "z": torch.ones(2)}, tmp_path / "model.safetensors")
    cuts = [list(itertools.combinations(range(size + 1), 2)) for size in shape]
    with WeightFiles(tmp_path) as files:
        tensor = files.tensors["x"]
        assert torch.equal(tensor[...], whole) and tensor[...].dtype == whole.dtype
        for bounds in itertools.product(*cuts):
            index = tuple(slice(*pair) for pair in bounds)
            assert torch.equal(tensor[index], whole[index]), index
        if shape:
            assert tensor[slice(0, 0)].shape == (0, *shape[1:])


def weights_of(folders):
    found = [train_rows(folder, make_rows(4), Recipe(steps=0)) for folder in folders]
    return [outcome.weights for outcome in found if outcome is not None]


def test_torch_files_are_read_where_there_are_no_others(ranks, tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = write_tiny_model(tmp_path / "m", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {f"pytorch_model-0000{n + 1}-of-00002.bin": names[n::2] for n in range(2)}
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    kinds = {
        "one": {"pytorch_model.bin": names, "training_args.bin": None},
        "several": {**files, "pytorch_model.bin.index.json": index},
        "pt": {"consolidated.pt": names, "optimizer.pt": None},
    }
    made = {}
    for kind, content in kinds.items():
        made[kind] = shutil.copytree(folder, tmp_path / kind, ignore=shutil.ignore_patterns("*.safetensors"))
        for name, held in content.items():
            path = made[kind] / name
            if isinstance(held, dict):
                path.write_text(json.dumps(held))
            elif held is None:
                path.write_bytes(b"no weights of a model")
            else:
                torch.save({key: tensors[key] for key in held}, path)
    wanted, *others = ranks.run(2, weights_of, [folder, *made.values()])[0]
    for kind, found in zip(made, others, strict=True):
        assert found.keys() == wanted.keys(), kind
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted), kind


class Hostile:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path(self.marker).touch, ())


def refusals(folders: list[Path]) -> list[str]:
    return [refusal_of(folder) for folder in folders]


def test_hostile_and_damaged_files_are_refused_with_one_message(ranks, tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = write_tiny_model(tmp_path / "m", "qwen3")
    whole = (folder / "model.safetensors").read_bytes()
    tensors = load_file(folder / "model.safetensors")
    cases = {}
    for kind in ("hostile", "hostile_zip", "list", "cut", "cut_bin", "lost"):
        cases[kind] = shutil.copytree(folder, tmp_path / kind, ignore=shutil.ignore_patterns("*.safetensors"))
    marker = tmp_path / "ran"
    (cases["hostile"] / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(marker)))
    torch.save({**tensors, "x": Hostile(marker)}, cases["hostile_zip"] / "pytorch_model.bin")
    torch.save([1, 2], cases["list"] / "pytorch_model.bin")
    torch.save(tensors, cases["cut_bin"] / "pytorch_model.bin")
    cut = cases["cut_bin"] / "pytorch_model.bin"
    cut.write_bytes(cut.read_bytes()[:-2000])
    (cases["cut"] / "model.safetensors").write_bytes(whole[:-5])
    (cases["lost"] / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}})
    )
    said = dict(zip(cases, ranks.run(1, refusals, list(cases.values()))[0], strict=True))
    assert not marker.exists()
    for kind in ("hostile", "hostile_zip"):
        assert "could run code" in said[kind] and "safetensors" in said[kind], said
    assert "no mapping of names to tensors" in said["list"]
    assert "model.safetensors is no complete" in said["cut"]
    assert "pytorch_model.bin" in said["cut_bin"]
    assert "model-00001-of-00001.safetensors, which is not beside it" in said["lost"]
    assert all(text.startswith("model.model_name_or_path: ") for text in said.values()), said
    assert all(len(text.splitlines()) == 1 for text in said.values()), said


def build_with_tokenizer(folder: Path) -> set[str]:
    from shardyard.config import ModelConfig
    from shardyard.data.tokenizer import load_tokenizer

    built, _, _ = build_step(folder, Recipe())
    load_tokenizer(ModelConfig(model_name_or_path=str(folder)))
    return {cls.__module__ for cls in type(built.model).__mro__}


def test_code_that_a_model_brings_is_never_imported(ranks, tmp_path):
    folder, marker = write_tiny_model(tmp_path / "m", "qwen3"), tmp_path / "imported"
    byte_tokenizer().save_pretrained(folder)
    names = {
        "config.json": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]},
        "generation_config.json": {"AutoGeneration": "own.Generation"},
    }
    for name, auto_map in names.items():
        path = folder / name
        stated = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(stated | {"auto_map": auto_map, "custom_generate": "own"}))
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    (folder / "own.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(code)
    modules = ranks.run(1, build_with_tokenizer, folder)[0]
    assert "transformers.models.qwen3.modeling_qwen3" in modules and not marker.exists()
