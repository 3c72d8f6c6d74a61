"""Datasets by name, file, folder and glob; their rows in the same order, whatever the file's quirks."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard.data.sources import DatasetEntry, iter_rows, iter_texts, resolve_datasets
from shardyard.errors import UserError

ROW = {"instruction": "q", "input": "", "output": "r"}


def entry(dataset: Any, folder: Path) -> DatasetEntry:
    (only,) = resolve_datasets(dataset, str(folder))
    return only


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_rows(path: Path, *names: str) -> Path:
    return write(path, "".join(json.dumps({**ROW, "instruction": name}) + "\n" for name in names))


def prompts(of: DatasetEntry) -> list[str]:
    return [row.data["instruction"] for row in iter_rows(of)]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


# Naming


def test_shipped_registry_names_the_references_three_datasets() -> None:
    registry = Path(__file__).parents[2] / "configs/fsdp2/data/dataset_info.json"
    known = json.loads(registry.read_text(encoding="utf-8"))
    assert known["sharegpt4_zh"] == {"file_name": "sharegpt_zh_38K_format.jsonl", "formatting": "sharegpt"}
    assert known["alpaca_full"]["file_name"] == "train-00000-of-00001-a09b74b3ef9c3b56.parquet"
    assert known["distill_r1_110k_sft_mix"]["columns"]["response"] == "output"


def test_names_come_from_the_registry_as_a_comma_text_or_a_list(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", "a")
    write_rows(tmp_path / "b.jsonl", "b")
    info = {"aa_one": {"file_name": "a.jsonl"}, "aa_two": {"file_name": "b.jsonl", "num_samples": 1}}
    write(tmp_path / "dataset_info.json", "\ufeff" + json.dumps(info))
    for dataset in ("aa_one,aa_two", " aa_one , aa_two ", ["aa_one", "aa_two"], ("aa_one", "aa_two")):
        entries = resolve_datasets(dataset, str(tmp_path))
        assert [(e.name, prompts(e)) for e in entries] == [("aa_one", ["a"]), ("aa_two", ["b"])]


def test_an_unknown_name_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path / "dataset_info.json", '{"alpaca_full": {"file_name": "x.json"}}')
    with pytest.raises(UserError, match=r"'alpaca_ful' is neither .* did you mean 'alpaca_full'"):
        resolve_datasets("alpaca_ful", str(tmp_path))
    with pytest.raises(UserError, match="there is no such file"):
        resolve_datasets("alpaca_ful", str(tmp_path / "none"))


def test_a_file_is_looked_for_absolute_then_beside_the_registry_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_rows(here / "x.jsonl", "here")
    write_rows(here / "only.jsonl", "only here")
    write_rows(there / "x.jsonl", "there")
    monkeypatch.chdir(here)
    assert prompts(entry("x.jsonl", there)) == ["there"]
    assert prompts(entry({"file_name": "only.jsonl"}, there)) == ["only here"]
    assert prompts(entry(str(here / "x.jsonl"), there)) == ["here"]


def test_a_folder_is_all_its_files_sorted_without_hidden_and_temporary_ones(tmp_path: Path) -> None:
    for name in ("b", "a", "10", "2", ".a.swp"):
        write_rows(tmp_path / "d" / f"{name}.jsonl", name)
    for other in ("_SUCCESS", ".hidden.jsonl", "README.md", "x.jsonl.tmp", "~x.jsonl", "_part.jsonl"):
        write(tmp_path / "d" / other, "no rows")
    assert prompts(entry("d", tmp_path)) == ["10", "2", "a", "b"]


def test_several_files_and_globs_keep_their_order_and_no_file_comes_twice(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_rows(tmp_path / f"sub/{name}.jsonl", name)
    assert prompts(entry({"file_name": ["sub/c.jsonl", "sub/*.jsonl"]}, tmp_path)) == ["c", "a", "b"]
    assert prompts(entry("**/[ab].jsonl", tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"file_name": "none.jsonl"}, "no such file or folder: none.jsonl in"),
        ("*.jsonl", "glob matches none of the json, jsonl, csv, parquet and arrow"),
        ("folder", "folder holds none|holds none of the json"),
        ("zero.jsonl", r"zero.jsonl is empty \(0 bytes\)"),
        ("x.parquet.gz", "has no type that is read"),
        ("x.bin", "neither a file|no type that is read"),
        ({"file_name": ["x.json", "x.txt"]}, "must be of one type, found .*x.json, .*x.txt"),
        ({"file_nam": "x.json"}, "unknown key 'file_nam'; did you mean 'file_name'"),
        ({"hf_hub_url": ["a/b"]}, "hf_hub_url: must be the name of one repository"),
        ({"script_url": "x.py"}, "scripts run code and are not read"),
        ({"formatting": "alpaca"}, "no file_name"),
        ({"file_name": "x.json", "formatting": "chatml"}, "'chatml' is not one of alpaca, sharegpt, openai"),
        ({"file_name": "x.json", "ranking": "yes"}, "ranking: must be true or false, found 'yes'"),
        (
            {"file_name": "x.json", "ranking": True, "columns": {"rejected": None}},
            "columns.rejected: null, but ranking: true needs this column",
        ),
        ({"file_name": "x.json", "subset": "en"}, "subset: is for data sets of a hub, not for file_name"),
        ({"file_name": "x.json", "split": 3}, "split: must be a name, found 3"),
        ({"cloud_file_name": "http://x/a.json"}, "must begin with one of s3://, gs://, gcs://; found 'http:"),
        ({"cloud_file_name": [3]}, "cloud_file_name: must be a name or a list of names"),
        ({"file_name": "x.json", "num_samples": 0}, "num_samples: must be a whole number from 1"),
        ({"file_name": "x.json", "num_samples": True}, "num_samples: must be a whole number from 1"),
        ({"file_name": "x.json", "columns": {"promt": "q"}}, "unknown key 'promt'; did you mean 'prompt'"),
        ({"file_name": "x.json", "columns": "q"}, "must be a mapping of names"),
        ({"file_name": "x.json", "tags": {"user_tag": 3}}, "tags.user_tag: must be a text, found 3"),
        ({"file_name": "x.json", "split": "test"}, "split: 'test': file_name has the split 'train' only"),
        ({"file_name": 3}, "file_name: must be a path"),
        ({}, "nothing to train on"),
        ("", "nothing to train on"),
        (None, "nothing to train on"),
        ([3], "must name datasets or files, found 3"),
    ],
)
def test_a_wrong_entry_gets_one_clear_message(dataset: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "zero.jsonl", "")
    for name in ("x.parquet.gz", "x.json", "x.txt", "x.bin"):
        write(tmp_path / name, "x")
    if dataset == "*.jsonl":
        (tmp_path / "zero.jsonl").unlink()
    with pytest.raises(UserError, match=message) as caught:
        resolve_datasets(dataset, str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("{", ":1: not valid JSON"), ("[]", "must be an object")])
def test_a_broken_registry_is_refused(content: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "dataset_info.json", content)
    with pytest.raises(UserError, match=f"dataset_info.json.*{message}|dataset_info.json{message}"):
        resolve_datasets("x", str(tmp_path))


# Columns


def test_an_unlisted_column_keeps_its_default_and_the_user_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"instruction": "i", "input": "x", "q": "p", "a": "r"}
    write(tmp_path / "a.jsonl", f"{json.dumps(row)}\n" * 3)
    for columns, told in (
        ({"prompt": "q", "response": "a"}, 1),
        ({"prompt": "q", "response": "a", "query": None}, 0),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardyard.data"):
            of = entry({"file_name": "a.jsonl", "columns": columns, "num_samples": 2}, tmp_path)
            assert len(list(iter_rows(of))) == 2
        assert of.columns.query == ("input" if told else None)
        assert caplog.text.count("does not list query") == told


@pytest.mark.parametrize("columns", [{"tools": "t", "system": "s", "history": "h"}, {"messages": "m"}, None])
def test_optional_columns_may_be_missing(columns: dict[str, str] | None, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", "a")
    given = {"file_name": "a.jsonl"} | ({"columns": columns} if columns else {})
    assert prompts(entry(given, tmp_path)) == ["a"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_without_the_conversations_columns_is_refused_with_those_it_has(
    kind: str, tmp_path: Path
) -> None:
    rows = [{"question": "q", "answer": "r"}]
    if kind == "parquet":
        write_parquet(tmp_path / "a.parquet", rows)
    else:
        write(tmp_path / "a.jsonl", json.dumps(rows[0]))
    for named, key in (
        ({}, "response"),
        ({"columns": {"response": "answer"}}, "prompt"),
        ({"formatting": "openai"}, "messages"),
    ):
        with pytest.raises(UserError, match=f"needs the column '{key}'.* found: answer, question"):
            list(iter_rows(entry({"file_name": f"a.{kind}", **named}, tmp_path)))


# Reading


LINES = [{**ROW, "instruction": "a\u2028b\u0085c"}, {**ROW, "instruction": "é中😀"}, {**ROW, "x": None}]


def as_jsonl(rows: list[dict[str, Any]], end: str = "\n") -> str:
    return end.join(json.dumps(row, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_jsonl(LINES)),
        ("a.jsonl", "\ufeff" + as_jsonl(LINES) + "\n"),
        ("a.jsonl", as_jsonl(LINES, "\r\n") + "\r\n"),
        ("a.jsonl", "\n \t\n" + as_jsonl(LINES, "\n\n") + "\n\n  "),
        ("a.json", json.dumps(LINES)),
        ("a.json", "\ufeff \n" + json.dumps(LINES, indent=2, ensure_ascii=False) + "\n\n"),
        ("a.json", json.dumps(LINES, indent=1).replace("\n", "\r\n")),
        ("a.json", as_jsonl(LINES)),
        ("A.JSONL", as_jsonl(LINES)),
    ],
)
def test_the_same_rows_come_out_of_every_spelling(name: str, content: str, tmp_path: Path) -> None:
    write(tmp_path / name, content)
    assert [row.data for row in iter_rows(entry(name, tmp_path))] == LINES


def test_rows_know_their_line(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_jsonl(LINES, "\n\n"))
    write(tmp_path / "a.json", json.dumps(LINES, indent=1))
    write_parquet(tmp_path / "a.parquet", [ROW, ROW])
    of_lines = [row.where for row in iter_rows(entry("a.jsonl", tmp_path))]
    assert of_lines == [f"{tmp_path / 'a.jsonl'}:{line}" for line in (1, 3, 5)]
    of_array = [row.where for row in iter_rows(entry("a.json", tmp_path))]
    assert of_array == [f"{tmp_path / 'a.json'}:{line}" for line in (2, 7, 12)]
    of_parquet = [row.where for row in iter_rows(entry("a.parquet", tmp_path))]
    assert of_parquet == [f"{tmp_path / 'a.parquet'}:row {number}" for number in (1, 2)]


GOOD = json.dumps(ROW)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            f"{GOOD}\n{GOOD}\n" + '{"text":"a"}{"text":"b"}\n{"text":\n' + GOOD,
            "a.jsonl:3: not valid JSON",
        ),
        ("a.jsonl", f"{GOOD}\n\n" + '{"text":\n', "a.jsonl:3: not valid JSON"),
        ("a.jsonl", f"{GOOD}\n[1]\n", "a.jsonl:2: a row must be an object with named columns, found list"),
        ("a.jsonl", f"{GOOD}\n".encode() + b'{"instruction": "\xff"}\n', "a.jsonl:2: not UTF-8"),
        ("a.jsonl", f"{GOOD}\n" + "[" * 200_000, "a.jsonl:2: (the row is nested too deeply|not valid JSON)"),
        ("a.json", f"[{GOOD},\n{GOOD}", "a.json:2: not valid JSON: ',' or ']' must follow"),
        ("a.json", f"[{GOOD},\n {{]", "a.json:2: not valid JSON"),
        ("a.json", f"[{GOOD},\n]", "a.json:2: not valid JSON"),
        ("a.json", f"[{GOOD}]\n[]", "a.json:1: not valid JSON: something follows"),
        ("a.json", f"[{GOOD},\n3]", "a.json:2: a row must be an object"),
        ("a.json", GOOD.encode("utf-16"), "a.json:1: not UTF-8"),
        ("a.json", "[]", "no rows in"),
        ("a.jsonl", "\n \n", "no rows in"),
        ("a.parquet", "no parquet", "a.parquet: not a readable parquet file"),
        ("a.txt", "text", "txt files hold text for pretraining"),
    ],
)
def test_a_malformed_file_stops_with_its_line(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    write(tmp_path / name, content)
    with pytest.raises(UserError, match=message) as caught:
        list(iter_rows(entry(name, tmp_path)))
    assert "\n" not in str(caught.value)


def test_no_schema_is_inferred(tmp_path: Path) -> None:
    calls = [{"instruction": "q", "output": "r", "arguments": {"n": n}} for n in ("two", 2, [2])]
    late = [*calls, *[{"instruction": "q", "output": "r", "note": None}] * 2000, {**ROW, "note": "x"}]
    write(tmp_path / "a.jsonl", as_jsonl(late))
    assert [row.data for row in iter_rows(entry("a.jsonl", tmp_path))] == late


def test_parquet_files_may_disagree_and_struct_fields_of_other_rows_do_not_appear(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]
    one = [{"id": 1, "conversations": talk, "tools": [{"name": "f", "a": 1}, {"name": "g", "b": None}]}]
    two = [{"id": "x", "conversations": talk, "tools": "[]"}]
    write_parquet(tmp_path / "d1.parquet", one)
    write_parquet(tmp_path / "d2.parquet", two)
    of = entry({"file_name": "d*.parquet", "formatting": "sharegpt", "columns": {"tools": "tools"}}, tmp_path)
    assert [row.data for row in iter_rows(of)] == [
        {"conversations": talk, "tools": [{"name": "f", "a": 1}, {"name": "g"}]},
        {"conversations": talk, "tools": "[]"},
    ]


@pytest.mark.parametrize("wanted", [1, 3, 7, 10, 25])
def test_num_samples_takes_rows_evenly_in_file_order_and_the_same_ones_each_time(
    wanted: int, tmp_path: Path
) -> None:
    names = [f"{i}" for i in range(10)]
    write_rows(tmp_path / "a.jsonl", *names)
    of = entry({"file_name": "a.jsonl", "num_samples": wanted}, tmp_path)
    taken = prompts(of)
    assert len(taken) == wanted and taken == prompts(of) == sorted(taken, key=int)
    assert set(Counter(taken).values()) <= {wanted // 10, -(-wanted // 10)}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=6)
BREAKS = st.lists(st.sampled_from(["", " ", "\t", "\r"]), max_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    bom=st.booleans(),
    ascii_only=st.booleans(),
    last_line_end=st.booleans(),
    breaks=BREAKS,
    array=st.booleans(),
)
def test_fuzz_any_rows_come_back_as_they_were_written(
    rows: list[dict[str, Any]],
    bom: bool,
    ascii_only: bool,
    last_line_end: bool,
    breaks: list[str],
    array: bool,
    tmp_path: Path,
) -> None:
    rows = [{**ROW, **row, "output": "r", "instruction": "q"} for row in rows]
    written = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    between = "\n".join(["", *breaks, ""])
    text = f"[{(',' + between).join(written)}]" if array else between.join(written)
    content = ("\ufeff" if bom else "") + text + ("\n" if last_line_end else "")
    path = tmp_path / ("a.json" if array else "a.jsonl")
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    try:
        found = [row.data for row in iter_rows(entry(str(path), tmp_path))]
    except UserError as error:
        assert any("\ud800" <= c <= "\udfff" for c in content) and "not UTF-8" in str(error)
    else:
        assert found == rows


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60) | st.text('[]{}",:\\ntrue 1e\n', max_size=60).map(str.encode),
    kind=st.sampled_from(["json", "jsonl", "parquet"]),
)
def test_fuzz_garbage_is_rows_or_one_message(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    try:
        list(iter_rows(entry(str(path), tmp_path)))
    except UserError as error:
        assert re.search(r"a\.(json|jsonl|parquet)", str(error))


# Pretraining texts


def test_texts_come_from_the_text_column_or_the_lines(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_jsonl([{"text": "one"}, {"text": None}, {"text": ""}]))
    write_parquet(tmp_path / "a.parquet", [{"text": "one", "other": 1}])
    write(tmp_path / "a.txt", "\ufeffone\u2028two\r\n\n  \n three ")
    found = {name: list(iter_texts(entry(name, tmp_path))) for name in ("a.jsonl", "a.parquet", "a.txt")}
    assert found["a.jsonl"] == [
        (text, f"{tmp_path / 'a.jsonl'}:{i}") for i, text in enumerate(["one", "", ""], 1)
    ]
    assert found["a.parquet"] == [("one", f"{tmp_path / 'a.parquet'}:row 1")]
    assert found["a.txt"] == [
        ("one\u2028two", f"{tmp_path / 'a.txt'}:1"),
        (" three ", f"{tmp_path / 'a.txt'}:4"),
    ]


@pytest.mark.parametrize("key", ["text", "prompt"])
def test_columns_name_another_text_column(key: str, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_jsonl([{"body": "one"}]))
    of = entry({"file_name": "a.jsonl", "columns": {key: "body"}}, tmp_path)
    assert [text for text, _ in iter_texts(of)] == ["one"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_without_the_text_column_is_refused_with_its_columns(kind: str, tmp_path: Path) -> None:
    rows = [{"title": "t", "body": "b"}]
    if kind == "parquet":
        write_parquet(tmp_path / "a.parquet", rows)
    else:
        write(tmp_path / "a.jsonl", as_jsonl(rows))
    with pytest.raises(UserError, match=r"no column 'text'.* found: body, title"):
        list(iter_texts(entry(f"a.{kind}", tmp_path)))


def test_a_text_of_another_type_stops_with_its_line(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_jsonl([{"text": "one"}, {"text": ["two"]}]))
    with pytest.raises(UserError, match=r"a\.jsonl:2: column 'text' must hold text, found list"):
        list(iter_texts(entry("a.jsonl", tmp_path)))
