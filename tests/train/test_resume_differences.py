"""What a resumed run says of its differences, which of them it refuses, and when there is nothing to do."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from support.whole_runs import metrics, refusal, train, write_numbered, write_workspace

from shardyard.config.schema import FIELDS
from shardyard.errors import UserError
from shardyard.optim import Schedule
from shardyard.train.differences import RunFacts, check_schedule, effect_of, tell_differences

COSINE = {"kind": "cosine", "lr": 1.0, "min_lr": 0.0, "warmup": 0, "total": 101}


def facts(schedule: dict | None = None, **config: object) -> RunFacts:
    return RunFacts({path.replace("__", "."): value for path, value in config.items()}, schedule=schedule)


def test_every_setting_has_an_effect_or_is_of_no_interest():
    told = {path: effect_of(path) for path in FIELDS}
    quiet = {path for path, effect in told.items() if not effect}
    assert quiet == {
        "training.resume_from_checkpoint", "training.resume_force", "training.output_dir",
        "training.overwrite_output_dir", "model.cache_dir", "data.overwrite_cache",
        "data.preprocessing_num_workers", "model.hf_hub_token", "model.ms_hub_token", "model.om_hub_token",
    }  # fmt: skip
    assert told["training.lr"] == told["training.adam_beta2"] == "holds from the next step on"
    assert "learning rate" in told["training.warmup_steps"]
    assert told["parallel.tp_size"] == "another layout: equal up to rounding"
    assert told["parallel.param_dtype"] == "another precision, from the next step on"
    assert "weights are the checkpoint's" in told["model.model_name_or_path"]
    assert told["training.save_steps"] == "what is kept and told; no effect on the weights"


def test_each_difference_is_a_line_with_both_values(caplog):
    before = RunFacts({"training.lr": 1e-5, "training.output_dir": "a", "data.packing": None}, 8, 2, "fsdp 2")
    now = RunFacts({"training.lr": 2e-5, "training.output_dir": "b", "data.packing": None}, 16, 4, "fsdp 4")
    with caplog.at_level(logging.WARNING, "shardyard"):
        tell_differences(before, now)
    lines = [" ".join(record.getMessage().split()) for record in caplog.records]
    assert lines[1:4] == [
        "training.lr 1e-05 -> 2e-05 holds from the next step on",
        "ranks 2 -> 4 equal up to rounding",
        "layout fsdp 2 -> fsdp 4 equal up to rounding",
    ]
    assert "16 samples and was 8" in lines[4]
    caplog.clear()
    tell_differences(before, before)
    assert not caplog.records


def test_a_jump_of_the_schedule_is_refused_by_its_settings_and_forced():
    before = facts(COSINE, training__max_steps=101)
    longer = Schedule("cosine", 1.0, 0.0, 0, 201)
    # By hand: after 50 of 100 steps the cosine is at (1 + cos(pi/2)) / 2, and at a quarter of 200 at
    # (1 + cos(pi/4)) / 2; update 51 is 50 steps after the first.
    was, will = 0.5, (1 + math.cos(math.pi / 4)) / 2
    now = facts(training__max_steps=201)
    with pytest.raises(UserError) as caught:
        check_schedule(before, now, longer, 50, force=False)
    text = str(caught.value)
    assert "training.max_steps 201 (was 101)" in text and "training.resume_force" in text
    assert f"step 51 is {will:.3g} and was to be {was:.3g}" in text
    check_schedule(before, now, longer, 50, force=True)
    # Another peak is meant to change the rate, and a constant schedule does not notice its end.
    check_schedule(before, before, Schedule("cosine", 3.0, 0.0, 0, 101), 50, force=False)
    constant = facts({**COSINE, "kind": "constant"}, training__max_steps=101)
    check_schedule(constant, now, Schedule("constant", 1.0, 0.0, 0, 201), 50, force=False)
    # A checkpoint of an older version does not know its schedule.
    check_schedule(facts(training__max_steps=101), now, longer, 50, force=False)


def test_only_another_number_of_samples_a_step_is_told_and_not_refused(caplog):
    before = facts(COSINE, training__max_steps=-1)
    with caplog.at_level(logging.WARNING, "shardyard"):
        check_schedule(before, before, Schedule("cosine", 1.0, 0.0, 0, 61), 50, force=False)
    assert "the schedule jumps: the learning rate of step 51" in caplog.text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ranks) -> Path:
    """A complete run of 4 steps, with its export."""
    folder = write_workspace(tmp_path_factory.mktemp("differences"))
    write_numbered(folder / "rows.jsonl", range(8))
    train(ranks, folder, "out", *RUN)
    return folder


RUN = [
    "--training.per_device_train_batch_size", "4", "--training.num_train_epochs", "2",
    "--training.save_hf_weights", "true", "--data.template", "chatml",
]  # fmt: skip
LATEST = ["--training.resume_from_checkpoint", "latest"]


def test_a_finished_run_has_nothing_to_do(finished, ranks):
    weights = finished / "out" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = train(ranks, finished, "out", *RUN, *LATEST, leg="again")
    assert "nothing to do" in again.log and "Building" not in again.log
    assert weights.stat().st_mtime_ns == written
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])  # cut short, it is no export any more
    export = train(ranks, finished, "out", *RUN, *LATEST, leg="export")
    assert "nothing is left to train: all 4 steps are done" in export.log
    assert weights.read_bytes() == whole


@pytest.mark.soak
def test_no_rank_of_a_finished_run_loses_the_others(finished, ranks):
    train(ranks, finished, "pair", *RUN, world=2)
    for leg in ("again", "and again"):  # any rank that fails, fails this
        again = train(ranks, finished, "pair", *RUN, *LATEST, world=2, leg=leg)
        assert "nothing to do" in again.log


def test_other_data_is_refused_unless_forced_and_then_said(finished, ranks):
    write_numbered(finished / "others.jsonl", range(20, 28))
    other = ["--data.dataset", str(finished / "others.jsonl"), *LATEST[:1]]
    other.append(str(finished / "out" / "checkpoints" / "global_step_2"))
    told = refusal(ranks, finished, "out2", *RUN, *other)
    assert "counts its place in other data" in told and "training.resume_force" in told
    assert f"data.dataset {str(finished / 'rows.jsonl')[:30]}" in told  # which setting, beside the hashes
    leg = train(ranks, finished, "out2", *RUN, *other, "--training.resume_force", "true", leg="forced")
    assert leg.first_step == 3 and "training.resume_force" in leg.log


def test_the_yaml_wins_over_the_checkpoint(finished, ranks):
    at_two = ["--training.resume_from_checkpoint", str(finished / "out" / "checkpoints" / "global_step_2")]
    leg = train(ranks, finished, "out3", *RUN, *at_two, "--training.lr", "3e-2", leg="lr")
    assert "training.lr" in leg.log and "holds from the next step on" in leg.log
    unbroken = {row["step"]: row["lr"] for row in metrics(finished, "out")}
    resumed = {row["step"]: row["lr"] for row in metrics(finished, "out3")}
    # Step 3 of 4 on a cosine from lr to 1e-6: a third of the way is left, at cos(2 pi / 3) = -1/2.
    for rate, lr in ((unbroken[3], 1e-2), (resumed[3], 3e-2)):
        assert rate == pytest.approx(1e-6 + (lr - 1e-6) / 4, rel=1e-9)
    told = refusal(ranks, finished, "out4", *RUN, *at_two, "--training.num_train_epochs", "4")
    assert "training.num_train_epochs 4" in told and "would jump" in told
    state = json.loads((finished / "out" / "checkpoints" / "global_step_2" / "run_state.json").read_text())
    assert state["settings"]["schedule"]["total"] == 4 and "hf_hub_token" not in json.dumps(state)
