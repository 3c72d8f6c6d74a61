"""Settings of batches by tokens: what the checker says, and what a layout makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import fault_of, load

from shardyard.config import layout_of
from shardyard.config.layout_report import layout_lines
from shardyard.errors import UserError
from shardyard.train.differences import effect_of

BUDGET = "training.max_tokens_per_micro_batch=4096"


def test_by_default_rows_are_counted(tmp_path: Path) -> None:
    training = load(tmp_path, "", "data.dataset=x").config.training
    assert training.max_tokens_per_micro_batch is None and training.group_by_length is None


def test_a_budget_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "max_tokens_per_micro_batch" in fault_of(tmp_path, "", "training.max_tokens_per_micro_batch=0")


def test_grouping_has_no_effect_beside_a_budget(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, "", "data.dataset=x", BUDGET, "training.group_by_length=true").warnings
    assert "training.group_by_length" in warning and "has no effect" in warning


def test_a_pipeline_needs_no_accumulation_with_a_budget(tmp_path: Path) -> None:
    """1F1B of two stages is refused with one micro-batch; a cut by tokens makes two where it can."""
    words = ("data.dataset=x", "parallel.pp_size=2")
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        layout_of(load(tmp_path, "", *words).config, 2)
    assert layout_of(load(tmp_path, "", *words, BUDGET).config, 2).pp == 2


def test_a_layout_is_told_in_tokens(tmp_path: Path) -> None:
    words = ("data.dataset=x", "training.gradient_accumulation_steps=2", "parallel.cp_size=2", BUDGET)
    config = load(tmp_path, "", *words, "data.cutoff_len=8192").config
    lines = layout_lines(config, layout_of(config, 4))
    assert lines[-2:] == [
        "  a step: 32 samples, up to 262144 tokens",
        "  a rank: as few micro-batches as hold 4096 tokens (one sample may have 8192), of up to 8192 / 2 "
        "(cp x tp) tokens, 4096 at a time",
    ]


def test_a_resume_may_change_the_cut() -> None:
    for key in ("max_tokens_per_micro_batch", "group_by_length"):
        assert effect_of(f"training.{key}") == "the same global batches, cut otherwise: equal up to rounding"
