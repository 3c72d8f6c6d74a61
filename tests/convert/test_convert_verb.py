"""``shardyard convert`` as it is typed: what it says, what it refuses, and the reference's two scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.conversions import held_in
from support.models import write_tiny_model

from shardyard.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("convert") / "model", "qwen3_moe", "bfloat16", vocab_size=200
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.md").write_text("not for a model")
    return folder


def say(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def refusal(capsys, *words: object) -> str:
    code, _, err = say(capsys, *words)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


def test_from_files_to_every_form_and_back(capsys, tmp_path, model):
    wanted = held_in(model)
    size = sum(len(data) for _, _, data in wanted.values())
    counted = f"{len(wanted)} tensors, {size / 2**20:,.1f} MiB"
    code, out, _ = say(capsys, "convert", model, tmp_path / "dcp", "--to", "dcp", "--verify")
    assert code == 0
    assert f"{model} is a Hugging Face model: {counted}" in out
    assert f"{tmp_path / 'dcp'}: {counted}, bfloat16\n" in out
    assert f"verified: {counted}: equal, bit for bit\n" in out
    assert "for training.resume_from_checkpoint convert with --dtype fp32" in out
    layout = ("--tp", "2", "--pp=2", "--ep", "2", "--moe-grouped-gemm", "--verify", "--noop-layers=0,3")
    code, out, _ = say(capsys, "convert", tmp_path / "dcp", tmp_path / "mcore", "--to", "mcore", *layout)
    assert code == 0 and "is a DCP checkpoint" in out and "equal, bit for bit" in out
    code, out, _ = say(
        capsys, "convert", tmp_path / "mcore", tmp_path / "hf", "--to", "hf", "--shard-size", "20kB",
        "--noop-layers", "0,3",
    )  # fmt: skip
    assert code == 0 and "is a Megatron-core checkpoint" in out and "verified" not in out
    assert held_in(tmp_path / "hf") == wanted and len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    for path in (tmp_path / "dcp/assets", tmp_path / "mcore", tmp_path / "hf"):
        assert (path / "tokenizer.json").exists() and not (path / "notes.md").exists()
        assert json.loads((path / "config.json").read_text()) == json.loads(
            (model / "config.json").read_text()
        )


def test_a_checkpoint_in_fp32_needs_no_hint(capsys, tmp_path, model):
    _, out, _ = say(capsys, "convert", model, tmp_path / "dcp", "--to", "dcp", "--dtype", "fp32")
    assert ", float32\n" in out and "resume" not in out


def test_wrong_folders_and_options_get_one_message_each(capsys, tmp_path, model):
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    (tmp_path / "file").write_text("")
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").write_text("")
    for words, message in (
        ((tmp_path / "none", out, "--to", "hf"), f"there is no folder {tmp_path / 'none'}"),
        ((empty, out, "--to", "hf"), f"{empty} holds no weights that are known here (it is empty)"),
        ((model, out), "--to: say what the result is to be: hf, dcp or mcore"),
        ((model, full, "--to", "hf"), f"{full} is not empty (something); name a new folder"),
        ((model, tmp_path / "file", "--to", "hf"), f"{tmp_path / 'file'} is a file; name a new folder"),
        ((model, model, "--to", "dcp"), f"{model} is both source and target"),
        ((model, out, "--to", "hf", "--from", "dcp"), f"--from: {model} is a Hugging Face model, not a DCP"),
        ((model, out, "--to", "hf", "--config", empty), f"--config {empty}: there is no config.json"),
        ((model, out, "--to", "hf", "--tp", "2"), "--tp: neither side is a Megatron-core folder"),
        ((model, out, "--to", "mcore", "--shard-size", "1GB"), "--shard-size: the files of a Megatron-core"),
        ((model, out, "--to", "hf", "--shard-size", "5 apples"), "'5 apples' is no number of bytes"),
        ((model, out, "--to", "hf", "--workers", "0"), "'0' is not a whole number from 1 on"),
        ((model, out, "--to", "hf", "--veriffy"), "convert has no option --veriffy; did you mean --verify?"),
        ((model, out, "--to", "mcore", "--tp", "3"), "tp is 3, which does not divide the 2 key-value heads"),
        (
            (model, out, "--to", "mcore", "--noop-layers", "7"),
            "--noop-layers names place 7; 2 layers and 1 noop",
        ),
        ((model,), "the following arguments are required: DST"),
    ):
        assert message in refusal(capsys, "convert", *words)
    assert not out.exists()


def test_a_folder_of_a_run_names_the_checkpoint_that_was_meant(capsys, tmp_path, model):
    checkpoint = tmp_path / "run/checkpoints/global_step_7"
    say(capsys, "convert", model, checkpoint, "--to", "dcp")
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints"):
        message = refusal(capsys, "convert", folder, tmp_path / "out", "--to", "hf")
        assert message.endswith(f"did you mean {checkpoint}?")


def test_help_is_no_error(capsys):
    for words in (("--help",), ("convert_ckpt_v2.py", "--help"), ("merge_dcp_to_hf.py", "--help")):
        code, out, err = say(capsys, "convert", *words)
        assert code == 0 and "usage" in out.lower() + "usage" and not err


def test_merge_dcp_to_hf_takes_the_reference_s_options(capsys, tmp_path, model):
    script = ("convert", "merge_dcp_to_hf.py")
    say(capsys, "convert", model, tmp_path / "dcp", "--to", "dcp", "--dtype", "fp32")
    (tmp_path / "dcp/assets/config.json").rename(tmp_path / "config.json")
    (tmp_path / "dcp/manifest.json").unlink()
    assert "holds no config.json; name the folder that does with --model-configs" in refusal(
        capsys, *script, "--load-dir", tmp_path / "dcp"
    )
    code, _, _ = say(
        capsys, *script, "--load-dir", tmp_path / "dcp", "--model-configs", model, "--shard-size", "20000"
    )
    assert code == 0 and held_in(tmp_path / "dcp/hf_ckpt") == held_in(model)  # bf16, as the reference
    assert len(list((tmp_path / "dcp/hf_ckpt").glob("*.safetensors"))) > 1
    words = ("--load-dir", tmp_path / "dcp", "--model-configs", model, "--save-dir", tmp_path / "fp16")
    code, out, _ = say(capsys, *script, *words, "--dtype", "fp16", "--verify")
    assert code == 0 and "float16" in out and "equal, bit for bit" in out
    assert "no option --load-dirr; did you mean --load-dir?" in refusal(capsys, *script, "--load-dirr", "x")
    assert "is a Hugging Face model" in refusal(capsys, *script, "--load-dir", model)


def test_convert_ckpt_v2_takes_the_reference_s_options(capsys, tmp_path, model):
    script = ("convert", "convert_ckpt_v2.py")
    there = (
        "--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", model, "--save-dir",
        tmp_path / "mg", "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2",
        "--target-expert-parallel-size", "2", "--num-layer-list", "1,1", "--moe-grouped-gemm",
        "--model-type-hf", "qwen3-moe", "--save-layer-by-layer", "--transformer-impl", "transformer_engine",
    )  # fmt: skip
    code, _, err = say(capsys, *script, *there)
    assert code == 0, err
    ranks = sorted(path.name for path in (tmp_path / "mg/iter_0000001").iterdir())
    assert ranks == [f"mp_rank_0{tp}_00{pp}_00{ep}" for tp in range(2) for pp in range(2) for ep in range(2)]
    back = (
        "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tmp_path / "mg", "--save-dir",
        tmp_path / "hf", "--hf-cfg-dir", model, "--moe-grouped-gemm", "--target-tensor-parallel-size", "1",
        "--model-type-hf", "qwen3-moe",
    )  # fmt: skip
    code, _, err = say(capsys, *script, *back)
    assert code == 0, err
    assert held_in(tmp_path / "hf") == held_in(model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lora-r", "8"), "--lora-r: adapters are not converted here yet"),
        (("--lora-target-modules=qkv",), "--lora-target-modules: adapters are not converted here yet"),
        (("--mamba-d-model", "1"), "--mamba-d-model: Mamba models are not converted here yet"),
        (
            ("--mla-mm-split",),
            "--mla-mm-split is MindSpeed's form of latent attention",
        ),
        (("--num-layers", "2"), "--num-layers: all layers are converted"),
        (("--target-tensor-paralel-size", "2"), "did you mean --target-tensor-parallel-size?"),
        (("--first-k-dense-replace", "3"), "--first-k-dense-replace 3: config.json says None, and decides"),
        (("--save-model-type", "hf"), "--load-model-type, --save-model-type: one of them is mg"),
        (("--model-type-hf", "gpt7"), "model_type 'gpt7' has no Megatron-core form here"),
        (("--expert-tensor-parallel-size", "3"), "--expert-tensor-parallel-size is 3"),
        (
            ("--num-layer-list", "__import__('os')"),
            "--num-layer-list is \"__import__('os')\"; whole numbers with commas between are needed",
        ),
    ],
)
def test_convert_ckpt_v2_refuses_by_name(capsys, tmp_path, model, words, message):
    dirs = ("--load-dir", model, "--save-dir", tmp_path / "out")
    assert message in refusal(capsys, "convert", "convert_ckpt_v2.py", *dirs, *words)
    assert not (tmp_path / "out").exists()


def test_progress_tells_share_rate_and_time_left(monkeypatch, caplog):
    from shardyard.convert import progress

    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    caplog.set_level("INFO", logger="shardyard.convert")
    monkeypatch.setattr(progress.logger, "propagate", True)
    mib = 2**20
    with progress.ByteProgress("writing", 100 * mib, done=20 * mib) as bar:
        now[0] += 4
        bar.advance(10 * mib)  # less than five seconds: no line
        now[0] += 4
        bar.advance(10 * mib)
        now[0] += 16
        bar.reach(50 * mib, 100 * mib)
    lines = [record.getMessage() for record in caplog.records]
    # 40 of 100 MiB after 8 s of which 20 were there before: 20 MiB in 8 s, 60 MiB left at 2.5 MiB/s are 24 s;
    # 50 MiB after 24 s: 30 MiB in 24 s, 50 MiB left at 1.25 MiB/s are 40 s.
    assert lines == [
        "writing: 40.0 % of 100.0 MiB, 2.5 MiB/s, 0:00:24 left",
        "writing: 50.0 % of 100.0 MiB, 1.2 MiB/s, 0:00:40 left",
    ]
