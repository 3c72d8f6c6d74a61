"""Every kind of file x compression: the same rows, the same places, skipped rows, and rows that are bad."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard.data.sources import (
    BadRow,
    DatasetEntry,
    count_entry_rows,
    count_rows,
    file_type,
    iter_rows,
    iter_texts,
    read_rows,
    resolve_datasets,
    text_lines,
)
from shardyard.errors import UserError

Texts = list[dict[str, str | None]]

ROWS: Texts = [
    {"instruction": "é中😀", "input": None, "output": 'a "quoted", text', "text": "one"},
    {"instruction": "two\nlines\r\nin it", "input": "x", "output": "\u2028 \u0085 \x1c", "text": "two"},
    {"instruction": "q", "input": "null", "output": "[1]", "text": "  three  "},
    {"instruction": "r" * 200_000, "input": ",;\t", "output": "NaN", "text": "\ufeff"},
]


def as_jsonl(rows: Texts) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_json(rows: Texts) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def as_csv(rows: Texts, end: str = "\r\n") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator=end)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: Texts) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table(rows), sink, row_group_size=3)
    return sink.getvalue().to_pybytes()


def as_arrow_file(rows: Texts) -> bytes:
    return as_arrow(rows, pyarrow.ipc.new_file)


def as_arrow_stream(rows: Texts) -> bytes:
    return as_arrow(rows, pyarrow.ipc.new_stream)


def as_arrow(rows: Texts, opens: Callable[..., Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    whole = table(rows)
    with opens(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def table(rows: Texts) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(
        rows, schema=pyarrow.schema({name: pyarrow.string() for name in rows[0]})
    )


TEXT_KINDS = {".json": as_json, ".jsonl": as_jsonl, ".csv": as_csv}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".GZ": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
KINDS: dict[str, Callable[[Texts], bytes]] = {
    f"a{kind}{packed}": lambda rows, write=write, pack=pack: pack(write(rows))
    for kind, write in TEXT_KINDS.items()
    for packed, pack in COMPRESSIONS.items()
} | {"a.parquet": as_parquet, "a.arrow": as_arrow_file, "b.arrow": as_arrow_stream}


def entry(path: Path, **keys: Any) -> DatasetEntry:
    (only,) = resolve_datasets({"file_name": str(path), **keys}, str(path.parent))
    return only


def written(folder: Path, name: str, rows: Texts = ROWS) -> Path:
    path = folder / name
    path.write_bytes(KINDS[name](rows))
    return path


def wanted(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("instruction", "input", "output")}


# The same rows


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_rows_that_were_written(name: str, tmp_path: Path) -> None:
    of = entry(written(tmp_path, name))
    assert of.suffix == file_type(of.files[0]) == re.findall(r"\.\w+", name)[0]
    assert [wanted(row.data) for row in iter_rows(of)] == [wanted(row) for row in ROWS]
    assert [text for text, _ in iter_texts(of)] == [row["text"] for row in ROWS]
    assert count_entry_rows(of) == len(ROWS)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.csv.zst", "b.arrow"])
def test_rows_know_where_they_stand(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    places = {".jsonl": [":1", ":2", ":3", ":4"], ".csv": [":2", ":3", ":6", ":7"]}  # two has three lines
    rows = places.get(file_type(path), [":row 1", ":row 2", ":row 3", ":row 4"])
    assert [row.where for row in iter_rows(entry(path))] == [f"{path}{place}" for place in rows]


@pytest.mark.parametrize("packed", COMPRESSIONS)
def test_compressed_lines_of_text_are_the_lines_within(packed: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(COMPRESSIONS[packed]("\ufeffone\u2028\r\n\n \u3000\n\x1c\n two ".encode()))
    assert list(iter_texts(entry(path))) == [("one\u2028", f"{path}:1"), (" two ", f"{path}:5")]
    assert list(text_lines(path, skip=1)) == [(" two ", f"{path}:5")] and count_rows(path) == 2


SPELLINGS: dict[str, list[tuple[str, bytes]]] = {
    "csv": [
        ("clean", as_csv(ROWS)),
        ("unix line ends", as_csv(ROWS, "\n")),
        ("byte order mark", b"\xef\xbb\xbf" + as_csv(ROWS)),
        ("no final line end", as_csv(ROWS).removesuffix(b"\r\n")),
        ("blank lines", b"\n  \r\n" + as_csv(ROWS).replace(b"\r\nq,", b"\r\n\r\n \t\r\nq,") + b"\r\n\n"),
    ],
    "json": [
        ("on one line", json.dumps(ROWS).encode()),
        ("byte order mark and space", b"\xef\xbb\xbf \r\n\t" + as_json(ROWS) + b"\n \n"),
        ("a line each", as_jsonl(ROWS)),
        ("space of more than a chunk", b" \n" * 600_000 + as_json(ROWS)),
        ("a line each, after such space", b" \n" * 600_000 + as_jsonl(ROWS)),
    ],
}


@pytest.mark.parametrize(
    ("kind", "number"), [(k, n) for k, all_of in SPELLINGS.items() for n in range(len(all_of))]
)
def test_the_same_rows_come_out_of_every_spelling_of_a_kind(kind: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(SPELLINGS[kind][number][1])
    assert [row.data for row in iter_rows(entry(path))] == ROWS


def test_an_array_is_the_same_whatever_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [-1.5e-300, 12, '😀 \\ " \u2028', True, None, [], {}, [[{"é": "中"}]]]
    rows = [{"a": value, "b": 1e308} for value in values]
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(rows, indent=1).encode())
    expected = [(row, f"{path}:{line}") for row, line in zip(rows, lines_of_rows(path), strict=True)]
    for chunk in (1, 2, 3, 7, 64):
        monkeypatch.setattr("shardyard.data.sources.json_rows.CHUNK", chunk)
        assert [(row.data, row.where) for row in read_rows(path, ())] == expected


def lines_of_rows(path: Path) -> list[int]:
    """An object that begins a row stands one space in."""
    return [number for number, line in enumerate(path.read_text().split("\n"), 1) if line.startswith(" {")]


@pytest.mark.parametrize("chunk", [1, 3, 2**20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n {"a": tru}]', r"a\.json:2: not valid JSON: Expecting value \(column 8\)"),
        ('[{"a": "x\ny"}]', r"a\.json:1: not valid JSON: Invalid control character at \(column 10\)"),
        ('[{"a": 1},\n\n  {"a": "cut of', r"a\.json:3: not valid JSON: Unterminated string .*\(column 9\)"),
        ('[{"a": 1}\n {"a": 2}]', r"a\.json:2: not valid JSON: ',' or '\]' must follow"),
        ('[{"a": 1},\n 123', r"a\.json:2: a row must be an object with named columns, found int"),
        ('[{"a": 1}]\n{"a": 2}', r"a\.json:1: not valid JSON: something follows"),
        ('[{"a": 1}, {"a": "\\q"}]', r"a\.json:1: not valid JSON: Invalid \\escape.*\(column 19\)"),
    ],
)
def test_a_fault_in_an_array_is_told_the_same_whatever_is_read_at_a_time(
    content: str, message: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.data.sources.json_rows.CHUNK", chunk)
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_rows(tmp_path / "a.json", ()))


def test_bytes_that_are_not_utf8_are_told_by_their_place_in_an_array(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf[{"a": "' + b"x" * 3_000_000 + b'\xff"}]'
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.json: not UTF-8 text .*at byte {content.index(0xFF, 4)}\)"):
        list(read_rows(tmp_path / "a.json", ()))


# Skipping


@pytest.mark.parametrize("name", [*KINDS, "two files", "drawn", "drawn twice"])
def test_skipping_gives_the_rest_of_the_rows(name: str, tmp_path: Path) -> None:
    rows = [{**ROWS[0], "instruction": f"{number}", "text": f"{number}"} for number in range(7)]
    if name in KINDS:
        of = entry(written(tmp_path, name, rows))
    else:
        paths = [str(written(tmp_path, file, rows)) for file in ("a.arrow", "b.arrow")]
        drawn = {"drawn": {"num_samples": 5}, "drawn twice": {"num_samples": 33}}.get(name, {})
        (of,) = resolve_datasets({"file_name": paths, **drawn}, str(tmp_path))
    everything = list(iter_rows(of))
    for skip in range(len(everything) + 2):
        assert list(iter_rows(of, skip)) == everything[skip:]
        if of.num_samples is None:
            assert list(iter_texts(of, skip)) == list(iter_texts(of))[skip:]
    assert [count_rows(file) for file in of.files] == [7] * len(of.files)


def test_skipped_lines_and_row_groups_are_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"not json\n \n\xff\n" + as_jsonl(ROWS[:1]))
    assert [row.where[-2:] for row in read_rows(tmp_path / "a.jsonl", (), skip=2)] == [":4"]
    assert count_rows(tmp_path / "a.jsonl") == 3
    path = written(tmp_path, "a.parquet")
    content = bytearray(path.read_bytes())
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(3)
    begin, length = column.dictionary_page_offset, column.total_compressed_size
    content[begin : begin + length] = b"\xff" * length
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: broken after row 0"):
        list(read_rows(path, {"text"}))
    assert [row.data for row in read_rows(path, {"text"}, skip=3)] == [{"text": ROWS[3]["text"]}]
    assert count_rows(path) == 4


def test_a_file_entered_in_its_middle_is_not_judged_by_its_last_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"instruction": "q", "output": "r"}\n{"x": 1}\n')
    assert [row.data for row in iter_rows(entry(tmp_path / "a.jsonl"), skip=1)] == [{"x": 1}]


# Bad rows


GOOD = b'{"instruction": "q", "output": "r", "text": "t"}'
BAD_LINES = [
    (b'{"text":"a"}{"text":"b"}', "not valid JSON", "not valid JSON: Extra data"),
    (b'{"text":', "not valid JSON", "not valid JSON: Expecting value"),
    (b"[1]", "not an object", "a row must be an object with named columns, found list"),
    (b"\xff", "not UTF-8 text", "not UTF-8 text"),
    (b"[" * 100_000, "nested too deeply", "nested too deeply"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_bad_lines_stop_or_are_handed_on_to_be_counted(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = b"\n\n".join([GOOD, *(line for line, _, _ in BAD_LINES), GOOD])
    path.write_bytes(COMPRESSIONS[path.suffix](content) if path.suffix == ".gz" else content)
    of = entry(path)
    found = list(iter_rows(of, on_bad_row="skip"))
    assert [(row.reason, row.where) for row in found if isinstance(row, BadRow)] == [
        (reason, f"{path}:{2 * number + 1}") for number, (_, reason, _) in enumerate(BAD_LINES, start=1)
    ]
    assert len(found) == len(BAD_LINES) + 2 == count_rows(path)
    for skip in range(len(found) + 1):
        assert list(iter_rows(of, skip, on_bad_row="skip")) == found[skip:]
    for number, (_, _, message) in enumerate(BAD_LINES, start=1):
        with pytest.raises(UserError, match=f"{re.escape(name)}:{2 * number + 1}: .*{message}") as caught:
            next(iter_rows(of, skip=number))
        assert "\n" not in str(caught.value)


def test_bad_rows_of_an_array_and_of_csv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"[" + GOOD + b",\n3,\n" + GOOD + b"]")
    (tmp_path / "a.csv").write_bytes(b"instruction,output\nq,r\nq\n\xff,r\nq,r,s\nq,r\n")
    expected = {
        "a.json": {2: "not an object"},
        "a.csv": {3: "wrong number of fields", 4: "not UTF-8 text", 5: "wrong number of fields"},
    }
    for name, bad in expected.items():
        found = list(iter_rows(entry(tmp_path / name), on_bad_row="skip"))
        assert {int(row.where.rsplit(":")[-1]): row.reason for row in found if isinstance(row, BadRow)} == bad
        assert len(found) - len(bad) == 2
        with pytest.raises(UserError, match=f"{name}:{min(bad)}: "):
            list(iter_rows(entry(tmp_path / name)))


def test_bad_documents_are_handed_on_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": 3}\n{"body": "x"}\n{\n{"text": "t"}\n')
    (tmp_path / "a.txt").write_bytes(b"t\n\xff\n")
    found = list(iter_texts(entry(tmp_path / "a.jsonl"), on_bad_row="skip"))
    reasons = [row.reason for row in found if isinstance(row, BadRow)]
    assert reasons == ["column 'text' must hold text", "no column 'text'", "not valid JSON"]
    assert found[3:] == [("t", f"{tmp_path / 'a.jsonl'}:4")]
    lines = list(iter_texts(entry(tmp_path / "a.txt"), on_bad_row="skip"))
    assert isinstance(lines[1], BadRow) and (lines[1].reason, len(lines)) == ("not UTF-8 text", 2)
    with pytest.raises(UserError, match=r"a\.txt:2: not UTF-8"):
        list(iter_texts(entry(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b'instruction,output\nq,r\nq,"open\nq,r\n',
            r"a\.csv:3: not valid csv.*unexpected end of data",
        ),
        ("a.csv", b'instruction,output\nq,"r" s\n', r"a\.csv:2: not valid csv.*expected after"),
        ("a.csv", b"output,output\nq,r\n", r"a\.csv:1: the header names the column 'output' more than once"),
        ("a.csv", b"\xff,output\nq,r\n", r"a\.csv:1: not UTF-8 text"),
        ("a.csv", b"instruction,output\n", r"no rows in .*a\.csv"),
        ("a.csv", b"\n \n", r"no rows in .*a\.csv"),
        ("a.csv", b"question;answer\nq;r\n", r"needs the column 'response'.*found: question;answer"),
        ("a.json", b"[" + GOOD + b', {"cut', r"a\.json:1: not valid JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(GOOD * 9, mtime=0)[:-9],
            r"a\.jsonl\.gz: not a whole gzip file .*it is cut off",
        ),
        ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz: not a whole gzip file \(Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(GOOD, mtime=0)[:-8] + b"\0" * 8,
            r"a\.jsonl\.gz: not a whole gzip file .*CRC",
        ),
        (
            "a.jsonl.zst",
            COMPRESSIONS[".zst"](GOOD * 9)[:-5],
            r"a\.jsonl\.zst: not a whole zstd file .*cut off",
        ),
        ("a.jsonl.zst", GOOD, r"a\.jsonl\.zst: not a whole zstd file .*misnamed"),
        ("a.jsonl.zst", COMPRESSIONS[".zst"](GOOD)[:-4] + b"\0" * 4, r"a\.jsonl\.zst: not a whole zstd file"),
        ("a.parquet", as_parquet(ROWS)[:-9], r"a\.parquet: not a readable parquet file"),
        ("a.arrow", GOOD, r"a\.arrow: not a readable arrow file"),
        ("a.arrow", as_arrow_file(ROWS)[:-9], r"a\.arrow: not a readable arrow file"),
        ("a.arrow", as_arrow_stream(ROWS)[:-200_000], r"a\.arrow: broken after row \d"),
    ],
)
def test_a_fault_after_which_no_row_can_be_found_stops_under_either_policy(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    for read in (
        lambda: list(iter_rows(entry(tmp_path / name))),
        lambda: list(iter_rows(entry(tmp_path / name), on_bad_row="skip")),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow"])
def test_lengths_that_point_past_the_end_of_an_arrow_file_are_told(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, [{"text": "abc"}, {"text": "defgh"}])
    ends = struct.pack("<3i", 0, 3, 8)
    assert path.read_bytes().count(ends) == 1
    path.write_bytes(path.read_bytes().replace(ends, struct.pack("<3i", 0, 3, 2**30)))
    with pytest.raises(UserError, match=r"arrow: broken after row 0: .*[oO]ffset"):
        list(read_rows(path, {"text"}))


def test_zstd_and_gzip_files_may_be_made_of_several_parts(tmp_path: Path) -> None:
    for packed, pack in COMPRESSIONS.items():
        path = tmp_path / f"a.jsonl{packed}"
        path.write_bytes(b"".join(pack(GOOD + b"\n") for _ in range(3)))
        assert count_rows(path) == 3


def test_pairs_need_both_replies_and_their_columns_have_default_names(tmp_path: Path) -> None:
    row = {"instruction": "q", "chosen": "good", "worse": "bad"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"needs the column 'rejected', looked for 'rejected'"):
        list(iter_rows(entry(tmp_path / "a.jsonl", ranking=True)))
    of = entry(tmp_path / "a.jsonl", ranking=True, columns={"rejected": "worse"})
    assert (of.ranking, of.columns.chosen, of.columns.rejected) == (True, "chosen", "worse")
    assert [found.data for found in iter_rows(of)] == [row]


# Folders


def test_a_folder_that_the_datasets_package_saved_is_its_arrow_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number in (1, 0):
        (tmp_path / f"d/data-0000{number}-of-00002.arrow").write_bytes(as_arrow_stream([ROWS[number]]))
    (tmp_path / "d/state.json").write_text('{"_data_files": []}')
    (tmp_path / "d/dataset_info.json").write_text("{}")
    assert [row.data["instruction"] for row in iter_rows(entry(tmp_path / "d"))] == [
        ROWS[0]["instruction"],
        ROWS[1]["instruction"],
    ]


def test_a_folder_whose_sub_folders_hold_the_data_says_so(tmp_path: Path) -> None:
    for name in ("train", "test", ".cache"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "a.csv").write_bytes(as_csv(ROWS))
    with pytest.raises(UserError, match=r"sub-folders are not read: name one \(test, train\)"):
        entry(tmp_path / "d")


# Fuzz


CELLS = (
    st.none()
    | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    | st.sampled_from(
        ['"', "\n", "\r\n", "\r", ",", "'", "\x00", "\ufeff", "\u2028", " ", "null", "x" * 3000]
    )
)
TABLES = {
    "cells": st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5),
    "name": st.sampled_from(sorted(KINDS)),
    "skip": st.integers(0, 6),
}


def fuzz(check: Callable[..., None], strategies: dict[str, Any], examples: int, folder: Path) -> None:
    quiet = settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )

    def one(**drawn: Any) -> None:
        check(**drawn, folder=folder)

    quiet(given(**strategies)(one))()


def check_round_trip(cells: list[tuple[str | None, str | None]], name: str, skip: int, folder: Path) -> None:
    rows: Texts = [{"instruction": "q", "a": a, "b": b, "output": "r"} for a, b in cells]
    path = written(folder, name, rows)
    columns = ("instruction", "a", "b", "output")
    assert [row.data for row in read_rows(path, columns, skip)] == rows[skip:]
    assert count_rows(path) == len(rows)


def test_fuzz_rows_survive_every_kind(tmp_path: Path) -> None:
    fuzz(check_round_trip, TABLES, 150, tmp_path)


@pytest.mark.soak
def test_fuzz_rows_survive_every_kind_in_numbers(tmp_path: Path) -> None:
    fuzz(check_round_trip, TABLES, 5000, tmp_path)


DAMAGE = {
    "name": st.sampled_from(sorted(KINDS)),
    "damage": st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=4)), max_size=3),
    "cut": st.integers(0, 5000),
    "text": st.none() | st.text('[]{}",:\\ntrue 1e\n\r', max_size=60) | st.binary(max_size=60),
}


def check_damage(
    name: str, damage: list[tuple[int, bytes]], cut: int, text: str | bytes | None, folder: Path
) -> None:
    rows = [{**row, "instruction": (row["instruction"] or "")[:50]} for row in ROWS]
    content = bytearray(
        KINDS[name](rows) if text is None else text.encode() if isinstance(text, str) else text
    )
    for place, replacement in damage:
        content[place : place + len(replacement)] = replacement
    path = folder / name
    path.write_bytes(bytes(content[: max(1, len(content) - cut)]) or b"x")
    counted: int | None = None
    try:
        counted = count_rows(path)
        found = list(read_rows(path, ("instruction", "output"), on_bad_row="skip"))
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert len(found) == counted


def test_fuzz_a_damaged_file_is_rows_or_one_message(tmp_path: Path) -> None:
    fuzz(check_damage, DAMAGE, 300, tmp_path)


@pytest.mark.soak
def test_fuzz_a_damaged_file_is_rows_or_one_message_in_numbers(tmp_path: Path) -> None:
    fuzz(check_damage, DAMAGE, 10_000, tmp_path)


# Memory


MEASURE = """
import sys, tracemalloc
from pathlib import Path
from shardyard.data.sources import read_rows
rows = read_rows(Path(sys.argv[1]), ("instruction", "output"))
next(rows)
tracemalloc.start()
count = sum(1 for _ in rows)
print(count + 1, tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["a.json", "a.jsonl", "a.csv", "a.json.gz", "a.jsonl.zst", "a.parquet", "b.arrow"]
)
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    row: dict[str, str | None] = {"instruction": "é" * 200, "output": "r" * 500}
    rows = [row] * 56_000
    path = tmp_path / name
    path.write_bytes(KINDS[name](rows))
    if path.suffix in (".json", ".csv"):
        assert path.stat().st_size > 50_000_000
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    count, peak = map(int, run.stdout.split())
    assert count == len(rows)
    assert peak < 16 * 2**20
