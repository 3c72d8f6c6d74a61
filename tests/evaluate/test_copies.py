"""Local copies in their public layouts; rows that cannot be scored are counted, others are a fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.benchmarks import write_gsm8k, write_jsonl, write_mmlu

from shardyard.errors import UserError
from shardyard.evaluate.benchmarks import Benchmarks, read_parts
from shardyard.evaluate.tasks.copies import Part, read_copy, skipped_lines
from shardyard.evaluate.tasks.files import read_rows


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_mmlu(tmp_path: Path) -> None:
    _write(tmp_path / "test/old_ships_test.csv", '"What, \n""now""?",a,b,c,d,C\nNext?,1,2,3,4,A\n')
    _write(tmp_path / "dev/old_ships_dev.csv", "Shown?,w,x,y,z,D\n")
    _write(tmp_path / "dev/lost_dev.csv", "Shown?,w,x,y,z,D\n")
    ships, lost = read_copy("mmlu", tmp_path, name="mmlu")
    assert [row["question"] for row in ships.rows] == ['What, \n"now"?', "Next?"]
    assert ships.rows[0]["choices"] == ["a", "b", "c", "d"] and ships.rows[0]["answer"] == 2
    assert ships.rows[1]["where"].endswith("old_ships_test.csv:3")
    assert ships.rows[0]["subject"] == "old ships"
    assert [row["letter"] for row in ships.shots] == ["D"]
    assert lost.rows == [] and skipped_lines("mmlu", [ships, lost]) == [
        "mmlu: 1 left out: subject file missing"
    ]


def test_a_folder_of_copies_is_searched_by_name(tmp_path: Path) -> None:
    write_mmlu(tmp_path / "MMLU" / "data", ("birds",), rows=2)
    (part,) = read_copy("mmlu", tmp_path, name="mmlu")
    assert (part.subject, len(part.rows), len(part.shots)) == ("birds", 2, 5)


def test_chinese_sets(tmp_path: Path) -> None:
    _write(tmp_path / "c/val/law_val.csv", "id,question,A,B,C,D,answer\n0,问题,甲,乙,丙,丁,B\n")
    _write(
        tmp_path / "c/dev/law_dev.csv", "id,question,A,B,C,D,answer,explanation\n0,问,甲,乙,丙,丁,A,因为\n"
    )
    (ceval,) = read_copy("ceval", tmp_path / "c", name="ceval")
    assert ceval.rows[0]["answer"] == 1 and ceval.shots[0]["explanation"] == "因为"
    _write(tmp_path / "m/test/law.csv", ",Question,A,B,C,D,Answer\n0,问题,甲,乙,丙,丁,D\n")
    (cmmlu,) = read_copy("cmmlu", tmp_path / "m", name="cmmlu")
    assert cmmlu.rows[0]["letter"] == "D" and cmmlu.rows[0]["choices"][3] == "丁"


def test_gsm8k(tmp_path: Path) -> None:
    (part,) = read_copy("gsm8k", write_gsm8k(tmp_path / "g", rows=3), name="gsm8k")
    assert [row["answer"] for row in part.rows] == ["2", "3", "4"]
    assert part.rows[1]["thought"] == "1 + 2 = 3" and len(part.shots) == 6


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "main").mkdir()
    table = pa.table({"question": ["How many?"], "answer": ["so #### 1,200"]})
    parquet.write_table(table, tmp_path / "main" / "test-00000-of-00001.parquet")
    (part,) = read_copy("gsm8k", tmp_path, name="gsm8k")
    assert part.rows[0]["answer"] == "1200" and part.rows[0]["where"].endswith(":row 1")


def test_boolq_hellaswag_and_human_eval(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "dev.jsonl", [{"question": "is it", "passage": "It is.", "answer": True}])
    (boolq,) = read_copy("boolq", tmp_path, name="boolq")
    assert boolq.rows[0]["answer"] == 1 and boolq.rows[0]["choices"] == ["no", "yes"]
    row = {"ctx_a": "He sits. [step] He", "ctx_b": "then", "activity_label": "Sitting", "label": 3,
           "endings": ["a", "b", "c", "d [title] e"]}  # fmt: skip
    write_jsonl(tmp_path / "hellaswag_val.jsonl", [row])
    (swag,) = read_copy("hellaswag", tmp_path, name="hellaswag")
    assert swag.rows[0]["question"] == "Sitting: He sits. He Then"
    assert swag.rows[0]["choices"][3] == "d. e" and swag.rows[0]["answer"] == 3
    code = {"task_id": "T/0", "prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(code).encode() + b"\n"))
    (human,) = read_copy("human_eval", tmp_path, name="human_eval")
    assert human.rows[0]["entry_point"] == "f"


def test_bbh_takes_its_examples_from_the_published_prompt(tmp_path: Path) -> None:
    _write(
        tmp_path / "bbh/snarks.json",
        json.dumps({"canary": "x", "examples": [{"input": "q", "target": "(A)"}]}),
    )
    shown = "Q: one\ntwo\nA: Let's see. So the answer is (B).\n\nQ: three\nA: So the answer is no."
    prompt = f"canary\n-----\nTell.\n\n{shown}"
    _write(tmp_path / "cot-prompts/snarks.txt", prompt)
    (part,) = read_copy("bbh", tmp_path, name="bbh")
    assert [(row["question"], row["answer"]) for row in part.shots] == [("one\ntwo", "(B)"), ("three", "no")]
    assert part.shots[0]["thought"] == "Let's see. So the answer is (B)." and part.rows[0]["answer"] == "(A)"


def test_agieval(tmp_path: Path) -> None:
    rows = [
        {"passage": "P", "question": "Q", "options": ["(A)x", "(B)y"], "label": "B", "answer": None},
        {"passage": None, "question": "Q", "options": ["(A)x", "(B)y"], "label": ["A", "B"]},
        {"question": "Q", "options": [], "label": "A"},
        {"question": "2+2", "options": None, "label": None, "answer": "4"},
    ]
    write_jsonl(_write(tmp_path / "v1/sat-en.jsonl", ""), rows)
    write_jsonl(tmp_path / "v1/gaokao-history.jsonl", rows[:1])
    chinese, english = read_copy("agieval", tmp_path, name="agieval")
    assert chinese.subject == "gaokao-history" and chinese.rows[0]["chinese"]
    assert [row["kind"] for row in english.rows] == ["choice", "cloze"]
    assert english.rows[0]["question"] == "P\nQ" and english.rows[0]["choices"] == ["x", "y"]
    assert english.skipped == {"more than one right answer": 1, "empty choice": 1}
    assert [part.subject for part in read_copy("agieval", tmp_path, name="agieval", language="en")] == [
        "sat-en"
    ]


def test_rows_without_a_question_a_choice_or_an_answer_are_counted(tmp_path: Path) -> None:
    _write(tmp_path / "test/s_test.csv", " ,a,b,c,d,A\nQ,a,,c,d,A\nQ,a,b,c,d,\nQ,a,b,c,d,B\n")
    _write(tmp_path / "test/empty_test.csv", "")
    empty, part = read_copy("mmlu", tmp_path, name="mmlu")
    assert part.skipped == {"empty question": 1, "empty choice": 1, "no answer": 1} and len(part.rows) == 1
    assert empty.rows == []


@pytest.mark.parametrize(
    ("name", "file", "text", "told"),
    [
        ("mmlu", "test/s_test.csv", "Q,a,b,c,d,A\nQ,a,b,c,d\n", "s_test.csv:2: 5 columns, where 6 are"),
        ("mmlu", "test/s_test.csv", "Q,a,b,c,d,A\nQ,a,b,c,d,E\n", "s_test.csv:2: the answer 'E' is none"),
        ("ceval", "val/s_val.csv", "id,A,B,C,D,answer\n1,a,b,c,d,A\n", "s_val.csv:2: no text under 'quest"),
        ("gsm8k", "main/test.jsonl", '{"question": "q", "answer": "#### 3"}\n{"que', "test.jsonl:2: no JSON"),
        ("gsm8k", "main/test.jsonl", '{"question": "q", "answer": "3"}', "test.jsonl:1: the answer has no"),
        ("gsm8k", "main/test.jsonl", "[1]\n", "test.jsonl:1: a row is a JSON object"),
        ("boolq", "dev.jsonl", '{"question": "q", "passage": "p", "answer": "x"}', "dev.jsonl:1: the answer"),
        ("bbh", "bbh/a.json", '{"rows": []}', "a.json: no list of rows"),
        ("human_eval", "HumanEval.jsonl", '{"task_id": "1", "prompt": "", "test": "", "entry_point": "a b"}',
         "HumanEval.jsonl:1: entry_point 'a b' is no name"),
        ("human_eval", "HumanEval.jsonl.gz", "not gzip", "HumanEval.jsonl.gz: "),
    ],
)  # fmt: skip
def test_a_row_of_another_form_is_a_fault_with_its_line(
    tmp_path: Path, name: str, file: str, text: str, told: str
) -> None:
    _write(tmp_path / file, text)
    with pytest.raises(UserError) as fault:
        read_copy(name, tmp_path, name=name)
    assert told in str(fault.value)


def test_what_is_missing_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no files of mmlu there; wanted are test/SUBJECT_test\.csv"):
        read_parts(Benchmarks(("mmlu",), {"": tmp_path}))
    with pytest.raises(UserError, match=r"--task-data-path .*nowhere: no such folder"):
        read_parts(Benchmarks(("mmlu",), {"": tmp_path / "nowhere"}))
    with pytest.raises(UserError, match="say where its local copy is"):
        read_parts(Benchmarks(("mmlu",)))
    with pytest.raises(UserError, match="--allow-code-execution"):
        read_parts(Benchmarks(("humaneval",), {"": tmp_path}))
    with pytest.raises(UserError, match="--chain-of-thought: hellaswag is asked in one way only"):
        read_parts(Benchmarks(("hellaswag",), {"": tmp_path}, variant="chain_of_thought"))
    with pytest.raises(UserError, match="--eval-language zh"):
        read_parts(Benchmarks(("mmlu",), {"": write_mmlu(tmp_path)}, language="zh"))


def test_python_of_a_folder_of_tasks_wants_a_flag(tmp_path: Path) -> None:
    _write(tmp_path / "mine.yaml", "task: mine\n# no !function here\ndoc_to_text: !function utils.f\n")
    with pytest.raises(UserError, match=r"mine\.yaml:3: !function runs Python"):
        read_parts(Benchmarks(("mine",), task_path=tmp_path))
    assert read_parts(Benchmarks(("mine",), task_path=tmp_path, allow_code=True)) == {}


def test_json_lines_split_at_newlines_only(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"a": "x\u2028y"}\n\n{"a": "z"}\n')
    assert [row["where"][-2:] for row in read_rows(path)] == [":1", ":3"]


def test_needles_lie_at_their_depths() -> None:
    from shardyard.evaluate.tasks.needle import hide

    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(map(ord, text))

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    part = Part("needlebench", [{"text": "One sentence is here. " * 10, "where": "a.txt:1"}])
    short, long = hide(part, Letters(), 2_500, "")
    assert (short.subject, long.subject) == ("1000_tokens", "2000_tokens")
    places = []
    for row in long.rows:
        needle = f"The secret word of the old lighthouse is {row['answer']}."
        assert row["prompt"].count(needle) == 1
        places.append(row["prompt"].index(needle) / len(row["prompt"]))
    assert places == sorted(places) and places[0] < 0.05 and places[-1] > 0.9
    (only,) = hide(part, Letters(), 300, "zh")
    assert only.subject == "150_tokens" and "秘密词语" in only.rows[0]["prompt"]


@pytest.mark.parametrize("answer", ["²", "9" * 5000, "٢", "-1"])
def test_answers_that_are_no_number_of_a_choice(answer: str, tmp_path: Path) -> None:
    _write(tmp_path / "test/x_test.csv", f"Q,a,b,c,d,{answer}\n")
    with pytest.raises(UserError, match=r"x_test.csv:1: the answer .* is none of 4 choices"):
        read_copy("mmlu", tmp_path, name="mmlu")


def test_files_at_the_edge(tmp_path: Path) -> None:
    _write(tmp_path / "m/test/x_test.csv", "Q" * 200_000 + ",a,b,c,d,A\n")
    (long,) = read_copy("mmlu", tmp_path / "m", name="mmlu")
    assert len(long.rows[0]["question"]) == 200_000
    row = {"question": "q", "options": ["x", "y"], "label": 0}
    _write(tmp_path / "a/v1_1/sat-math.jsonl", json.dumps(row))
    (zero,) = read_copy("agieval", tmp_path / "a", name="agieval")
    assert zero.rows[0]["letter"] == "A" and not zero.skipped
    many = {"ctx_a": "a", "ctx_b": "b", "activity_label": "l", "endings": ["e"] * 12, "label": 11}
    _write(tmp_path / "h/hellaswag_val.jsonl", json.dumps(many))
    with pytest.raises(UserError, match="12 choices, where at most 10"):
        read_copy("hellaswag", tmp_path / "h", name="hellaswag")
    _write(tmp_path / "q/dev.jsonl", '{"question": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"dev\.jsonl:1: no JSON"):
        read_copy("boolq", tmp_path / "q", name="boolq")
    _write(tmp_path / "b/bbh/s.json", '{"examples": [{"input": "q", "target": "t"}]}')
    _write(tmp_path / "b/cot-prompts/s.txt", "").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"s\.txt: .*decode"):
        read_copy("bbh", tmp_path / "b", name="bbh")
