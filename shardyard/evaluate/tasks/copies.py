"""Local copies of the public sets: where each has its files, and its rows in one form.

A `Part` is what is scored under one name, a subject. Rows that cannot be scored (an empty question, no
choices, two right answers) are counted, not guessed at; rows of another form are a fault with ``file:line``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardyard.errors import UserError
from shardyard.evaluate.tasks.files import Row, read_rows, text_at, text_of

LETTERS = "ABCDEFGHIJ"


@dataclass
class Part:
    """One subject: rows to score, rows to show as examples, and what was left out, with the reason."""

    subject: str
    rows: list[Row] = field(default_factory=list)
    shots: list[Row] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    prompt: str = ""
    """Of BBH: the published examples with their thoughts."""

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def read_copy(layout: str, folder: Path, *, name: str, language: str = "") -> list[Part]:
    """The parts of a set whose copy lies in ``folder``, or in a folder of it that has the set's name.

    Raises:
        UserError: the files are not there, or a row is at fault.
    """
    read, pattern = _LAYOUTS[layout]
    for home in _homes(folder, name):
        parts = read(home, language)
        if parts:
            return parts
    raise UserError(f"--task-data-path {folder}: no files of {name} there; wanted are {pattern}")


def _homes(folder: Path, name: str) -> list[Path]:
    """The folder itself, and those in it that bear the set's name or are usual inside its archive."""
    if not folder.is_dir():
        raise UserError(f"--task-data-path {folder}: no such folder")
    plain = re.sub(r"[^a-z0-9]", "", name)
    named = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and re.sub(r"[^a-z0-9]", "", entry.name.lower()) in (plain, f"{plain}data", "data")
    ]
    inner = [entry / "data" for entry in named if (entry / "data").is_dir()]
    return [folder, *named, *inner]


def _choice(part: Part, row: Row, question: str, choices: Sequence[str], answer: str, **more: Any) -> None:
    """Add a row with choices, of which ``answer`` is a letter or a number from 0."""
    if not question.strip():
        return part.skip("empty question")
    if not choices or any(not choice.strip() for choice in choices):
        return part.skip("empty choice")
    told = answer.strip()
    if not told:
        return part.skip("no answer")
    index = LETTERS.find(told.upper()) if len(told) == 1 and told.isalpha() else -1
    index = int(told) if re.fullmatch("[0-9]{1,4}", told) else index
    if len(choices) > len(LETTERS):
        raise UserError(f"{row['where']}: {len(choices)} choices, where at most {len(LETTERS)} have a letter")
    if not 0 <= index < len(choices):
        raise UserError(f"{row['where']}: the answer {answer[:40]!r} is none of {len(choices)} choices")
    letters = list(LETTERS[: len(choices)])
    part.rows.append(
        {
            "question": question.strip(),
            "choices": [choice.strip() for choice in choices],
            "answer": index,
            "letters": letters,
            "letter": letters[index],
            "subject": part.subject.replace("_", " "),
            "where": row["where"],
            **more,
        }
    )


def _subjects(
    home: Path, test: str, shots: str, add: Callable[[Part, Row], None], columns: Sequence[str] | None = None
) -> list[Part]:
    """A part for each file that ``test`` finds; ``{}`` stands for the subject in both patterns."""
    parts, known = [], {}
    for path in sorted(home.glob(test.format("*"))):
        subject = re.sub(test.split("/")[-1].format("(.*)") + "$", r"\1", path.name)
        parts.append(known.setdefault(subject, Part(subject)))
        for row in read_rows(path, columns):
            add(known[subject], row)
    examples = {subject: home / shots.format(subject) for subject in known}
    for subject, path in examples.items():
        held = Part(subject)
        for row in read_rows(path, columns) if path.is_file() else []:
            add(held, row)
        known[subject].shots = held.rows
    of_shots_only = [
        re.sub(shots.split("/")[-1].format("(.*)") + "$", r"\1", path.name)
        for path in sorted(home.glob(shots.format("*")))
    ]
    for subject in of_shots_only:
        if parts and subject not in known:
            parts.append(Part(subject, skipped={"subject file missing": 1}))
    return parts


def _four(question: str, answer: str) -> Callable[[Part, Row], None]:
    def add(part: Part, row: Row) -> None:
        choices = [text_of(row, letter) for letter in "ABCD"]
        _choice(part, row, text_of(row, question), choices, text_of(row, answer),
                explanation=str(row.get("explanation") or ""))  # fmt: skip

    return add


def _mmlu(home: Path, language: str) -> list[Part]:
    columns = ("question", *"ABCD", "answer")
    return _subjects(home, "test/{}_test.csv", "dev/{}_dev.csv", _four("question", "answer"), columns)


def _ceval(home: Path, language: str) -> list[Part]:
    return _subjects(home, "val/{}_val.csv", "dev/{}_dev.csv", _four("question", "answer"))


def _cmmlu(home: Path, language: str) -> list[Part]:
    return _subjects(home, "test/{}.csv", "dev/{}.csv", _four("Question", "Answer"))


def _gsm8k(home: Path, language: str) -> list[Part]:
    part, shots = Part("gsm8k"), Part("gsm8k")
    tests = _first(home, "main/test.jsonl", "main/test-*.parquet", "main/test.parquet", "test.jsonl",
                   "test-*.parquet", "gsm8k_test.jsonl", "gsm8k-test.jsonl")  # fmt: skip
    if not tests:
        return []
    trains = _first(home, "main/train.jsonl", "main/train-*.parquet", "main/train.parquet", "train.jsonl",
                    "train-*.parquet", "gsm8k_train.jsonl", "gsm8k-train.jsonl")  # fmt: skip
    for held, paths in ((part, tests), (shots, trains)):
        for row in (row for path in paths for row in read_rows(path)):
            question, solution = text_of(row, "question").strip(), text_of(row, "answer").strip()
            thought, mark, number = solution.rpartition("####")
            if not question or not solution:
                held.skip("empty question" if not question else "no answer")
            elif not mark or not number.strip():
                raise UserError(f"{row['where']}: the answer has no '#### number' at its end")
            else:
                thought = re.sub(r"<<[^<>]*>>", "", thought).strip()
                held.rows.append({"question": question, "thought": thought, "solution": solution,
                                  "answer": number.strip().replace(",", ""), "subject": "gsm8k",
                                  "where": row["where"]})  # fmt: skip
    part.shots = shots.rows
    return [part]


def _boolq(home: Path, language: str) -> list[Part]:
    part, shots = Part("boolq"), Part("boolq")
    tests = _first(home, "dev.jsonl", "val.jsonl", "validation-*.parquet", "data/validation-*.parquet",
                   "boolq_dev.jsonl", "dev.json")  # fmt: skip
    if not tests:
        return []
    trains = _first(home, "train.jsonl", "train-*.parquet", "data/train-*.parquet", "boolq_train.jsonl")
    for held, paths in ((part, tests), (shots, trains)):
        for row in (row for path in paths for row in read_rows(path)):
            answer = row.get("answer", row.get("label"))
            if not isinstance(answer, bool | int):
                raise UserError(f"{row['where']}: the answer is true or false, and this is {answer!r}")
            _choice(held, row, text_of(row, "question"), ["no", "yes"], str(int(answer)),
                    passage=text_of(row, "passage"))  # fmt: skip
    part.shots = shots.rows
    return [part]


def _bbh(home: Path, language: str) -> list[Part]:
    parts = []
    folder = next((home / name for name in ("bbh", "data", "") if any((home / name).glob("*.json"))), None)
    for path in sorted(folder.glob("*.json")) if folder else []:
        part = Part(path.stem)
        for row in read_rows(path):
            question, answer = text_of(row, "input").strip(), text_of(row, "target").strip()
            if not question or not answer:
                part.skip("empty question" if not question else "no answer")
                continue
            part.rows.append({"question": question, "answer": answer, "subject": path.stem.replace("_", " "),
                              "where": row["where"]})  # fmt: skip
        part.prompt = _published_prompt(home, path.stem)
        part.shots = _shots_of_prompt(part.prompt)
        parts.append(part)
    return parts


def _published_prompt(home: Path, subject: str) -> str:
    """The text of cot-prompts/SUBJECT.txt below its canary; "" without one."""
    for base in (home, home.parent):
        path = base / "cot-prompts" / f"{subject}.txt"
        if path.is_file():
            text = text_at(path)
            return text.split("-----\n", 1)[-1].strip()
    return ""


def _shots_of_prompt(prompt: str) -> list[Row]:
    """Questions, thoughts and answers of a published prompt."""
    found = re.findall(r"^Q: (.*?)\nA: (.*?)(?=\n\nQ: |\Z)", prompt, re.S | re.M)
    rows = []
    for question, thought in found:
        answer = re.search(r"[Tt]he answer is (.*?)\.?\s*\Z", thought.strip(), re.S)
        if answer:
            rows.append({"question": question.strip(), "thought": thought.strip(), "answer": answer[1]})
    return rows


_CHINESE = re.compile(r"gaokao|logiqa-zh|jec-qa")


def _agieval(home: Path, language: str) -> list[Part]:
    parts = []
    names = ("v1_1", "v1", "data/v1_1", "data/v1", "")
    folder = next((home / name for name in names if any((home / name).glob("*.jsonl"))), None)
    for path in sorted(folder.glob("*.jsonl")) if folder else []:
        is_chinese = bool(_CHINESE.search(path.stem))
        if language and is_chinese != (language == "zh"):
            continue
        part = Part(path.stem)
        for row in read_rows(path):
            _agieval_row(part, row, is_chinese)
        parts.append(part)
    return parts


def _agieval_row(part: Part, row: Row, is_chinese: bool) -> None:
    question = "\n".join(text for key in ("passage", "question") if (text := str(row.get(key) or "").strip()))
    options, label = row.get("options"), row.get("label")
    if options:
        if not isinstance(options, list):
            raise UserError(f"{row['where']}: options are a list, and this is {str(options)[:40]!r}")
        if isinstance(label, list):
            if len(label) != 1:
                return part.skip("more than one right answer")
            label = label[0]
        choices = [re.sub(r"^\s*\(?[A-J]\)[.:]?\s*", "", str(option)) for option in options]
        return _choice(
            part,
            row,
            question,
            choices,
            "" if label is None else str(label),
            kind="choice",
            chinese=is_chinese,
        )
    if isinstance(options, list) and row.get("answer") is None:
        return part.skip("empty choice")
    answer = str(row.get("answer") or "").strip()
    if not question or not answer:
        return part.skip("empty question" if not question else "no answer")
    part.rows.append({"question": question, "answer": answer, "kind": "cloze", "chinese": is_chinese,
                      "subject": part.subject, "where": row["where"]})  # fmt: skip


def _humaneval(home: Path, language: str) -> list[Part]:
    paths = _first(home, "HumanEval.jsonl.gz", "HumanEval.jsonl", "human-eval-*.jsonl", "humaneval*.jsonl",
                   "human_eval*.jsonl", "test-*.parquet", "openai_humaneval/test-*.parquet")  # fmt: skip
    part = Part("human_eval")
    for row in (row for path in paths for row in read_rows(path)):
        fields = {key: text_of(row, key) for key in ("task_id", "prompt", "test", "entry_point")}
        if not fields["entry_point"].isidentifier():
            raise UserError(f"{row['where']}: entry_point {fields['entry_point']!r} is no name of a function")
        part.rows.append({**fields, "answer": str(row.get("canonical_solution") or ""),
                          "subject": "human_eval", "where": row["where"]})  # fmt: skip
    return [part] if paths else []


def _hellaswag(home: Path, language: str) -> list[Part]:
    tests = _first(home, "hellaswag_val.jsonl", "data/validation-*.parquet", "validation-*.parquet")
    trains = _first(home, "hellaswag_train.jsonl", "data/train-*.parquet", "train-*.parquet")
    part, shots = Part("hellaswag"), Part("hellaswag")
    for held, paths in ((part, tests), (shots, trains)):
        for row in (row for path in paths for row in read_rows(path)):
            endings = row.get("endings", row.get("ending_options"))
            if not isinstance(endings, list):
                raise UserError(f"{row['where']}: endings are a list of texts")
            context = f"{text_of(row, 'activity_label')}: {text_of(row, 'ctx_a')} " + (
                text_of(row, "ctx_b").capitalize()
            )
            choices = [_clean(str(ending)) for ending in endings]
            _choice(held, row, _clean(context), choices, str(row.get("label", "")))
    part.shots = shots.rows
    return [part] if tests else []


def _clean(text: str) -> str:
    """Without WikiHow's marks, which the set was scraped with."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(r" +", " ", text).strip()


def _first(home: Path, *patterns: str) -> list[Path]:
    """The files of the first pattern that finds some."""
    return next((found for pattern in patterns if (found := sorted(home.glob(pattern)))), [])


def _needlebench(home: Path, language: str) -> list[Part]:
    from shardyard.evaluate.tasks.needle import read_haystack

    return read_haystack(home, language)


_LAYOUTS: dict[str, tuple[Callable[[Path, str], list[Part]], str]] = {
    "mmlu": (_mmlu, "test/SUBJECT_test.csv, and dev/SUBJECT_dev.csv for examples"),
    "ceval": (_ceval, "val/SUBJECT_val.csv, and dev/SUBJECT_dev.csv for examples"),
    "cmmlu": (_cmmlu, "test/SUBJECT.csv, and dev/SUBJECT.csv for examples"),
    "gsm8k": (_gsm8k, "main/test.jsonl (or test-*.parquet), and main/train.jsonl for examples"),
    "boolq": (_boolq, "dev.jsonl, and train.jsonl for examples"),
    "bbh": (_bbh, "bbh/SUBJECT.json, and cot-prompts/SUBJECT.txt for examples"),
    "agieval": (_agieval, "v1/SUBJECT.jsonl or v1_1/SUBJECT.jsonl"),
    "human_eval": (_humaneval, "HumanEval.jsonl or HumanEval.jsonl.gz"),
    "hellaswag": (_hellaswag, "hellaswag_val.jsonl, and hellaswag_train.jsonl for examples"),
    "needlebench": (_needlebench, "texts to hide a needle in: *.txt, or *.jsonl with rows of text"),
}


def skipped_lines(task: str, parts: Iterable[Part]) -> list[str]:
    """What was left out, in words, one line a reason."""
    counts: dict[str, int] = {}
    for part in parts:
        for reason, number in part.skipped.items():
            counts[reason] = counts.get(reason, 0) + number
    return [f"{task}: {number} left out: {reason}" for reason, number in counts.items()]
