"""``shardyard data``: a user's mistakes end in one message and exit code 2."""

from __future__ import annotations

import pytest
from data_verb.runs import Folder, pair

from shardyard.cli.words import take_flag, take_number, take_numbers, take_text
from shardyard.errors import UserError


def test_without_a_usable_row_the_reasons_are_a_table(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder.rows("a.jsonl", [pair("q", ""), pair("p", ""), {"instruction": "r", "output": None}])
    path = folder.config(dataset={"file_name": file})
    for job in ("report", "preview"):
        fault = folder.refused(capsys, job, path)
        assert fault.startswith("data.dataset: none of the 3 rows became a sample\n")
        assert f"3 (first: {file}:1)" in fault
    assert not list((folder.path / "cache" / "tokenized").glob("*/manifest.json"))


def test_rows_that_are_all_prompt_within_the_cut_off(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", [pair("q" * 100, "a")])}, cutoff_len=30)
    fault = folder.refused(capsys, "report", path)
    assert "none of the 1 rows became a sample" in fault and "no trained token" in fault


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("empty.jsonl", "", "empty.jsonl is empty (0 bytes)"),
        ("bad.jsonl", '{"instruction": 1\n', "bad.jsonl:1: not valid JSON"),
    ],
)
def test_input_that_cannot_be_read(
    name: str, content: str, part: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / name).write_text(content, encoding="utf-8")
    fault = folder.refused(capsys, "report", folder.config(dataset={"file_name": str(folder.path / name)}))
    assert part in fault and "\n" not in fault


def test_missing_things_are_named(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", [pair("q", "a")])})
    gone = str(folder.path / "gone")
    fault = folder.refused(capsys, "report", path, "--model.tokenizer_name_or_path", gone)
    assert fault == f"model.tokenizer_name_or_path: no such folder: {gone}"
    fault = folder.refused(capsys, "report", path, "--data.dataset", f"{gone}.jsonl")
    assert f"{gone}.jsonl" in fault and "\n" not in fault
    assert "no_such_file.yaml" in folder.refused(capsys, "report", "no_such_file.yaml")
    assert "no configuration given" in folder.refused(capsys, "preview")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("reprot",), "'reprot' is not report or preview"),
        (("report", "RUN", "--world-size", "0"), "--world-size 0: a whole number from 1 on"),
        (("report", "RUN", "--world-size"), "--world-size needs a value"),
        (("report", "RUN", "--windows", "2"), "--windows: only a stream has windows"),
        (("preview", "RUN", "--index"), "--index: whole numbers from 0 on are wanted"),
        (("preview", "RUN", "--index", "-1"), "--index -1: whole numbers from 0 on are wanted"),
        (("preview", "RUN", "--index", "2"), "--index 2: there are samples 0 to 1"),
        (("preview", "RUN", "--longest", "few"), "--longest few: a whole number from 1 on"),
        (("preview", "RUN", "--longst", "2"), "longst"),
        (("report", "RUN", "--data.cutof_len", "2"), "did you mean"),
        (("report", "RUN", "--parallel.fsdp_size", "3", "--world-size", "4"), "4"),
    ],
)
def test_wrong_words(
    words: tuple[str, ...], part: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.config(dataset={"file_name": folder.rows("a.jsonl", [pair("q", "a"), pair("q", "b")])})
    fault = folder.refused(capsys, *(path if word == "RUN" else word for word in words))
    assert part in fault


def test_options_are_taken_out_of_the_words() -> None:
    words = [
        "a.yaml",
        "--index",
        "3",
        "4,5",
        "b=1",
        "--json",
        "--index=6",
        "--n",
        "7",
        "--n=8",
        "--source",
        "x",
    ]
    assert take_numbers(words, "--index") == [3, 4, 5, 6]
    assert take_flag(words, "--json") and not take_flag(words, "--json")
    assert take_number(words, "--n", default=1) == 8 and take_number(words, "--n", default=1) == 1
    assert take_text(words, "--source") == "x" and take_text(words, "--source") is None
    assert words == ["a.yaml", "b=1"]
    with pytest.raises(UserError, match=r"--n 1\.5"):
        take_number(["--n", "1.5"], "--n", default=1)
