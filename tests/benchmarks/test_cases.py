"""The words of the built-in cases are settings that load, with the ones that the figures depend on."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.config import load_config
from shardyard.data.types import Sample


@pytest.fixture
def cases() -> Any:
    return importlib.import_module("cases")


def words(cases: Any, tmp_path: Path, *argv: str) -> list[str]:
    parser = argparse.ArgumentParser()
    cases.add_case_options(parser)
    options, rest = parser.parse_known_args(argv)
    return cases.words_of(parser, options, rest, steps=6, folder=str(tmp_path))


@pytest.mark.parametrize("case", ("alpaca", "glaive", "pretrain"))
def test_a_case_loads_and_is_what_the_page_says(case: str, cases: Any, assets: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows"
    data.mkdir()
    file = cases.CASES[case][0]
    (data / file).write_text("[]")
    argv = ["--case", case, "--model", str(assets / "model"), "--data", str(data), "training.lr=2e-5"]
    config = load_config(words(cases, tmp_path, *argv)).config
    training = config.training
    assert training.max_steps == 6 and training.disable_shuffling and training.lr == 2e-5
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 4
    assert config.parallel.param_dtype == "fp32" and not config.parallel.recompute
    assert training.save_steps == 0 and training.save_epochs == 0 and not training.save_hf_weights
    assert config.model.model_name_or_path == str(assets / "model")
    entry = json.loads(json.dumps(config.data.model_dump(mode="json")["dataset"]))
    assert entry["file_name"] == str(data / file)
    assert (config.data.mask_history, training.stage) == {
        "alpaca": (False, "sft"), "glaive": (True, "sft"), "pretrain": (False, "pt"),
    }[case]  # fmt: skip


def test_without_a_case_it_is_the_quick_start_or_the_users_file(cases: Any, tmp_path: Path) -> None:
    assert words(cases, tmp_path)[0] == str(cases.QUICKSTART)
    mine = words(cases, tmp_path, "mine.yaml", "training.lr=1")
    assert mine[0] == "mine.yaml" and "training.lr=1" in mine
    assert mine[-1] == "training.max_steps=6"  # the benchmark's own number of steps wins


def test_every_lever_is_made_of_settings_that_exist() -> None:
    """One that nobody offers any more would stay in the table as a row that is not here, for ever."""
    from shardyard.config.schema import FIELDS

    levers = importlib.import_module("ablation").LEVERS
    assert len({lever.name for lever in levers}) == len(levers)
    keys = {word.split("=")[0] for lever in levers for word in f"{lever.pulled} {lever.left}".split()}
    assert sorted(keys - set(FIELDS)) == []
    assert all(lever.pulled != lever.left for lever in levers)


def test_a_row_for_a_peer_has_the_same_targets_one_place_later() -> None:
    rows = importlib.import_module("peer_rows")
    conversation = Sample(np.array([5, 6, 7, 8]), np.array([-100, 7, 8, -100]), (4,))
    assert rows.unshifted(conversation) == {
        "input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "tokens": 4,
    }  # fmt: skip
    window = Sample(np.array([5, 6, 7]), np.array([6, 7, 9]), (3,))
    assert rows.unshifted(window) == {"input_ids": [5, 6, 7, 9], "labels": [-100, 6, 7, 9], "tokens": 3}


def test_an_environment_is_made_once_and_again_after_one_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venvs = importlib.import_module("peer_venvs")
    made: list[list[str]] = []

    def command(words: list[str], check: bool) -> None:
        made.append(words)
        if "venv" in words:
            Path(words[-1]).mkdir(exist_ok=True)
        elif len(made) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(venvs.subprocess, "run", command)
    with pytest.raises(KeyboardInterrupt):
        venvs.python_of("trl", tmp_path)
    python = venvs.python_of("trl", tmp_path)
    assert venvs.python_of("trl-padding-free", tmp_path) == python
    assert len(made) == 4 and made[2] == made[0]
    assert venvs.python_of("trainer", tmp_path) != python


def test_peers_are_pinned_to_the_torch_that_is_tested() -> None:
    venvs = importlib.import_module("peer_venvs")
    tested = dict(
        line.split("==")
        for line in (venvs.HERE.parent / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name in set(venvs.REQUIREMENTS.values()):
        lines = (venvs.HERE / "peers" / f"{name}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
        assert pins["torch"] == tested["torch"] and pins["transformers"] == tested["transformers"]
