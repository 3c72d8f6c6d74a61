"""A whole run with Muon, groups and a schedule: unbroken, and resumed on two ranks."""

from __future__ import annotations

import pytest
from support.whole_runs import metrics, train, write_numbered, write_workspace

WORDS = (
    "--training.optimizer", "muon", "--training.lr", "1e-3", "--training.weight_decay", "0.3",
    "--training.lr_scheduler_type", "warmup_stable_decay", "--training.max_steps", "4",
    "--training.parameter_groups", '[{"patterns": "model.layers.0.*", "lr_scale": 0.5}]',
)  # fmt: skip


def test_two_ranks_and_a_resume_go_as_one_unbroken_process(ranks, tmp_path):
    folder = write_workspace(tmp_path)
    write_numbered(folder / "rows.jsonl", range(12))
    leg = train(ranks, folder, "one", *WORDS, "--training.per_device_train_batch_size", "2")
    one = metrics(folder, "one")
    assert "model.layers.0.*" in leg.log and "lr x 0.5, weight decay 0.3: 7 parameters" in leg.log
    assert "(muon)" in leg.log
    assert [line["lr"] for line in one] == pytest.approx([1e-3, 1e-3, 1e-3, 1e-6])
    saved = folder / "one" / "checkpoints" / "global_step_2"
    train(ranks, folder, "two", *WORDS, "--training.resume_from_checkpoint", str(saved), world=2)
    two = metrics(folder, "two")
    assert [line["step"] for line in two] == [3, 4]
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one[2:]], rel=1e-5)
