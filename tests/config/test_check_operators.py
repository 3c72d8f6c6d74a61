"""``shardyard check --operators``: the table of a run before there is one, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import tiny_config

from shardyard.cli.check import check
from shardyard.errors import UserError


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A model of which there is nothing but its config."""
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "model")
    return [f"model.model_name_or_path={tmp_path / 'model'}", "training.output_dir=o", "--operators"]


def test_every_operation_has_a_row(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    off = [f"optimization.{switch}=false" for switch in ("use_fused_swiglu", "moe_grouped_gemm")]
    assert check([*words, *off]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("operators on this machine") :].splitlines()[1:-1]
    assert [row.split()[0] for row in table] == [
        "operation", "swiglu", "rms_norm", "rotary", "attention", "experts",
    ]  # fmt: skip
    assert table[1].split() == ["swiglu", "eager", "optimization.use_fused_swiglu", "is", "false"]
    assert table[5].split()[1] == "eager" and shown.rstrip().endswith("valid")


def test_what_cannot_run_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"optimization.use_fused_rmsnorm: npu cannot be had"):
        check([*words, "optimization.use_fused_rmsnorm=npu"])


def test_a_model_that_is_elsewhere_is_named() -> None:
    words = ["model.model_name_or_path=some/model", "training.output_dir=o"]
    with pytest.raises(UserError, match=r"--operators: some/model/config.json is not on this machine"):
        check([*words, "--operators"])
