"""How generated answers are judged, by hand; and what programs may not do."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardyard.evaluate.tasks import catalog
from shardyard.evaluate.tasks.answers import METRICS, SCORERS, code, contains, letter, number, phrase
from shardyard.evaluate.tasks.sandbox import run_program


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", True), ("(B)", True), ("The answer is (B).", True), ("**Answer: B**", True),
        ("答案是B。", True), ("答案：（B）", True), ("A is wrong, so the answer is B", True),
        ("The answer is A. No, the answer is B", True),
        ("I think B. It is not A's fault", True), ("A", False), ("", False), ("Because", False),
        ("The answer is C", False), ("B, or rather A", False), ("the answer is b", True), ("E", False),
    ],
)  # fmt: skip
def test_letters(answer: str, right: bool) -> None:
    assert letter({"letters": list("ABCD"), "letter": "B"}, answer) == {"acc": float(right)}


@pytest.mark.parametrize(
    ("answer", "exact", "strict"),
    [
        ("so 3 and 4\n#### 1,200", 1, 1), ("#### 1200.0", 1, 1), ("it is $1,200.", 1, 0),
        ("1200 then 7", 0, 0),
        ("#### 7 not 1200", 0, 0), ("none", 0, 0), ("", 0, 0),
    ],
)  # fmt: skip
def test_numbers(answer: str, exact: int, strict: int) -> None:
    assert number({"answer": "1200"}, answer) == {"exact_match": exact, "strict_match": strict}


def test_phrases_and_needles() -> None:
    assert phrase({"answer": "(A)"}, "Let us see. So the answer is A.") == {"exact_match": 1.0}
    assert phrase({"answer": "valid"}, " Valid. ") == {"exact_match": 1.0}
    assert phrase({"answer": "valid"}, "invalid") == {"exact_match": 0.0}
    assert contains({"answer": "copper"}, "It is Copper.") == {"acc": 1.0}
    assert contains({"answer": ""}, "anything") == {"acc": 0.0}


def test_programs_are_put_together_and_tested() -> None:
    row = {"prompt": "import math\n\ndef up(x):\n    '''More.'''\n", "entry_point": "up",
           "test": "def check(f):\n    assert f(1) == 2 and math.pi"}  # fmt: skip
    assert code(row, "    return x + 1\n") == {"pass@1": 1.0}
    assert code(row, "    return x\n") == {"pass@1": 0.0}
    assert code(row, "Here:\n```python\ndef up(x):\n    return x + 1\n```\nDone.") == {"pass@1": 1.0}
    assert code(row, "") == {"pass@1": 0.0}


def test_a_program_has_only_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    before = set(os.listdir("/tmp"))
    assert run_program(
        "import os\nassert 'TOKEN_OF_MINE' not in os.environ\nopen('a', 'w').write('x')"
    ).passed
    assert not run_program("raise ValueError('no')").passed
    assert run_program("raise ValueError('no')").reason == "ValueError: no"
    for early in (
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "this is no python",
    ):
        assert not run_program(early).passed
    assert not run_program("x = bytearray(4 << 30)").passed
    assert not run_program(
        "f = open('big', 'wb')\nfor _ in range(20): f.write(b'x' * (1 << 20)); f.flush()"
    ).passed
    assert not any(name.startswith("shardyard-sandbox-") for name in set(os.listdir("/tmp")) - before)


def test_a_program_that_does_not_end_is_ended() -> None:
    outcome = run_program("while True: pass", seconds=1)
    assert outcome == run_program("import time; time.sleep(60)", seconds=1)
    assert not outcome.passed and outcome.reason == "not done after 1 s"


def test_every_benchmark_has_a_file_with_what_it_needs() -> None:
    for name in catalog.BENCHMARKS:
        spec = catalog.load(name)
        generates = spec["config"]["output_type"] == "generate_until"
        assert generates == (spec.get("scorer") in SCORERS) and set(METRICS) == set(SCORERS)
        assert ("generation_kwargs" in spec["config"]) == generates
    assert catalog.name_of("humaneval") == "human_eval" and catalog.name_of("mmlo") is None
    assert "mmlu" in catalog.near("mmlo")
    thought = catalog.load("mmlu", variant="chain_of_thought")
    assert thought["scorer"] == "letter" and "metric_list" not in thought["config"]


@pytest.mark.parametrize(
    "program",
    [
        "import os, time\ntry:\n    os.setsid()\nexcept OSError:\n    pass\ntime.sleep(50)",
        "import os, time\nos.kill(0, 9)\ntime.sleep(50)",
    ],
)
def test_what_leaves_its_session_ends_with_it(program: str) -> None:
    def left() -> set[str]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if b"seconds, memory, channel, word" in entry.read_bytes():
                    found.add(entry.parent.name)
        return found

    before = left()
    assert not run_program(program, seconds=1).passed
    deadline = time.monotonic() + 10
    while left() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left() - before
