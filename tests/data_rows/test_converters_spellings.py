"""The same row in other spellings: JSON text for a column, thoughts, calls, tools and results."""

from __future__ import annotations

import datetime
import decimal
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from support import tokenizers as tiny
from support.tokenizers import byte_tokenizer

from shardyard.data.converters import convert
from shardyard.data.dropped import Dropped
from shardyard.data.encode import LOST_THOUGHT, TRUNCATED, Encoder
from shardyard.data.sources import Columns, DatasetEntry, Row
from shardyard.data.sources.entry import OPENAI_COLUMNS, OPENAI_TAGS
from shardyard.data.types import Conversation, Message, ToolCall

FILES = (Path("f.json"),)
ALPACA = DatasetEntry("a", FILES, columns=Columns(history="history"))
SHAREGPT = DatasetEntry("s", FILES, "sharegpt", Columns(tools="tools"))
OPENAI = DatasetEntry("o", FILES, "openai", OPENAI_COLUMNS, OPENAI_TAGS)

USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "r"}


def of(entry: DatasetEntry, **data: Any) -> Conversation | Dropped:
    return convert(Row(data, "f:7"), entry)


def openai(*messages: dict[str, Any], **columns: Any) -> Conversation | Dropped:
    return of(OPENAI, messages=list(messages), **columns)


def reason(outcome: Conversation | Dropped) -> str:
    assert isinstance(outcome, Dropped), outcome
    return outcome.reason


# Columns given as JSON text


@pytest.mark.parametrize(
    ("entry", "column", "value", "rest"),
    [
        (OPENAI, "messages", [USER, {**REPLY, "weight": 1}], {}),
        (
            SHAREGPT,
            "conversations",
            [{"from": "human", "value": "城"}, {"from": "gpt", "value": "r", "train": True}],
            {"tools": None},
        ),
        (ALPACA, "history", [["q0", "r0"], ["q1", None]], {"instruction": "I", "output": "R"}),
        (ALPACA, "history", [["q0", "r0"]], {"instruction": "I", "output": "R"}),
        (OPENAI, "tools", [{"name": "f", "x": None}], {"messages": [USER, REPLY]}),
    ],
)
def test_a_column_as_json_text_means_what_it_says(
    entry: DatasetEntry, column: str, value: Any, rest: dict[str, Any]
) -> None:
    native = of(entry, **{**rest, column: value})
    for text in (
        json.dumps(value),
        json.dumps(value, indent=1),
        f" {json.dumps(value, ensure_ascii=False)}\n",
    ):
        assert of(entry, **{**rest, column: text}) == native


@pytest.mark.parametrize(
    ("entry", "row", "why"),
    [
        (OPENAI, {"messages": "[{"}, "the list of turns is not valid JSON"),
        (OPENAI, {"messages": "once upon a time"}, "the list of turns is not valid JSON"),
        (OPENAI, {"messages": "[" * 100_000}, "the list of turns is not valid JSON"),
        (OPENAI, {"messages": "[" + "9" * 5000 + "]"}, "the list of turns is not valid JSON"),
        (OPENAI, {"messages": "[NaN]"}, "the list of turns is not valid JSON"),
        (OPENAI, {"messages": "  "}, "no turns"),
        (OPENAI, {"messages": "[]"}, "no turns"),
        (OPENAI, {"messages": "null"}, "no turns"),
        (OPENAI, {"messages": '{"role": "user"}'}, "turns are not a list of objects"),
        (ALPACA, {"instruction": "I", "output": "R", "history": "[["}, "history is not valid JSON"),
        (
            ALPACA,
            {"instruction": "I", "output": "R", "history": '{"q": 1}'},
            "history is not a list of pairs",
        ),
    ],
)
def test_a_column_that_is_no_json_text_is_dropped_with_its_reason(
    entry: DatasetEntry, row: dict[str, Any], why: str
) -> None:
    assert of(entry, **row) == Dropped(why, "f:7")


def test_an_empty_history_column_is_no_history() -> None:
    for empty in ("", " ", "[]", "null", None, []):
        outcome = of(ALPACA, instruction="I", output="R", history=empty)
        assert isinstance(outcome, Conversation) and len(outcome.turns) == 2


def test_a_role_that_is_not_text_is_dropped_by_its_type() -> None:
    assert reason(openai({"role": {"x": 1}, "content": "q"}, REPLY)) == "'role' is not text but dict"


# Thoughts


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_three_names_in_both_formats(name: str) -> None:
    theirs = of(
        SHAREGPT, conversations=[{"from": "human", "value": "q"}, {"from": "gpt", "value": "r", name: "why"}]
    )
    ours = openai(USER, {**REPLY, name: [{"type": "text", "text": "why"}], "train": None})
    for outcome in (theirs, ours):
        assert isinstance(outcome, Conversation) and outcome.turns[1] == Message("assistant", "r", "why")


def test_the_first_thought_that_is_not_empty_counts() -> None:
    outcome = openai(USER, {**REPLY, "reasoning_content": "", "thinking": None, "reasoning": "why"})
    assert isinstance(outcome, Conversation) and outcome.turns[1].reasoning == "why"
    outcome = openai(USER, {**REPLY, "reasoning": "b", "reasoning_content": "a"})
    assert isinstance(outcome, Conversation) and outcome.turns[1].reasoning == "a"
    assert reason(openai(USER, {**REPLY, "thinking": True})) == "thinking is not text but bool"


def test_a_thought_inside_the_text_stays_there() -> None:
    outcome = openai(USER, {"role": "assistant", "content": "<think>why</think>r"})
    assert isinstance(outcome, Conversation)
    assert outcome.turns[1] == Message("assistant", "<think>why</think>r")


# Calls: as a mapping or as text they are the same ids


CALL = {"name": "f", "arguments": {"城": ["北京", None, 2.5, True], "n": 2}}
TEXT = {"name": "f", "arguments": json.dumps(CALL["arguments"])}
WIDE = {"name": "f", "arguments": json.dumps(CALL["arguments"], ensure_ascii=False, indent=2)}


def called(**reply: Any) -> Conversation | Dropped:
    return openai(USER, {"role": "assistant", **reply}, {"role": "tool", "content": "t"}, REPLY)


def shared(value: Any) -> Conversation | Dropped:
    turns = [("human", "q"), ("function_call", value), ("observation", "t"), ("gpt", "r")]
    return of(SHAREGPT, conversations=[{"from": role, "value": said} for role, said in turns])


@pytest.mark.parametrize("template", [None, "qwen3"])
def test_every_spelling_of_a_call_gives_the_same_ids(template: str | None) -> None:
    spellings = [
        *(
            called(content=None, tool_calls=[{"type": "function", "function": call}])
            for call in (CALL, TEXT, WIDE)
        ),
        *(called(content="", tool_calls=[call]) for call in (CALL, TEXT)),
        called(tool_calls=json.dumps([{"function": CALL}])),
        called(tool_calls=[json.dumps({"id": "1", "function": TEXT})]),
        called(content=[], tool_calls=None, function_call=CALL),
        called(function_call=json.dumps(TEXT)),
        *(
            shared(value)
            for value in (CALL, [CALL], json.dumps(CALL), json.dumps([WIDE]), [json.dumps(TEXT)])
        ),
        shared([{"type": "text", "text": json.dumps(CALL)}]),
    ]
    encoder = Encoder(byte_tokenizer(tiny.QWEN3_LIKE), template=template)
    found: list[list[list[int]]] = []
    for outcome in spellings:
        assert isinstance(outcome, Conversation), outcome
        assert outcome.turns[1].tool_calls == (ToolCall("f", CALL["arguments"]),)
        samples = encoder.encode(outcome)
        assert not isinstance(samples, Dropped)
        found.append([sample.input_ids.tolist() for sample in samples])
    assert all(ids == found[0] for ids in found)
    text = byte_tokenizer().decode(found[0][0])
    assert '{"name": "f", "arguments": {"城": ["北京", null, 2.5, true], "n": 2}}' in text


@pytest.mark.parametrize("arguments", ["two", 2, [2], {"n": "two"}])
def test_one_argument_may_have_another_type_in_each_row(arguments: Any) -> None:
    outcome = called(tool_calls=[{"name": "f", "arguments": {"n": arguments}}])
    assert isinstance(outcome, Conversation)
    assert outcome.turns[1].tool_calls == (ToolCall("f", {"n": arguments}),)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("inf"), "holds a number that JSON has not (inf)"),
        (float("nan"), "holds a number that JSON has not (nan)"),
        (datetime.date(2026, 1, 1), "holds a value that JSON has not (date)"),
        (decimal.Decimal(1), "holds a value that JSON has not (Decimal)"),
        (b"x", "holds a value that JSON has not (bytes)"),
        ({1: 2}, "holds a key that is not text"),
        (nested(64), "nests more than 64 deep"),
        (nested(5000), "nests more than 64 deep"),
    ],
)
def test_arguments_and_tools_that_json_has_not_are_dropped(value: Any, why: str) -> None:
    call = {"name": "f", "arguments": {"x": value}}
    assert reason(called(tool_calls=[call])) == f"function call's arguments {why}"
    assert reason(openai(USER, REPLY, tools=[{"x": value}])) in (
        f"tools {why}",
        "tools nests more than 64 deep",
    )


def test_arguments_may_nest_63_deep() -> None:
    outcome = called(tool_calls=[{"name": "f", "arguments": {"x": nested(63)}}])
    assert isinstance(outcome, Conversation)


def test_calls_beside_words_in_sharegpt_are_not_lost() -> None:
    turns = [("human", "q"), ("gpt", "let me see"), ("observation", "t"), ("gpt", "r")]
    said: list[dict[str, Any]] = [{"from": role, "value": text} for role, text in turns]
    said[1]["tool_calls"] = [CALL]
    outcome = of(SHAREGPT, conversations=said)
    assert isinstance(outcome, Conversation)
    assert outcome.turns[1] == Message("assistant", "let me see", None, (ToolCall("f", CALL["arguments"]),))


# Tools


def test_tools_as_a_list_of_json_texts() -> None:
    tools = [{"name": "f"}, {"name": "g", "parameters": {"城": None}}]
    expected = openai(USER, REPLY, tools=tools)
    assert openai(USER, REPLY, tools=[json.dumps(tool) for tool in tools]) == expected
    assert openai(USER, REPLY, tools=json.dumps([json.dumps(tool) for tool in tools])) == expected
    assert isinstance(expected, Conversation) and expected.tools == tuple(tools)
    assert reason(openai(USER, REPLY, tools=["{broken"])) == "tools is not valid JSON"
    assert reason(openai(USER, REPLY, tools={})) == "tools is not a list of objects"


# Results


def asked_of(*names: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": name, "function": {"name": f"f_{name}"}} for name in names],
    }


def answer(name: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


def results(outcome: Conversation | Dropped) -> list[str]:
    assert isinstance(outcome, Conversation), outcome
    return [turn.content for turn in outcome.turns if turn.role == "tool"]


def test_results_are_brought_into_the_order_of_their_calls() -> None:
    for order in permutations("abc"):
        outcome = openai(USER, asked_of("a", "b", "c"), *map(answer, order), REPLY)
        assert results(outcome) == ["of a", "of b", "of c"]


def test_results_are_linked_within_their_own_round() -> None:
    rounds = [asked_of("b", "a"), answer("a"), answer("b"), asked_of("a", "b"), answer("b"), answer("a")]
    assert results(openai(USER, *rounds, REPLY)) == ["of b", "of a", "of a", "of b"]


@pytest.mark.parametrize("none", [{}, {"tool_call_id": None}, {"tool_call_id": ""}])
def test_results_without_ids_keep_their_order(none: dict[str, Any]) -> None:
    answers = [{"role": "tool", "content": text, **none} for text in "xyz"]
    assert results(openai(USER, asked_of("a", "b", "c"), *answers, REPLY)) == ["x", "y", "z"]
    nameless = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 2}
    assert results(openai(USER, nameless, answer("b"), answer("a"), REPLY)) == ["of b", "of a"]


def test_ids_may_be_numbers() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": n, "function": {"name": "f"}} for n in (0, 1)]}
    assert results(openai(USER, calls, answer(1), answer(0), REPLY)) == ["of 0", "of 1"]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([answer("a"), answer("c")], "a tool result without the id of a call before it"),
        ([answer("a"), answer(None)], "a tool result without the id of a call before it"),
        ([answer("a"), answer("a")], "two tool results for one function call"),
        ([answer("b")], "a function call without its result"),
    ],
)
def test_results_that_match_no_call_are_dropped(answers: list[dict[str, Any]], why: str) -> None:
    assert reason(openai(USER, asked_of("a", "b"), *answers, REPLY)) == why


def test_calls_that_share_an_id_are_dropped_where_results_name_it() -> None:
    outcome = openai(USER, asked_of("a", "a"), answer("a"), answer("a"), REPLY)
    assert reason(outcome) == "function calls without an id of their own, though results name ids"


def test_a_conversation_may_end_with_calls() -> None:
    outcome = openai(USER, asked_of("a", "b"))
    assert isinstance(outcome, Conversation) and len(outcome.turns[1].tool_calls) == 2


# What samples note


def test_a_lost_thought_and_a_cut_are_noted_on_the_samples() -> None:
    row = openai(USER, {**REPLY, "reasoning": "why", "content": "r" * 40})
    assert isinstance(row, Conversation)
    for template, cutoff_len, notes in [
        (tiny.CHATML, 2048, (LOST_THOUGHT,)),
        (tiny.QWEN3_LIKE, 2048, ()),
        (tiny.QWEN3_LIKE, 40, (TRUNCATED,)),
        (tiny.CHATML, 40, tuple(sorted((LOST_THOUGHT, TRUNCATED)))),
    ]:
        samples = Encoder(byte_tokenizer(template), cutoff_len=cutoff_len).encode(row)
        assert not isinstance(samples, Dropped)
        assert samples.notes == notes and samples.truncated == (TRUNCATED in notes)


def test_a_lost_thought_of_a_reply_that_is_context_only_is_not_noted() -> None:
    row = openai(USER, {**REPLY, "reasoning": "why", "weight": 0}, USER, REPLY)
    assert isinstance(row, Conversation)
    samples = Encoder(byte_tokenizer(tiny.CHATML)).encode(row)
    assert not isinstance(samples, Dropped) and samples.notes == ()
