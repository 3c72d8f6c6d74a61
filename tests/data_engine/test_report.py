"""Counts, progress lines and the preview."""

import logging

import numpy as np
import pytest

from shardyard.data import progress
from shardyard.data.progress import Progress
from shardyard.data.report import Encoded, Report, preview
from shardyard.data.store import SampleBlock
from shardyard.data.types import Sample
from shardyard.errors import UserError


def sample(ids, labels):
    return Sample(np.array(ids, np.int32), np.array(labels, np.int32), (len(ids),))


class Letters:
    """Id 0 is ``|``, id n the n-th letter."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join("|" if token == 0 else chr(96 + token) for token in token_ids)


def make_report():
    report = Report("rows")
    report.add(Encoded(SampleBlock.of([sample([1, 2, 3], [-100, 3, -100])]), rows=1, truncated=1))
    report.add(Encoded(SampleBlock.of([]), rows=3, dropped=[("no reply", "f:2"), ("no turns", "f:3")]))
    pair = [sample([4], [-100]), sample([5, 0], [0, -100])]
    report.add(Encoded(SampleBlock.of(pair), rows=2, dropped=[("no reply", "f:9")], split=1))
    return report


def test_counts():
    report = make_report()
    assert (report.rows, report.samples, report.tokens, report.trained_tokens) == (6, 3, 6, 2)
    assert (report.shortest, report.longest, report.largest_id) == (1, 3, 5)
    assert (report.truncated, report.split) == (1, 1)
    assert {reason: (d.count, d.first) for reason, d in report.dropped.items()} == {
        "no reply": (2, "f:2"),
        "no turns": (1, "f:3"),
    }


def test_the_table_names_every_count():
    rows = [line.split(maxsplit=0)[0].strip() for line in make_report().lines()]
    table = {name.strip(): value.strip() for name, value in (row.split("  ", 1) for row in rows)}
    assert table == {
        "rows read": "6",
        "dropped: no reply": "2 (first: f:2)",
        "dropped: no turns": "1 (first: f:3)",
        "truncated to data.cutoff_len": "1",
        "split into one sample per reply": "1",
        "samples": "3",
        "tokens": "6",
        "trained tokens": "2 (33.3 %)",
        "tokens of a sample": "1 min, 2.0 mean, 3 max",
    }


def test_a_report_survives_the_manifest():
    assert Report.from_json(make_report().to_json()) == make_report()


def test_without_anything_to_train_the_error_shows_the_table():
    make_report().require_training_data()
    empty = Report("rows")
    with pytest.raises(UserError, match="the input has no rows"):
        empty.require_training_data()
    empty.add(Encoded(SampleBlock.of([]), rows=1, dropped=[("no reply", "f:1")]))
    with pytest.raises(UserError, match=r"(?s)none of the 1 rows became a sample.*no reply.*f:1"):
        empty.require_training_data()
    empty.add(Encoded(SampleBlock.of([sample([1, 2], [-100, -100])]), rows=1))
    with pytest.raises(UserError, match="none of the 2 tokens would be trained"):
        empty.require_training_data()


def test_the_preview_marks_the_targets():
    shown = preview(sample([1, 2, 3, 0, 4, 5, 0], [-100, 3, 0, -100, 5, 0, -100]), Letters())
    assert shown.text == "ab[[c|]]d[[e|]]"
    assert shown.input_ids == [1, 2, 3, 0, 4, 5, 0]
    assert shown.labels == [-100, 3, 0, -100, 5, 0, -100]
    cut = preview(sample([1] * 10, [1] * 9 + [-100]), Letters(), max_tokens=4)
    assert cut.text == "a[[aaa]] ... (6 more tokens)"


def test_progress_tells_speed_and_time_left():
    state = Progress("rows", 200)
    state._done = 50
    assert state.line(10.0) == "tokenising: 50/200 rows, 5 rows/s, 30 s left"
    state = Progress("rows", None)
    state._done = 50
    assert state.line(10.0) == "tokenising: 50 rows, 5 rows/s"


def test_progress_logs_a_line_only_every_few_seconds(caplog, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 7.0, 10.9, 11.1])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO, "shardyard.data")
    with Progress("rows", 10) as state:
        for _ in range(5):
            state.advance(2)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "tokenising: 4/10 rows",
        "tokenising: 10/10 rows",
    ]
