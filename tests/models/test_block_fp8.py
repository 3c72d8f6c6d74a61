"""fp8 weights with a scale per block of 128 x 128: as the plain loop over blocks has it, on any layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.models import write_tiny_model
from support.training import Recipe, build_step, make_rows, refusal_of, train_rows

BLOCK = 128
# No multiples of 128; over two ranks some borders lie inside blocks, some experts' sizes are below one.
SIZES = dict(
    vocab_size=200, hidden_size=176, intermediate_size=272, moe_intermediate_size=136, kv_lora_rank=48,
    num_attention_heads=4, q_lora_rank=144, qk_nope_head_dim=32, v_head_dim=40,
)  # fmt: skip
ROWS = make_rows(8)


def write_pair(root: Path) -> tuple[Path, Path]:
    """A tiny DeepSeek-V3 in fp8, as published, and the same weights in fp32 by a loop over the blocks."""
    import torch
    from safetensors.torch import load_file, save_file

    plain = write_tiny_model(root / "plain", "deepseek_v3", **SIZES)
    fp8 = root / "fp8"
    fp8.mkdir()
    stored, exact = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            exact[name] = stored[name] = weight if "bias" in name else weight.bfloat16()
            continue
        rows, columns = weight.shape
        scale = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
        quantised, product = weight.to(torch.float8_e4m3fn), torch.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scale[i, j] = weight[part].abs().max() / 448
                quantised[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                product[part] = quantised[part].float() * scale[i, j]
        exact[name], stored[name], stored[f"{name}_scale_inv"] = product, quantised, scale
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, fp8 / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (fp8 / "config.json").write_text(json.dumps(config))
    return fp8, plain


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("fp8"))


def weights_of(folders, recipe):
    return [outcome and outcome.weights for outcome in (train_rows(f, ROWS, recipe) for f in folders)]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"tp_size": 2}),
        pytest.param(2, {}, marks=pytest.mark.soak),
        pytest.param(1, {}, marks=pytest.mark.soak),
        pytest.param(2, {"ep_size": 2}, marks=pytest.mark.soak),
        pytest.param(4, {}, marks=pytest.mark.soak),
        pytest.param(2, {"pp_size": 2}, marks=pytest.mark.soak),
        pytest.param(2, {"shard_placement_fn": "shard_by_dim_1"}, marks=pytest.mark.soak),
        pytest.param(4, {"tp_size": 2, "fsdp_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_fp8_weights_start_as_the_loop_over_blocks_gives_them(ranks, pair, world, parallel):
    fp8, plain = pair
    recipe = Recipe(parallel=parallel, steps=0)
    found, wanted = ranks.run(world, weights_of, (fp8, plain), recipe)[0]
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], weight) for name, weight in wanted.items())


def export(folder: Path, out: Path) -> None:
    from shardyard.checkpoint import check_exportable, export_hf

    built, _, _ = build_step(folder, Recipe())
    check_exportable(built.model, source_dir=built.source, tokenizer=None)
    export_hf(built.model, out_dir=out, source_dir=built.source, tokenizer=None)


def test_an_export_of_an_fp8_model_is_plain_bf16(ranks, tmp_path, pair):
    import torch
    from safetensors.torch import load_file

    fp8, plain = pair
    ranks.run(1, export, fp8, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    wanted = load_file(plain / "model.safetensors")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor if "bias" in name else tensor.bfloat16()), name


def refusals(cases):
    """What is said of each folder of an fp8 model with another quantization_config and other tensors."""
    from safetensors.torch import load_file, save_file

    said = []
    for folder, config, tensors in cases:
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | {"quantization_config": config}))
        stored = load_file(folder / "model.safetensors") | tensors
        stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        said.append(refusal_of(folder))
    return said


def test_other_quantised_forms_and_scales_that_do_not_fit_are_named(ranks, tmp_path, pair):
    import shutil

    import torch

    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    changes = {
        "awq": ({"quant_method": "awq"}, {}),
        "weight_block_size None": (fp8 | {"weight_block_size": None}, {}),
        f"no {name}": (fp8, {name: None}),
        "scales [7, 1]": (fp8, {name: torch.ones(7, 1)}),
    }
    copies = [shutil.copytree(pair[0], tmp_path / str(number)) for number in range(len(changes))]
    cases = [(folder, *change) for folder, change in zip(copies, changes.values(), strict=True)]
    for wanted, message in zip(changes, ranks.run(1, refusals, cases)[0], strict=True):
        assert wanted in message and "model.model_name_or_path" in message, message


def test_slices_of_a_dequantised_tensor_are_those_of_the_whole():
    import torch

    from shardyard.models.block_fp8 import BlockFp8

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 10, 9, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, 2, generator=generator)
    whole = torch.tensor(
        [
            [[float(weight[e, r, c]) * float(scale[e, r // 4, c // 5]) for c in range(9)] for r in range(10)]
            for e in range(3)
        ]
    )
    lazy = BlockFp8(weight, scale, (4, 5))
    assert torch.equal(lazy[...], whole) and list(lazy.get_shape()) == [3, 10, 9]
    for start in range(10):
        for stop in range(start, 11):
            assert torch.equal(lazy[1:3, start:stop, 3:8], whole[1:3, start:stop, 3:8])
    assert torch.equal(lazy[2:], whole[2:])
