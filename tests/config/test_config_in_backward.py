"""What optimizer_in_backward and optimizer_state_dtype are refused with, before anything is built."""

from __future__ import annotations

import pytest

from shardyard.config import load_config
from shardyard.errors import UserError

YAML = "model:\n  model_name_or_path: m\ndata:\n  dataset: d.jsonl\ntraining:\n  output_dir: out\n"


def loaded(tmp_path, *words: str):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return load_config([str(path), *words])


REFUSED = [
    (("--training.optimizer_in_backward",), ("max_grad_norm", "two_pass")),
    (
        ("--training.optimizer_in_backward", "--training.max_grad_norm", "0", "--training.on_nonfinite",
         "skip"),
        ("on_nonfinite", "two_pass"),
    ),
    (
        ("--training.optimizer_in_backward", "two_pass", "--training.gradient_accumulation_steps", "2"),
        ("micro-batches",),
    ),
    (("--training.optimizer_in_backward", "two_pass", "--parallel.pp_size", "2"), ("micro-batches",)),
    (("--training.optimizer_in_backward", "two_pass", "--training.optimizer", "muon"), ("lion",)),
    (("--training.optimizer_state_dtype", "bf16", "--training.optimizer", "lion"), ("AdamW",)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_what_cannot_be_kept_is_refused_with_what_to_do(tmp_path, words, told):
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, *words)
    assert all(word in str(caught.value) for word in told), caught.value


@pytest.mark.parametrize(
    "words",
    [
        ("--training.optimizer_in_backward", "--training.max_grad_norm", "0"),
        ("--training.optimizer_in_backward", "two_pass", "--training.on_nonfinite", "skip"),
        ("--training.optimizer_in_backward", "two_pass", "--training.optimizer", "lion"),
        ("--training.optimizer_state_dtype", "bf16", "--training.optimizer", "fused_adamw"),
    ],
)
def test_what_can_is_taken(tmp_path, words):
    assert loaded(tmp_path, *words).config.training.optimizer_in_backward in (False, True, "two_pass")
