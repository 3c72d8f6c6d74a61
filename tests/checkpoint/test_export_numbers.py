"""The numbers of an export: rounded once and as asked, from one replica, and the same as the live model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_config, write_tiny_model
from support.training import Recipe, make_rows

from shardyard.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {key: t for path in sorted(folder.glob("*.safetensors")) for key, t in load_file(path).items()}


def in_every_dtype(folder: Path, out: Path) -> str:
    """Exports in each of DTYPES; then the message about a value that fp16 cannot hold."""
    import torch
    import torch.distributed as dist
    from support.training import build_step

    from shardyard.checkpoint import check_exportable, export_dtype, export_hf

    built, _, _ = build_step(folder, Recipe())
    for name in DTYPES:
        dtype = getattr(torch, name)
        check_exportable(built.model, source_dir=folder, tokenizer=None, save_dtype=dtype)
        assert export_dtype(built.model, folder, dtype) == dtype
        export_hf(
            built.model, out_dir=out / name, source_dir=folder, tokenizer=None, save_dtype=dtype,
            shard_bytes=30_000,
        )  # fmt: skip
    if dist.get_rank() == 1:
        with torch.no_grad():
            built.model.model.layers[1].mlp.experts.down_proj.to_local()[-1, 0, 0] = 65_520.0
    try:
        export_hf(
            built.model, out_dir=out / "refused", source_dir=folder, tokenizer=None, save_dtype=torch.float16
        )
    except UserError as error:
        return str(error)
    return "exported"


def test_parameters_are_rounded_as_asked_and_buffers_are_not(ranks, tmp_path):
    """65520 is the least number that rounds to infinity in fp16; one rank has it, in the last expert."""
    import torch

    folder = write_tiny_model(tmp_path / "source", "deepseek_v3")
    messages = ranks.run(2, in_every_dtype, folder, tmp_path)
    source = read(folder)
    for name in DTYPES:
        exported = read(tmp_path / name)
        assert exported.keys() == source.keys()
        for key, tensor in source.items():
            wanted = tensor if "correction_bias" in key else tensor.to(getattr(torch, name))
            assert exported[key].dtype == wanted.dtype and torch.equal(exported[key], wanted), key
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == name
    for message in messages:
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in message and "65504" in message
    assert not (tmp_path / "refused").exists() and not list(tmp_path.glob(".*"))


def write_in_fp8(folder: Path) -> dict[str, Any]:
    """A tiny DeepSeek-V3 with projections in fp8, as published; what they are in bf16, without a loss."""
    import torch
    from safetensors.torch import load_file, save_file

    write_tiny_model(folder, "deepseek_v3", dtype="bfloat16")
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight")]:  # each of one block
        stored[name] = (plain[name].float() * 64).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 64)
        plain[name] = (stored[name].float() / 64).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def plain_export(folder: Path, out: Path) -> None:
    from support.training import build_step

    from shardyard.checkpoint import check_exportable, export_hf

    built, _, _ = build_step(folder, Recipe())
    check_exportable(built.model, source_dir=folder, tokenizer=None)
    export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None)


def test_what_was_read_from_fp8_is_written_in_the_dtype_of_the_others(ranks, tmp_path):
    import torch

    wanted = write_in_fp8(tmp_path / "source")
    ranks.run(1, plain_export, tmp_path / "source", tmp_path / "out")
    exported = read(tmp_path / "out")
    assert exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config


def owned_and_written(folder: Path, out: Path) -> tuple[int, int]:
    """How many files this rank wrote: of an export by all, and of one whose folder rank 1 does not see. The
    second replica is not what it should be.
    """
    import torch
    import torch.distributed as dist
    from support.training import build_step

    from shardyard.checkpoint import export_hf, streaming
    from shardyard.checkpoint.hf_files import FileWriter

    written = []

    class Counted(FileWriter):
        def finish(self) -> None:
            super().finish()
            written.append(self.file.name)

    built, _, _ = build_step(folder, Recipe(parallel={"fsdp_size": 1}))
    options: dict[str, Any] = {"source_dir": folder, "tokenizer": None, "shard_bytes": 40_000}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(streaming, "FileWriter", Counted)
        export_hf(built.model, out_dir=out / "all", **options, probe_bytes=0)
        by_all = len(written)
        if dist.get_rank() == 1:
            for parameter in built.model.parameters():
                parameter.to_local().mul_(1 + 1e-6)
            patch.setattr(Path, "is_dir", lambda _: False)
        export_hf(built.model, out_dir=out / "one", **options, probe_bytes=0)
    return by_all, len(written) - by_all


def test_files_are_written_by_all_ranks_that_see_them_from_the_first_replica(ranks, tmp_path):
    import torch

    folder = write_tiny_model(tmp_path / "source", "qwen3")
    (all_0, one_0), (all_1, one_1) = ranks.run(2, owned_and_written, folder, tmp_path)
    files = len(list((tmp_path / "all").glob("*.safetensors")))
    assert files > 2 and all_0 + all_1 == files and abs(all_0 - all_1) <= 1
    assert (one_0, one_1) == (files, 0)
    source = read(folder)
    for target in ("all", "one"):
        exported = read(tmp_path / target)
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in source.items())


def with_and_without(folder: Path, out: Path) -> tuple[list[float], list[float]]:
    """Losses and norms of three steps, with an export after the second in the latter case."""
    from support.training import build_step, micro_batches_of

    from shardyard.checkpoint import export_hf

    found = []
    for exporting in (False, True):
        built, step, meshes = build_step(folder, Recipe())
        batches = micro_batches_of(make_rows(), 1, meshes.dp_rank, meshes.dp_size)
        numbers: list[float] = []
        for number in (1, 2, 3):
            result = step(batches, step=number, lr=1e-2)
            numbers += [result.loss, result.grad_norm]
            if exporting and number == 2:
                export_hf(built.model, out_dir=out, source_dir=folder, tokenizer=None)
        found.append(numbers)
    return found[0], found[1]


def test_training_goes_on_bit_for_bit_after_an_export(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "source", "qwen3_moe")
    for without, after in ranks.run(2, with_and_without, folder, tmp_path / "out"):
        assert without == after


def live_answer(folder: Path, parallel: dict[str, Any]) -> Any:
    """(logits of the live model, whether they are exact, whether it still trains)."""
    from support.training import build_step

    from shardyard.checkpoint.read_back import answer_of

    built, _, _ = build_step(folder, Recipe(parallel=parallel))
    answer = answer_of(built.model)
    assert answer is not None
    return answer.logits.numpy(), answer.exact, built.model.training


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pp_size": 2}, marks=pytest.mark.soak),
        pytest.param({}, marks=pytest.mark.soak),
        pytest.param({"tp_size": 2}, marks=pytest.mark.soak),
        pytest.param({"cp_size": 2}, marks=pytest.mark.soak),
        pytest.param({"ep_size": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_live_answer_is_that_of_plain_transformers_on_every_rank(ranks, model_zoo, parallel):
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_zoo.folder("parity_moe")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = plain(input_ids=torch.arange(8)[None]).logits[0].numpy()
    for logits, exact, trains in ranks.run(2, live_answer, folder, parallel):
        assert logits.shape == wanted.shape and exact and trains
        assert abs(logits - wanted).max() < 1e-5 * abs(wanted).max()


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [("float32", "layers.1.self_attn.q_proj.weight"), ("bfloat16", "lm_head.weight")],
)
def test_a_tensor_that_is_not_the_trained_one_is_found(tmp_path, dtype, suffix):
    """With a wrong sign all is finite, and of the right shape: only the model's answer tells."""
    import torch
    from transformers import AutoModelForCausalLM

    from shardyard.checkpoint import export_hf
    from shardyard.checkpoint.turning_back import Unit

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    turned_back = Unit.turned_back

    def wrong(unit: Unit, *args: Any) -> dict[str, torch.Tensor]:
        found = turned_back(unit, *args)
        return {name: -tensor if name.endswith(suffix) else tensor for name, tensor in found.items()}

    out = tmp_path / "out"
    options: dict[str, Any] = {"source_dir": None, "tokenizer": None}
    export_hf(model, out_dir=out, save_dtype=getattr(torch, dtype), **options)
    kept = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "turned_back", wrong)
        with pytest.raises(UserError, match="answers a fixed prompt otherwise than the trained one"):
            export_hf(model, out_dir=out, save_dtype=getattr(torch, dtype), **options)
    assert kept == {path: path.read_bytes() for path in out.iterdir()}


def test_a_number_that_is_none_is_found_also_in_the_last_place():
    """More elements than are looked at at a time; the largest numbers of a dtype are no infinities."""
    import torch

    from shardyard.checkpoint.streaming import refuse_nonfinite

    for value in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.zeros(3, 300_000)
        tensor[2, -1] = value
        with pytest.raises(UserError, match="weight w holds NaN or Inf"):
            refuse_nonfinite("w", tensor)
    refuse_nonfinite("w", torch.full((2, 2), torch.finfo(torch.float32).max))
    refuse_nonfinite("w", torch.full((2, 2), 2**31 - 1, dtype=torch.int32))


def test_leftovers_of_a_killed_export_are_gone_when_the_run_starts_again(tmp_path):
    from shardyard.checkpoint import prepare_output_dir
    from shardyard.checkpoint.placing import temporary_folder

    beside = tmp_path / "checkpoints" / "global_step_3" / "hf"
    for out in (tmp_path, beside):
        (temporary_folder(out) / "model.safetensors").write_bytes(b"half a file")
    prepare_output_dir(tmp_path, resuming=True, overwrite=False)
    assert not list(tmp_path.glob(".export*")) and not list(beside.parent.iterdir())
