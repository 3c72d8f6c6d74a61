"""What is read: block-fp8 files against a plain loop, the reference's checkpoints, torch's pickles; and what
a damaged or hostile file does, which is nothing but a message.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from support.checkpoints import Bomb
from support.conversions import as_held, held_in
from support.models import write_tiny_model

from shardyard.errors import UserError


def run(source: Path, target: Path, to: str, **options):
    from shardyard.convert.job import Conversion, convert

    return convert(Conversion(source, target, to, **options))


def refused(match: str, source: Path, target: Path, to: str = "hf", **options) -> None:
    """Refused with one message, and nothing is left."""
    with pytest.raises(UserError, match=match):
        run(source, target, to, **options)
    assert not target.exists()


def write_fp8(folder: Path, shape=(70, 150), block=(32, 64)):
    """A model's folder with one matrix in blocks; its values by a plain loop."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=generator) + 0.01
    plain = torch.zeros(shape, dtype=torch.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            scale = scales[row // block[0], column // block[1]]
            plain[row, column] = weight[row, column].float() * scale
    norm = torch.ones(5, dtype=torch.bfloat16)
    config = {
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block),
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "norm.weight": norm}
    save_file(tensors, folder / "model.safetensors")
    return tensors, plain


def test_block_fp8_is_what_a_plain_loop_makes_of_it(tmp_path):
    import torch

    tensors, plain = write_fp8(tmp_path / "fp8")
    norm = as_held(tensors["norm.weight"])
    run(tmp_path / "fp8", tmp_path / "bf16", "hf", check=True)
    assert held_in(tmp_path / "bf16") == {
        "a.weight": as_held(plain.to(torch.bfloat16)),
        "norm.weight": norm,
    }
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    assert config == {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"}
    run(tmp_path / "fp8", tmp_path / "fp32", "hf", dtype=torch.float32)
    assert held_in(tmp_path / "fp32")["a.weight"] == as_held(plain)


def test_fp8_weights_without_fitting_scales_and_other_quantisations_are_named(tmp_path):
    import torch
    from safetensors.torch import save_file

    source, out = tmp_path / "fp8", tmp_path / "out"
    tensors, _ = write_fp8(source)
    path = source / "model.safetensors"
    save_file({name: t for name, t in tensors.items() if "scale" not in name}, path)
    refused(
        r"model\.safetensors: a\.weight is torch\.float8_e4m3fn and has no a\.weight_scale_inv", source, out
    )
    save_file(tensors | {"a.weight_scale_inv": torch.ones(2, 2)}, path)
    refused(r"a\.weight_scale_inv is \[2, 2\], but a\.weight is \[70, 150\] in blocks of", source, out)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    refused(r"quantised \(mxfp4\); only fp8 with blocks.*bf16 weights", source, out)


def write_reference(source: Path, folder: Path, marker: Path, *, grouped: bool) -> None:
    """As MindSpeed-LLM's FSDP2 backend writes: ``model.model.`` names, AdamW's state, entries of bytes."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = {}
    for name, tensor in model.state_dict().items():
        if grouped and tensor.ndim == 3:  # [E, A, B]: each expert turned, one below the other
            tensor = torch.cat([expert.T for expert in tensor])
        state[f"model.model.{name}"] = tensor
        state[f"optimizer.state.{name}.exp_avg"] = torch.full_like(tensor, 7.0)
    state["optimizer.param_groups.lr"] = Bomb(marker)
    state["optimizer.param_groups.betas"] = (0.9, 0.95)
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("family", "grouped"), [("llama_tied", False), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_the_reference_s_checkpoint_gives_the_same_model(tmp_path, family, grouped):
    source = write_tiny_model(tmp_path / "source", family)
    write_reference(source, tmp_path / "dcp", tmp_path / "marker", grouped=grouped)
    refused(
        "holds no config.json; name the folder that does with --config", tmp_path / "dcp", tmp_path / "hf"
    )
    run(tmp_path / "dcp", tmp_path / "hf", "hf", config_dir=source, check=True)
    assert held_in(tmp_path / "hf") == held_in(source)
    assert not (tmp_path / "marker").exists()


def test_a_checkpoint_of_another_model_or_size_is_named(tmp_path):
    source = write_tiny_model(tmp_path / "source", "qwen3")
    run(source, tmp_path / "dcp", "dcp")
    other = write_tiny_model(tmp_path / "other", "qwen3_moe")
    refused(
        r"no checkpoint of config\.json's qwen3_moe model: tensors 6 missing "
        r"\(such as .*mlp\.experts\.gate_up_proj\) and 6 that it does not know",
        tmp_path / "dcp", tmp_path / "hf", config_dir=other,
    )  # fmt: skip
    wide = write_tiny_model(tmp_path / "wide", "qwen3", intermediate_size=64)
    refused(
        r"mlp\.gate_proj\.weight is \[56, 32\], but config\.json asks for \[64, 32\]",
        tmp_path / "dcp", tmp_path / "hf", config_dir=wide,
    )  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights_are_read_as_tensors(tmp_path, legacy):
    import torch
    from safetensors.torch import load_file

    source = write_tiny_model(tmp_path / "source", "llama_tied")
    wanted, tensors = held_in(source), load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # as torch.save of a tied model has it
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    run(source, tmp_path / "hf", "hf", check=True)
    assert held_in(tmp_path / "hf") == wanted


@pytest.mark.parametrize("zipped", [False, True])
def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path, zipped):
    import torch

    source, marker = write_tiny_model(tmp_path / "source", "llama_tied"), tmp_path / "marker"
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    held = {"more": Bomb(marker)}
    if zipped:
        torch.save(held | {"model.norm.weight": torch.ones(3)}, path)
    else:
        path.write_bytes(pickle.dumps(held, protocol=2))
    refused(r"pytorch_model\.bin is not read: .* names posix\.mkdir", source, tmp_path / "out")
    torch.save({"model.norm.weight": [1, 2]}, path)
    refused(r"pytorch_model\.bin is not read: it is no mapping of names to tensors", source, tmp_path / "out")
    assert not marker.exists()


def test_a_hostile_checkpoint_is_refused_and_does_nothing(tmp_path):
    source, marker = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "marker"
    folder = tmp_path / "dcp"
    run(source, folder, "dcp")
    (folder / "manifest.json").unlink()  # as of a foreign folder: nothing vouches for its files
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    refused(r"\.metadata is not read", folder, tmp_path / "out")
    (folder / ".metadata").write_bytes(metadata)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(pickle.dumps(Bomb(marker)) * 40_000)
    with pytest.raises(UserError, match=r"dcp: model\..* cannot be read"):
        run(folder, tmp_path / "out", "hf")
    data.write_bytes(whole[:-50_000])
    with pytest.raises(UserError, match=r"dcp: model\..* cannot be read"):
        run(folder, tmp_path / "out", "hf")
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_changed_bytes_of_a_checkpoint_of_ours_are_found_before_it_is_read(tmp_path):
    source = write_tiny_model(tmp_path / "source", "qwen3")
    run(source, tmp_path / "dcp", "dcp")
    path = tmp_path / "dcp/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(r"dcp is damaged: the content of __0_0\.distcp has changed", tmp_path / "dcp", tmp_path / "hf")


def header(text: bytes, size: int = 64) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no safetensors file, or is cut short"),
        (b"\xff" * 64, "is no safetensors file, or is cut short"),
        (header(b"[1]"), "its header is no table of tensors"),
        (header(b"{"), "its header is no JSON"),
        (header(b"[" * 100_000), "its header is no JSON"),
        (header(b'{"w": 3}'), "its header does not describe w"),
        (
            header(b'{"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}'),
            "w is F99, a dtype that is not converted",
        ),
        (
            header(b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'),
            r"w \[3\] F32 has 8 bytes",
        ),
        (
            header(b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}'),
            r"w \[-2\] F32 has -8 bytes",
        ),
        (
            header(b'{"w": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}'),
            "is cut short: w ends at byte",
        ),
    ],
)
def test_a_damaged_safetensors_file_is_named_with_its_fault(tmp_path, content, message):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(content)
    refused(rf"model\.safetensors.*{message}", source, tmp_path / "out")


def test_an_index_is_checked_against_its_files(tmp_path):
    source = write_tiny_model(tmp_path / "source", "qwen3")
    run(source, tmp_path / "parts", "hf", shard_bytes=20_000)
    index = tmp_path / "parts/model.safetensors.index.json"
    listed = json.loads(index.read_text())
    second = sorted(set(listed["weight_map"].values()))[1]
    for file, message in (
        ("../source/model.safetensors", "points outside its folder"),
        (second, r"says that model\.embed_tokens\.weight is in model-00002"),
        ("gone.safetensors", r"gone\.safetensors cannot be read"),
    ):
        changed = {**listed["weight_map"], "model.embed_tokens.weight": file}
        index.write_text(json.dumps({"weight_map": changed}))
        refused(message, tmp_path / "parts", tmp_path / "out")
    index.write_text("[]")
    refused(r"index\.json cannot be read: it has no weight_map", tmp_path / "parts", tmp_path / "out")


def test_code_beside_a_model_is_copied_and_never_run(tmp_path):
    source, marker = write_tiny_model(tmp_path / "source", "qwen3"), tmp_path / "marker"
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text(f"import os; os.mkdir({str(marker)!r})")
    run(source, tmp_path / "dcp", "dcp", check=True)
    run(tmp_path / "dcp", tmp_path / "hf", "hf", check=True)
    assert (tmp_path / "hf/evil.py").exists() and not marker.exists()
