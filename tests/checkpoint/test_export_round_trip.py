"""Invariant: Hugging Face -> no step -> Hugging Face keeps keys, shapes, dtypes and bytes, from every layout.

The source is one file or several, and so is the export; jobs are so small that tensors are cut into rows.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model
from support.training import Recipe

FAMILIES = ("llama_tied", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP 2": {}, "TP 2": {"tp_size": 2}, "EP 2": {"ep_size": 2}, "PP 2": {"pp_size": 2},
    "offload": {"cpu_offload": True},
}  # fmt: skip
REFUSED = {
    ("llama_tied", "EP 2"): "no experts",
    ("qwen3", "EP 2"): "no experts",
}
"""What a family's layout is refused with."""
QUICK = [
    ("llama_tied", "offload", "one", "several"),
    ("qwen3", "TP 2", "several", "one"),
    ("qwen3_moe", "EP 2", "one", "several"),
    ("deepseek_v3", "PP 2", "several", "several"),
    ("glm4_moe", "FSDP 2", "several", "one"),
    ("gpt_oss", "EP 2", "one", "several"),
]


def export(folder: Path, out: Path, parallel: dict[str, Any], shard_bytes: float) -> list[str] | str:
    """The names of the files; the message of what is refused."""
    from support.training import build_step

    from shardyard.checkpoint import check_exportable, export_hf
    from shardyard.errors import UserError

    try:
        built, _, _ = build_step(folder, Recipe(parallel=parallel))
        check_exportable(built.model, source_dir=folder, tokenizer=None)
        options: dict[str, Any] = {"shard_bytes": shard_bytes, "job_bytes": 700}
        report = export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None, **options)
    except UserError as error:
        return str(error)
    return list(report.files)


def spread_over_files(folder: Path) -> None:
    """The same weights in three files, each tensor in the next one, and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    weight_map = {key: names[n % 3] for n, key in enumerate(tensors)}
    for name in names:
        inside = {key: tensor for key, tensor in tensors.items() if weight_map[key] == name}
        save_file(inside, folder / name, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each tensor, read file by file as the index says, if there is one."""
    import torch
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    paths = sorted(folder.glob("*.safetensors"))
    assert index.exists() == (len(paths) > 1)
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    where: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in list(file.keys()):
                tensor = file.get_tensor(key)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert key not in found
                found[key], where[key] = (str(tensor.dtype), tuple(tensor.shape), data), path.name
    if index.exists():
        stated = json.loads(index.read_text())
        assert stated["weight_map"] == where
        assert stated["metadata"]["total_size"] == sum(len(data) for *_, data in found.values())
    return found


def cells() -> list[Any]:
    product = itertools.product(FAMILIES, LAYOUTS, ("one", "several"), ("one", "several"))
    return [pytest.param(*c, marks=() if c in QUICK else pytest.mark.soak, id=", ".join(c)) for c in product]


@pytest.mark.parametrize(("family", "layout", "source", "target"), cells())
def test_an_untouched_export_is_its_source(ranks, tmp_path, family, layout, source, target):
    folder = write_tiny_model(tmp_path / "source", family, dtype="bfloat16", vocab_size=200)
    if source == "several":
        spread_over_files(folder)
    limit = 1e9 if target == "one" else 20_000
    results = ranks.run(2, export, folder, tmp_path / "out", LAYOUTS[layout], limit)
    if (reason := REFUSED.get((family, layout))) is not None:
        assert all(isinstance(result, str) and reason in result for result in results)
        assert not (tmp_path / "out").exists()
        return
    files = results[0]
    assert results == [files, files] and isinstance(files, list), results
    assert (len(files) > 2) == (target == "several")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == sorted(files)
    ours, wanted = weights_of(tmp_path / "out"), weights_of(folder)
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if ours[name] != wanted[name]] == []
