"""What --model names, where the folder of a run is not as the run left it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardyard.errors import UserError
from shardyard.infer.opening import Choice, find


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints as the reference writes them, without a manifest."""
    for step in (3, 10):
        (tmp_path / "run" / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "run" / "resolved_config.yaml").write_text("data:\n  template: chatml\n", encoding="utf-8")
    return tmp_path / "run"


@pytest.mark.parametrize("wanted", ["²", "٣", "-3", "03 ", "4", "", "1" * 5000], ids=lambda text: text[:5])
def test_a_step_that_is_none_is_refused_with_those_that_are(run_dir: Path, wanted: str) -> None:
    with pytest.raises(UserError, match=r"has the steps 3, 10"):
        find(Choice(str(run_dir), checkpoint=wanted))


def test_a_step_is_found_with_the_settings_of_its_run(run_dir: Path) -> None:
    found = find(Choice(str(run_dir), checkpoint="3"))
    assert (found.step, found.run) == (3, {"data": {"template": "chatml"}})


@pytest.mark.parametrize("content", ["a: [1,", "- 1", "model: 5", "5", "", "\t", "a: " + "[" * 3000])
def test_settings_that_cannot_be_read_are_not_left_out_silently(run_dir: Path, content: str) -> None:
    (run_dir / "resolved_config.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"resolved_config\.yaml"):
        find(Choice(str(run_dir), checkpoint="10"))


def test_settings_that_are_missing_are_told(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shardyard"), "propagate", True)
    (run_dir / "resolved_config.yaml").unlink()
    with caplog.at_level(logging.WARNING):
        assert find(Choice(str(run_dir), checkpoint="10")).run is None
    assert "resolved_config.yaml is missing" in caplog.text
