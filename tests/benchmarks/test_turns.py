"""Contestants take turns, and what one of them says or fails to say is not lost; the trainers are paper."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

PAPER = """
import os, sys
sys.path.insert(0, {folder!r})
from turns import Turns
turns = Turns()
print("a library that prints")
{before}
turns.ready()
for number in range(1, {steps} + 1):
    with open({log!r}, "a") as log:
        log.write("{name}{rank} " + str(number) + "\\n")
    turns.report(tokens=10 * number, loss=1.0 / number, live_bytes=77 if number == {watched} else None)
"""


@pytest.fixture
def turns() -> Any:
    return importlib.import_module("turns")


def paper_entry(
    turns: Any, tmp_path: Path, name: str, steps: int = 3, before: str = "", watched: int = 0
) -> Any:
    code = PAPER.format(
        folder=str(turns.HERE), name=name, steps=steps, log=str(tmp_path / "log"), before=before,
        watched=watched, rank="",
    )  # fmt: skip
    return turns.Entry(name, [sys.executable, "-c", code])


def test_the_first_of_a_round_changes_and_nobody_works_out_of_turn(turns: Any, tmp_path: Path) -> None:
    entries = [paper_entry(turns, tmp_path, name) for name in "abc"]
    results = turns.compete(entries, steps=3, warm_up=1)
    said = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    rounds = [[name for name, number in said if number == str(k)] for k in (1, 2, 3)]
    assert [number for _, number in said] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert [result.name for result in results] == ["a", "b", "c"]
    assert all("torch" in result.facts and "python" in result.facts for result in results)


def test_figures_leave_out_the_warm_up_and_the_watched_step(turns: Any, tmp_path: Path) -> None:
    (result,) = turns.compete([paper_entry(turns, tmp_path, "a", 4, watched=4)], steps=4, warm_up=1)
    assert [step.tokens for step in result.timed] == [20, 30]
    assert result.live_bytes == 77
    assert result.peak_bytes > 1 << 20
    seconds = [step.seconds for step in result.timed]
    assert result.tokens_per_second_over_all == pytest.approx(50 / sum(seconds))
    rates = sorted(step.tokens / step.seconds for step in result.timed)
    assert result.tokens_per_second == pytest.approx(sum(rates) / 2)


def test_losses_are_compared_step_by_step(turns: Any) -> None:
    def result(*losses: float) -> Any:
        return turns.Result("x", {}, tuple(turns.Step(1.0, 1.0, 1, loss, 1) for loss in losses), 0)

    assert turns.largest_loss_difference(result(1.0, 2.0), result(1.0, 2.5)) == 0.5


def test_one_that_cannot_says_why_and_the_others_are_ended(turns: Any, tmp_path: Path) -> None:
    entries = [
        paper_entry(turns, tmp_path, "a"),
        paper_entry(turns, tmp_path, "b", before="turns.refuse('no such kernel'); sys.exit(2)"),
    ]
    with pytest.raises(turns.Refused, match="no such kernel"):
        turns.compete(entries, steps=3, warm_up=0)
    assert not (tmp_path / "log").exists()


def test_one_that_ends_too_early_ends_the_benchmark(turns: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="b ended with exit code 3"):
        turns.compete([paper_entry(turns, tmp_path, "b", before="sys.exit(3)")], steps=3, warm_up=0)


def test_several_ranks_of_one_contestant_meet_at_one_address(turns: Any, tmp_path: Path) -> None:
    code = (
        f"import os, sys\nsys.path.insert(0, {str(turns.HERE)!r})\nfrom turns import Turns\n"
        f"names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')\n"
        f"file = open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w')\n"
        "file.write(' '.join(os.environ[n] for n in names))\n"
        "if os.environ['RANK'] == '0':\n    t = Turns()\n    t.ready()\n    t.report(1, 1.0)\n"
    )
    turns.compete([turns.Entry("a", [sys.executable, "-c", code], ranks=2)], steps=1, warm_up=0)
    zero, one = ((tmp_path / rank).read_text().split() for rank in "01")
    assert zero[:5] == ["0", "0", "2", "2", "127.0.0.1"] and one[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert zero[5] == one[5]


def test_a_table_is_markdown_whose_columns_line_up(turns: Any) -> None:
    lines: list[str] = []
    turns.print_table(["", "speed"], [["a long name", "1"], ["b", "22"]], lines.append)
    assert lines == [
        "|             | speed |",
        "| ----------- | ----- |",
        "| a long name | 1     |",
        "| b           | 22    |",
    ]


def test_the_exponent_of_a_power_is_found(turns: Any) -> None:
    scaling = importlib.import_module("scaling")
    assert scaling.exponent([2, 4, 16], [3 * size**1.7 for size in (2, 4, 16)]) == pytest.approx(1.7)


def test_operators_are_summed_by_kind_without_those_they_call() -> None:
    from types import SimpleNamespace

    mfu = importlib.import_module("mfu")
    names = {
        "aten::mm": 5, "aten::addmm": 1, "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 2,
        "aten::_fused_adamw_": 3, "aten::rsqrt": 4, "aten::mul": 6, "record_param_comms": 7,
    }  # fmt: skip
    events = [SimpleNamespace(key=name, self_cpu_time_total=1e6 * seconds) for name, seconds in names.items()]
    assert mfu.by_kind(events) == {
        "matrix products": 6, "attention": 2, "optimizer": 3, "norms, the gradient's too": 4,
        "element-wise and copies": 6, "other": 7,
    }  # fmt: skip
