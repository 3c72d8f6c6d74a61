"""Whole runs, from a YAML to an exported model: every layout logs, validates, saves and exports the same."""

from __future__ import annotations

from typing import Any

import pytest
from support.whole_runs import metrics, train, train_and_kill, write_numbered, write_workspace

TOLERANCE = 1e-5
WORDS = (
    "--data.val_size", "5", "--training.max_steps", "4", "--training.eval_steps", "2",
    "--training.save_hf_weights", "true", "--training.router_aux_loss_coef", "0.01",
)  # fmt: skip
ALONE = {"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 4}

# Overrides of a layout, with a global batch of eight rows.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2 x TP 2 with EP 2": (
        4, {"parallel.tp_size": 2, "parallel.ep_size": 2, "training.per_device_train_batch_size": 2,
            "training.gradient_accumulation_steps": 2, "parallel.recompute": True},
    ),
    "PP 2 x CP 2": (
        4, {"parallel.pp_size": 2, "parallel.cp_size": 2, "parallel.cp_type": "ring",
            "training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 4},
    ),
    "PP 2 interleaved x FSDP 2 with EP 2": (
        4, {"parallel.pp_size": 2, "parallel.pp_schedule": "interleaved_1f1b", "parallel.ep_size": 2,
            "training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 4},
    ),
    "TP 4": (4, {"parallel.tp_size": 4, **ALONE}),
    "CP 4 kvallgather": (4, {"parallel.cp_size": 4, "parallel.cp_type": "kvallgather", **ALONE}),
    "HSDP 2x2 with offload": (
        4, {"parallel.fsdp_size": 2, "parallel.cpu_offload": True,
            "training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 2},
    ),
}  # fmt: skip
SAMPLE = {"FSDP 2 x TP 2 with EP 2", "PP 2 x CP 2"}
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.soak) for name in LAYOUTS]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = write_workspace(tmp_path_factory.mktemp("layouts"), "parity_moe")
    write_numbered(folder / "rows.jsonl", range(37))
    return folder


@pytest.fixture(scope="module")
def alone(ranks, workspace):
    train(ranks, workspace, "alone", *_words(ALONE))
    return metrics(workspace, "alone")


def _words(settings: dict[str, Any]) -> list[str]:
    return [*WORDS, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


def _exported(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _numbers(lines: list[dict[str, Any]], *names: str) -> list[float]:
    return [line[name] for line in lines if "eval" not in line for name in names]


def _validations(lines: list[dict[str, Any]]) -> list[Any]:
    return [line["eval"] for line in lines if "eval" in line]


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_changes_nothing_of_a_run(ranks, workspace, alone, name):
    world, settings = LAYOUTS[name]
    out = name.replace(" ", "-")
    log = train(ranks, workspace, out, *_words(settings), world=world).log
    ours = metrics(workspace, out)
    close = ("loss", "grad_norm", "aux_loss", "max_expert_load")
    assert _numbers(ours, *close) == pytest.approx(_numbers(alone, *close), rel=TOLERANCE)
    same = ("lr", "tokens", "samples", "consumed_samples", "consumed_tokens", "unused_experts")
    assert _numbers(ours, *same) == _numbers(alone, *same)
    assert len(_validations(ours)) == 2
    for validation, reference in zip(_validations(ours), _validations(alone), strict=True):
        assert validation["all"]["loss"] == pytest.approx(reference["all"]["loss"], rel=TOLERANCE)
        assert validation["all"]["tokens"] == reference["all"]["tokens"]
    exported, reference = _exported(workspace / out), _exported(workspace / "alone")
    assert exported.keys() == reference.keys()
    for tensor in reference:
        scale = reference[tensor].abs().max()
        assert (exported[tensor] - reference[tensor]).abs().max() <= TOLERANCE * scale, tensor
    assert "verified" in log


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_bit_for_bit(ranks, workspace, name):
    """On the same layout; tests/train/test_resume_on_another_layout.py has the others."""
    world, settings = LAYOUTS[name]
    broken, unbroken = f"{name}-broken".replace(" ", "-"), f"{name}-unbroken".replace(" ", "-")
    train(ranks, workspace, unbroken, *_words(settings), world=world)
    train_and_kill(ranks, workspace, broken, *_words(settings), world=world, leg="first", after=3)
    again = [*_words(settings), "--training.resume_from_checkpoint", "latest"]
    train(ranks, workspace, broken, *again, world=world, leg="second")
    exact = ("step", "loss", "lr", "grad_norm", "tokens", "consumed_samples", "aux_loss", "max_expert_load")
    assert _numbers(metrics(workspace, broken), *exact) == _numbers(metrics(workspace, unbroken), *exact)
    after, before = _exported(workspace / broken), _exported(workspace / unbroken)
    assert all((after[name] == before[name]).all() for name in before)
