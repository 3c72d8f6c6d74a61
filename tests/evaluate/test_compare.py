"""Results: scores, files, tables; and two of them compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli.evaluate_tasks import compare_files
from shardyard.errors import UserError
from shardyard.evaluate.compare import compare, difference_of
from shardyard.evaluate.results import Results, TaskResult, as_json, pooled, score_of, table, write_results


def _task(name: str, values: list[Any], metric: str = "acc") -> TaskResult:
    samples = [
        {"doc_id": number, "doc_hash": f"{name}{number}", "metrics": {metric: value}, "filter": "none"}
        for number, value in enumerate(values)
    ]
    return TaskResult(name, {metric: score_of(metric, values)}, 2, samples)


def _write(path: Path, *tasks: TaskResult) -> Path:
    write_results(Results("m", {"seed": 0}, list(tasks), []), path)
    return path


def test_scores() -> None:
    score = score_of("acc", [1.0, 0.0, 1.0, 1.0])
    assert (score.value, score.samples) == (0.75, 4) and score.error == pytest.approx(0.25)
    assert score_of("acc", [1.0]).error is None
    words = [(-2.0, 1), (-4.0, 3), (-3.0, 2)]
    perplexity = score_of("word_perplexity", words)
    assert perplexity.value == pytest.approx(math.exp(1.5))
    assert perplexity.error == pytest.approx(math.exp(1.5) * math.sqrt(0.75) / 6)
    bits = score_of("bits_per_byte", words)
    assert (bits.value, bits.error) == (
        pytest.approx(1.5 / math.log(2)),
        pytest.approx(math.sqrt(0.75) / 6 / math.log(2)),
    )
    assert score_of("f1", [(1, 0), (1, 1)], 0.5).value == 0.5
    assert score_of("median", [1.0, 2.0, 9.0], 2.0) == score_of("median", [1.0, 2.0, 9.0], 2.0)
    assert score_of("median", [1.0, 2.0, 9.0], 2.0).error is None


def test_a_group_counts_every_sample_once() -> None:
    members = [_task("a", [1.0, 1.0, 1.0]), _task("b", [0.0])]
    group = pooled("all", members)
    assert group.scores["acc"].value == 0.75 and group.members == ("a", "b")
    lines = table(Results("m", {}, [group, *members], ["m: 1 left out: no answer"]))
    assert lines[1].split() == ["all", "acc", "0.7500", "0.2500", "4", "2"]
    assert lines[2].startswith("  a ") and lines[3].split()[3] == "-" and lines[-1].endswith("no answer")


def test_the_file_has_scores_and_samples_lie_beside_it(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "r.json", _task("a", [1.0, 0.0]), TaskResult("n", {"x": score_of("x", [math.inf])})
    )
    told = json.loads(path.read_text())
    assert (
        told["tasks"]["a"]["scores"]["acc"]["value"] == 0.5
        and told["tasks"]["n"]["scores"]["x"]["value"] is None
    )
    assert len((tmp_path / "r_samples" / "a.jsonl").read_text().splitlines()) == 2
    assert as_json(Results("m", {}, [], []))["tasks"] == {}


def test_zeros_and_ones_by_mcnemar() -> None:
    first, second = [1, 1, 0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    found = difference_of("t", "acc", first, second)
    assert (found.first, found.second, found.test) == (0.3, 0.9, "McNemar")
    assert found.difference == pytest.approx(0.6)
    assert found.p == pytest.approx(2 * (1 + 8) / 2**8)  # of 8 that differ, one or none
    differences = [b - a for a, b in zip(first, second, strict=True)]
    spread = sum((d - 0.6) ** 2 for d in differences) / 9
    assert found.error == pytest.approx(math.sqrt(spread / 10)) and found.verdict == "not significant"
    better = difference_of("t", "acc", [0] * 8, [1] * 8)
    assert better.p == pytest.approx(2 / 2**8) and better.verdict == "significant" and better.error == 0.0


def test_other_scores_by_students_t() -> None:
    found = difference_of("t", "score", [0.5, 0.25, 0.0], [0.75, 1.0, 0.5])
    # differences 0.25, 0.75, 0.5: mean 0.5, s 0.25, t = 0.5 / (0.25 / sqrt 3); two degrees have a closed form
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t)) and found.test == "paired t"
    assert difference_of("t", "score", [0.5, 0.25], [0.5, 0.25]).p == 1.0
    assert difference_of("t", "score", [0.5], [0.25]).verdict == "cannot tell"


def test_perplexities_by_the_log_likelihood_of_a_word() -> None:
    first, second = [(-2.0, 1), (-4.0, 2), (-6.0, 3)], [(-1.0, 1), (-3.0, 2), (-3.0, 3)]
    found = difference_of("t", "word_perplexity", first, second)
    assert (found.first, found.second) == (pytest.approx(math.exp(2)), pytest.approx(math.exp(7 / 6)))
    # d = 1, 1, 3 over w = 1, 2, 3: r = 5/6, residuals 1/6, -2/3, 1/2
    error = math.sqrt((1 / 36 + 16 / 36 + 9 / 36) * 3 / 2) / 6
    t = 5 / 6 / error
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_compare_reads_files_and_pools_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in (("a.json", [0.0, 0.0, 1.0]), ("b.json", [1.0, 1.0, 1.0])):
        members = [_task("t_x", values), _task("t_y", values[::-1])]
        _write(tmp_path / name, pooled("t", members), *members)
    found = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert [(one.task, one.samples) for one in found] == [("t_x", 3), ("t_y", 3), ("t", 6)]
    assert found[2].p == pytest.approx(2 / 2**4)
    assert compare_files(tmp_path / "a.json", tmp_path / "b.json") == 0
    assert "+0.6667" in capsys.readouterr().out


def test_other_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    first = _write(tmp_path / "folder" / "a.json", _task("t", [0.0, 1.0]))
    shorter = _write(tmp_path / "b.json", _task("t", [0.0]))
    other = _task("t", [0.0, 1.0])
    other.samples[1]["doc_hash"] = "other"
    others = _write(tmp_path / "c.json", other)
    strange = _write(tmp_path / "d.json", _task("u", [0.0, 1.0]))
    assert len(compare(first.parent, first)) == 1  # a folder with one file
    for path, told in (
        (shorter, "t has 2 samples in one and 1 in the other"),
        (others, "sample 2 of t is not the same row"),
        (strange, "no task is in both"),
        (tmp_path / "none.json", "no such file"),
        (tmp_path, r"3 \.json files"),
    ):
        with pytest.raises(UserError, match=told):
            compare(first, path)


def test_tasks_without_samples_and_numbers_that_are_none(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.json", _task("x", [0.1, math.nan, 0.3]), TaskResult("q", {}))
    second = _write(tmp_path / "b.json", _task("x", [0.1, 0.2, 0.3]), TaskResult("q", {}))
    for name in ("a", "b"):
        (tmp_path / f"{name}_samples" / "q.jsonl").write_text("")
    (found,) = compare(first, second)
    assert found.p is None and found.verdict == "cannot tell"
    endless = difference_of("t", "word_perplexity", [(-math.inf, 2), (-1.0, 2)], [(-1.0, 2), (-2.0, 2)])
    assert endless.p is None and endless.first == math.inf
    assert math.isnan(score_of("word_perplexity", [(0.0, 0)]).value)
    assert score_of("byte_perplexity", [(-1e6, 1)]).value == math.inf


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    sample = {"doc_id": 0, "doc_hash": "h", "prompt": "a\u2028b\x85c", "metrics": {"acc": 1.0}}
    path = _write(tmp_path / "a.json", TaskResult("x", {"acc": score_of("acc", [1.0])}, 0, [sample]))
    assert [one.samples for one in compare(path, path)] == [1]


@pytest.mark.parametrize("task", [3, {}, {"scores": 3}, {"scores": {}, "members": 5}])
def test_files_that_only_look_like_results(task: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"tasks": {"x": task}}))
    with pytest.raises(UserError, match=r"tasks\.x is no result"):
        compare(path, path)


def test_a_full_disk_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        path.write_text(text[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardyard.evaluate.results.write_durably", full)
    with pytest.raises(UserError, match=r"--output .*No space left"):
        _write(tmp_path / "a.json", _task("x", [1.0]))
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []
