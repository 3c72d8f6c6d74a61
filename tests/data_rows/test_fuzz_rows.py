"""Rows of any shape: each becomes samples or is dropped with a reason; nothing else is raised or lost."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer

from shardyard.data.converters import convert, convert_pair
from shardyard.data.dropped import Dropped
from shardyard.data.encode import Encoder, Samples
from shardyard.data.sources import Columns, DatasetEntry, Row, iter_rows
from shardyard.data.sources.entry import OPENAI_TAGS
from shardyard.data.sources.row import BadRow
from shardyard.data.types import Conversation, PreferencePair
from shardyard.errors import UserError

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOAK = settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])

FILES = (Path("f.jsonl"),)
PARTS = {
    "history": "history",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
}
ENTRIES = [
    DatasetEntry("a", FILES, columns=Columns(**PARTS)),
    DatasetEntry("s", FILES, "sharegpt", Columns(**PARTS)),
    DatasetEntry("o", FILES, "openai", Columns(messages="messages", **PARTS), OPENAI_TAGS),
]

TEXTS = st.text(max_size=6) | st.sampled_from(
    [
        *(
            "",
            " ",
            "q",
            "\ud800",
            "a\udfffb",
            "\u2028",
            "\x00",
            "\ufeff",
            "\ue000",
            "é\u0301",
            "😀",
            "\r\n",
            "\\",
        ),
        *("<think>", "</think>", "<think>a</think>b", "</think><think>", "<think>\n\n</think>\n\n"),
        *(
            "<|im_end|>",
            "<|im_start|>user\n",
            "</s>",
            "[INST]",
            "<tool_call>",
            "{content}",
            "{{ 1 }}",
            "{% if",
        ),
        *(
            '{"name": "f", "arguments": {}}',
            '[{"name": "f"}]',
            "[]",
            "{}",
            "null",
            "NaN",
            '"',
            "[[",
            "x" * 300,
        ),
    ]
)
NUMBERS = st.integers() | st.sampled_from([0, 1, 2**70, 0.0, -0.0, 0.5, 1e999, -1e999, float("nan")])
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.just(b"x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mostly(draw: st.DrawFn, usual: Any) -> Any:
    """The usual value, but now and then anything, null, or the JSON text of the value."""
    odd = draw(st.integers(0, 39))
    return draw((ANY, st.none(), usual.map(as_text))[odd - 37] if odd >= 37 else usual)


def as_text(value: Any) -> Any:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return value


def fields(**usual: Any) -> Any:
    """A mapping with some of these keys."""
    return st.fixed_dictionaries({}, optional=usual)


SAID = st.sampled_from(["q", "r", "two words"]) | TEXTS.filter(str.strip)
PARTS_OF_TEXT = st.lists(st.builds(lambda text: {"type": "text", "text": text}, SAID), min_size=1, max_size=2)
WORDS = mostly(st.one_of(SAID, SAID, SAID, PARTS_OF_TEXT))
FUNCTION = st.fixed_dictionaries(
    {"name": mostly(st.sampled_from(["f", "g"])), "arguments": mostly(fields(x=ANY, y=NUMBERS))}
)
CALL = mostly(
    FUNCTION
    | st.fixed_dictionaries({"id": st.sampled_from(["1", "2", 1, None]), "function": FUNCTION})
    | FUNCTION.map(as_text)
)
CALLS = mostly(st.lists(CALL, min_size=1, max_size=2))
TOOLS = mostly(
    st.lists(st.fixed_dictionaries({"name": SAID}, optional={"parameters": fields(properties=ANY)}))
)
FLAGS = {
    "weight": mostly(st.sampled_from([0, 1, 1])),
    "train": mostly(st.booleans()),
    "tool_calls": CALLS,
    "function_call": CALL,
    "tool_call_id": st.sampled_from(["1", "2", 1, None]),
    "reasoning_content": WORDS,
    "thinking": WORDS,
    "reasoning": WORDS,
    "name": ANY,
}
SHAPES = [
    "UA",
    "UA",
    "SUA",
    "UAUA",
    "SUAUAUA",
    "UCTA",
    "SUCTTAUA",
    "UCTCTA",
    "UAAU",
    "AU",
    "TA",
    "UASUA",
    "C",
    "X",
]
ROLES = {
    "from": {
        "U": "human",
        "A": "gpt",
        "S": "system",
        "T": "observation",
        "C": "function_call",
        "X": "critic",
    },
    "role": {"U": "user", "A": "assistant", "S": "system", "T": "tool", "C": "assistant", "X": "developer"},
}


@st.composite
def turns(draw: st.DrawFn, role_tag: str, content_tag: str) -> Any:
    """Turns of one of the shapes, whose replies may have flags, thoughts and calls."""
    said = []
    for letter in draw(st.sampled_from(SHAPES)):
        content = CALLS if (role_tag, letter) == ("from", "C") else WORDS
        one = {role_tag: draw(mostly(st.just(ROLES[role_tag][letter]))), content_tag: draw(content)}
        if letter == "C" and role_tag == "role":
            one["tool_calls"] = draw(CALLS)
        for key in draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=2)) if letter in "AT" else ():
            one[key] = draw(FLAGS[key])
        said.append(draw(mostly(st.just(one))))
    return said


@st.composite
def rows_of_all_kinds(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """The number of an entry and a row for it."""
    entry = draw(st.integers(0, 2))
    if entry == 0:
        history = mostly(st.lists(st.tuples(WORDS, WORDS).map(list), max_size=2))
        usual = {"instruction": WORDS, "input": WORDS, "output": WORDS, "history": history}
    elif entry == 1:
        usual = {"conversations": mostly(turns("from", "value"))}
    else:
        usual = {"messages": mostly(turns("role", "content"))}
    row = draw(st.fixed_dictionaries(usual))
    return entry, {**row, **draw(fields(system=WORDS, tools=TOOLS, chosen=WORDS, rejected=WORDS))}


ROWS = rows_of_all_kinds()
ANY_ROW = st.tuples(
    st.sampled_from([0, 1, 2]), st.dictionaries(st.sampled_from(["messages", "output"]) | TEXTS, ANY)
)

CHAT_TEMPLATES = (tiny.CHATML, tiny.QWEN3_LIKE, tiny.CALLS_AS_TEXT, tiny.INSTRUCTION, tiny.ENDS_THE_LAST)
NAMED = ("qwen3", "qwen2.5", "chatml", "empty", "default")
SETTINGS = st.tuples(
    st.sampled_from([*CHAT_TEMPLATES, *NAMED]),
    st.sampled_from([1, 7, 40, 2048]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, False, None]),
    st.booleans(),
)
FEW_SETTINGS = st.sampled_from(
    [
        (
            template,
            (2048, 40, 2048, 7)[i % 4],
            i % 3 == 1,
            i % 4 == 3,
            (True, None, False)[i // 2 % 3],
            i % 2 == 1,
        )
        for i, template in enumerate([*CHAT_TEMPLATES, *NAMED] * 2)
    ]
)


@cache
def encoder(
    template: str, cutoff_len: int, on_prompt: bool, mask_history: bool, thinking: bool | None, split: bool
) -> Encoder:
    """An encoder with these settings; a chat template is given to the tokenizer, others by name."""
    own = template in CHAT_TEMPLATES
    return Encoder(
        byte_tokenizer(template if own else None),
        template=None if own else template,
        cutoff_len=cutoff_len,
        train_on_prompt=on_prompt,
        mask_history=mask_history,
        enable_thinking=thinking,
        split_special_tokens=split,
    )


def check_reason(dropped: Dropped, where: str) -> None:
    assert dropped.where == where
    assert dropped.reason and "\n" not in dropped.reason and len(dropped.reason) < 300
    dropped.reason.encode()  # can be printed


def check_samples(samples: Samples, cutoff_len: int) -> None:
    assert len(samples) >= 1
    for sample in samples:
        ids, labels = sample.input_ids, sample.labels
        assert 0 < len(ids) == len(labels) <= cutoff_len and sample.doc_lens == (len(ids),)
        assert labels[-1] == -100 and (labels != -100).any()
        trained = labels[:-1] != -100
        assert np.array_equal(labels[:-1][trained], ids[1:][trained])


def check_rows(rows: list[tuple[int, dict[str, Any]]], options: tuple[Any, ...]) -> None:
    """Rows in are rows used and rows dropped by reason; what is used is valid."""
    work = encoder(*options)
    outcomes: Counter[str] = Counter()
    for number, (entry, data) in enumerate(rows):
        where = f"f.jsonl:{number + 1}"
        found: Any = convert(Row(data, where), ENTRIES[entry])
        if isinstance(found, Conversation):
            assert found.where == where and found.turns[-1].role == "assistant"
            found = work.encode(found)
        if isinstance(found, Dropped):
            check_reason(found, where)
            outcomes[found.reason] += 1
        else:
            check_samples(found, options[1])
            outcomes["used"] += 1
    assert outcomes.total() == len(rows)


def check_pair(entry: int, data: dict[str, Any]) -> None:
    pair = convert_pair(Row(data, "f.jsonl:1"), ENTRIES[entry])
    if isinstance(pair, Dropped):
        check_reason(pair, "f.jsonl:1")
        return
    assert isinstance(pair, PreferencePair) and pair.chosen != pair.rejected
    assert pair.prompt[-1].role != "assistant"
    assert pair.chosen.role == pair.rejected.role == "assistant"


CASES = st.lists(ROWS | ROWS | ROWS | ANY_ROW, min_size=1, max_size=4)


@QUICK
@given(rows=CASES, options=FEW_SETTINGS)
def test_every_row_is_used_or_dropped_with_a_reason(rows: Any, options: Any) -> None:
    check_rows(rows, options)


@pytest.mark.soak
@SOAK
@given(rows=CASES, options=SETTINGS)
def test_every_row_is_used_or_dropped_with_a_reason_at_length(rows: Any, options: Any) -> None:
    check_rows(rows, options)


@QUICK
@given(row=ROWS | ANY_ROW)
def test_every_preference_pair_is_used_or_dropped_with_a_reason(row: Any) -> None:
    check_pair(*row)


@pytest.mark.soak
@SOAK
@given(row=ROWS | ANY_ROW)
def test_every_preference_pair_is_used_or_dropped_with_a_reason_at_length(row: Any) -> None:
    check_pair(*row)


@settings(QUICK, max_examples=60)
@given(
    said=st.lists(st.tuples(TEXTS.filter(str.strip), TEXTS.filter(str.strip)), min_size=1, max_size=3),
    template=st.sampled_from([tiny.CHATML, "chatml"]),
)
def test_what_the_row_says_stands_in_the_sample(said: list[tuple[str, str]], template: str) -> None:
    data = {
        "messages": [
            m for q, r in said for m in ({"role": "user", "content": q}, {"role": "assistant", "content": r})
        ]
    }
    conversation = convert(Row(data, "f:1"), ENTRIES[2])
    assert isinstance(conversation, Conversation)
    outcome = encoder(template, 2048, False, False, None, False).encode(conversation)
    if isinstance(outcome, Dropped):
        assert any("\ud800" <= c <= "\udfff" for pair in said for text in pair for c in text), outcome
        return
    text = byte_tokenizer().decode(outcome[0].input_ids)
    expected = "".join(
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{r}<|im_end|>\n" for q, r in said
    )
    assert text.rstrip("\n") == expected.rstrip("\n")


# From bytes on the disk

GOOD = {"instruction": "q", "output": "r"}
STRANGE = {
    "nothing": b"",
    "space": b" \t",
    "another space": b"\xe2\x80\xa8",
    "byte order mark": b"\xef\xbb\xbf",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "array": b"[]",
    "arrays": b"[[]]",
    "empty object": b"{}",
    "half a row": b'{"instruction": "q"}',
    "two rows": b'{"a": 1}{"b": 2}',
    "cut off": b"{",
    "cut off inside a word": b"nul",
    "lone surrogate": b'{"output": "\\ud800"}',
    "escaped NUL": b'{"output": "r\\u0000"}',
    "NUL": b"\x00",
    "not UTF-8": b"\xff\xfe",
    "deep objects": b'{"a": ' * 5000,
    "deep arrays": b"[" * 100_000,
    "long number": b'{"a": ' + b"9" * 5000 + b"}",
    "not a number": b'{"a": NaN}',
    "infinite": b'{"a": 1e999}',
}
LINES = st.one_of(
    ROWS.map(lambda row: as_text(row[1])).filter(lambda text: isinstance(text, str)).map(str.encode),
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
    st.sampled_from(sorted(STRANGE)).map(lambda name: STRANGE[name]),
    st.just(json.dumps(GOOD).encode()),
)


def check_file(lines: list[bytes], ending: bytes, suffix: str) -> None:
    """A file that cannot be read names its line; one that can loses no row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"f{suffix}"
        content = ending.join(lines)
        file.write_bytes(content)
        read = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        expected = sum(map(is_row, read)) if suffix == ".jsonl" else None
        entry = DatasetEntry("a", (file,), columns=Columns(**PARTS))
        try:
            rows = list(iter_rows(entry))
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
        else:
            check_read(rows, expected)
        try:
            skipped = list(iter_rows(entry, on_bad_row="skip"))
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
        else:
            check_read(skipped, expected)


def is_row(line: bytes) -> bool:
    return bool(line.decode("utf-8", "replace").strip())


def check_read(rows: list[Any], expected: int | None) -> None:
    assert expected is None or len(rows) == expected
    for row in rows:
        if isinstance(row, BadRow):
            assert row.reason and row.where
            continue
        outcome = convert(row, ENTRIES[0])
        if isinstance(outcome, Dropped):
            check_reason(outcome, row.where)


FILES_OF_LINES = {
    "lines": st.lists(LINES, max_size=5),
    "ending": st.sampled_from([b"\n", b"\r\n", b",\n"]),
    "suffix": st.sampled_from([".jsonl", ".jsonl", ".json", ".csv"]),
}


@QUICK
@example(
    lines=[b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", json.dumps(GOOD).encode()],
    ending=b"\r\n",
    suffix=".jsonl",
)
@given(**FILES_OF_LINES)
def test_every_file_is_read_or_refused_by_file_and_line(
    lines: list[bytes], ending: bytes, suffix: str
) -> None:
    check_file(lines, ending, suffix)


@pytest.mark.soak
@SOAK
@given(**FILES_OF_LINES)
def test_every_file_is_read_or_refused_by_file_and_line_at_length(
    lines: list[bytes], ending: bytes, suffix: str
) -> None:
    check_file(lines, ending, suffix)
