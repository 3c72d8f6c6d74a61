"""Rows of the three formats -> conversations; each shape is kept as it is or dropped with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardyard.data.converters import convert
from shardyard.data.dropped import Dropped
from shardyard.data.sources import Columns, DatasetEntry, Row, Tags
from shardyard.data.sources.entry import OPENAI_COLUMNS, OPENAI_TAGS
from shardyard.data.types import Conversation, Message, ToolCall

ALPACA = DatasetEntry(
    "a", (Path("a.json"),), columns=Columns(history="history", system="system", tools="tools")
)
SHAREGPT = DatasetEntry("s", (Path("s.json"),), "sharegpt", Columns(system="system", tools="tools"))
OPENAI = DatasetEntry("o", (Path("o.json"),), "openai", OPENAI_COLUMNS, OPENAI_TAGS)


def of(entry: DatasetEntry, **data: Any) -> Conversation | Dropped:
    return convert(Row(data, "f:7"), entry)


def turns(outcome: Conversation | Dropped) -> list[tuple[str, str]]:
    assert isinstance(outcome, Conversation), outcome
    return [(turn.role, turn.content) for turn in outcome.turns]


def reason(outcome: Conversation | Dropped) -> str:
    assert isinstance(outcome, Dropped), outcome
    assert outcome.where == "f:7"
    return outcome.reason


# Alpaca


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "I", "input": "X"}, "I\nX"),
        ({"instruction": "I", "input": ""}, "I"),
        ({"instruction": "I", "input": None}, "I"),
        ({"instruction": "I"}, "I"),
        ({"input": "X"}, "X"),
    ],
)
def test_alpaca_joins_prompt_and_query_and_leaves_empty_parts_out(row: dict[str, Any], prompt: str) -> None:
    assert turns(of(ALPACA, **row, output="R")) == [("user", prompt), ("assistant", "R")]


def test_alpaca_history_comes_first() -> None:
    row = {"instruction": "q3", "output": "r3", "history": [["q1", "r1"], ["q2", "r2"]], "system": "S"}
    outcome = of(ALPACA, **row)
    assert [text for _, text in turns(outcome)] == ["q1", "r1", "q2", "r2", "q3", "r3"]
    assert isinstance(outcome, Conversation) and outcome.system == "S" and outcome.where == "f:7"


@pytest.mark.parametrize("nothing", [None, "", []])
def test_null_and_empty_mean_absent(nothing: Any) -> None:
    history = None if nothing == "" else nothing
    outcome = of(
        ALPACA, instruction="I", output="R", input=None, history=history, system=nothing, tools=nothing
    )
    assert outcome == Conversation((Message("user", "I"), Message("assistant", "R")), where="f:7")


@pytest.mark.parametrize("output", [None, "", "  \n", []])
def test_alpaca_without_a_reply_is_dropped_and_never_trained_as_none(output: Any) -> None:
    assert reason(of(ALPACA, instruction="I", output=output)) == "empty reply"


def test_alpaca_without_a_prompt_is_dropped() -> None:
    assert reason(of(ALPACA, instruction="", input="", output="R")) == "empty prompt"
    assert reason(of(ALPACA, instruction=" ", input=None, output="R")) == "empty prompt"


@pytest.mark.parametrize("history", ["7", [["q"]], [["q", "r", "s"]], [{"q": "r"}], 3])
def test_alpaca_history_that_is_not_pairs_is_dropped(history: Any) -> None:
    assert (
        reason(of(ALPACA, instruction="I", output="R", history=history)) == "history is not a list of pairs"
    )


def test_a_part_of_another_type_is_dropped_with_its_type() -> None:
    assert reason(of(ALPACA, instruction="I", output=5)) == "response is not text but int"
    assert reason(of(ALPACA, instruction={"a": 1}, output="R")) == "prompt is not text but dict"


# ShareGPT


def sharegpt(*roles: str, **columns: Any) -> Conversation | Dropped:
    call = '{"name": "f", "arguments": {"x": 1}}'
    said = [
        {"from": role, "value": call if role == "function_call" else f"{role}{i}"}
        for i, role in enumerate(roles)
    ]
    return of(SHAREGPT, conversations=said, **columns)


def test_sharegpt_keeps_alternating_turns_with_a_leading_system_message() -> None:
    outcome = sharegpt("system", "human", "gpt", "human", "gpt")
    assert turns(outcome) == [
        ("user", "human1"),
        ("assistant", "gpt2"),
        ("user", "human3"),
        ("assistant", "gpt4"),
    ]
    assert isinstance(outcome, Conversation) and outcome.system == "system0"


def test_sharegpt_system_turn_wins_over_the_system_column() -> None:
    for outcome, system in [
        (sharegpt("human", "gpt", system="col"), "col"),
        (sharegpt("system", "human", "gpt", system="col"), "system0"),
    ]:
        assert isinstance(outcome, Conversation) and outcome.system == system


def test_sharegpt_calls_and_results_become_tool_turns() -> None:
    outcome = sharegpt("human", "function_call", "observation", "observation", "gpt", tools='[{"name": "f"}]')
    assert isinstance(outcome, Conversation)
    assert [turn.role for turn in outcome.turns] == ["user", "assistant", "tool", "tool", "assistant"]
    assert outcome.turns[1] == Message("assistant", "", tool_calls=(ToolCall("f", {"x": 1}),))
    assert outcome.tools == ({"name": "f"},)


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ((), "no turns"),
        (("gpt",), "begins with the assistant"),
        (("system", "gpt", "human", "gpt"), "begins with the assistant"),
        (("observation", "gpt"), "begins with a tool result"),
        (("human", "human", "gpt"), "two user turns in a row"),
        (("human", "gpt", "gpt"), "two assistant turns in a row"),
        (("human", "function_call", "gpt"), "two assistant turns in a row"),
        (("human", "observation", "gpt"), "a user turn beside a tool result"),
        (("human", "function_call", "observation", "human", "gpt"), "a user turn beside a tool result"),
        (("human",), "ends without a reply"),
        (("human", "gpt", "human"), "ends without a reply"),
        (("system",), "no turns"),
        (("human", "gpt", "system", "human", "gpt"), "a system message after the first turn"),
        (("human", "critic"), "unknown role 'critic'"),
    ],
)
def test_every_other_shape_is_dropped_with_its_reason(roles: tuple[str, ...], why: str) -> None:
    assert reason(sharegpt(*roles)) == why


@pytest.mark.parametrize("value", [None, [], " ", ["text"], [{"from": "human"}, 3], {"from": "human"}, "3"])
def test_turns_that_are_no_list_of_objects_are_dropped(value: Any) -> None:
    assert reason(of(SHAREGPT, conversations=value)) in ("no turns", "turns are not a list of objects")


def test_sharegpt_turns_without_text_or_role_are_dropped() -> None:
    def said(*pairs: tuple[str | None, Any]) -> Conversation | Dropped:
        return of(SHAREGPT, conversations=[{"from": role, "value": value} for role, value in pairs])

    assert reason(said(("human", "q"), ("gpt", None))) == "empty reply"
    assert reason(said(("human", None), ("gpt", "r"))) == "empty prompt"
    assert reason(said((None, "q"))) == "a turn without 'from'"
    assert reason(said(("human", 5), ("gpt", "r"))) == "turn is not text but int"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('{"name": "f", "arguments":', "function call is not valid JSON"),
        ('{"arguments": {}}', "function call without a name"),
        ('["f"]', "function call without a name"),
        ("[]", "function call without a call"),
        ('{"name": "f", "arguments": "{x"}', "function call's arguments is not valid JSON"),
    ],
)
def test_calls_that_cannot_be_read_are_dropped(value: str, why: str) -> None:
    said = [("human", "q"), ("function_call", value), ("observation", "o"), ("gpt", "r")]
    assert reason(of(SHAREGPT, conversations=[{"from": r, "value": v} for r, v in said])) == why


def test_tags_give_roles_other_names() -> None:
    tags = Tags(role_tag="who", content_tag="text", user_tag="U", assistant_tag="A", system_tag="S")
    entry = DatasetEntry("t", (Path("t.json"),), "sharegpt", Columns(messages="talk"), tags)
    said = [{"who": "S", "text": "s"}, {"who": "U", "text": "q"}, {"who": "A", "text": "r"}]
    assert turns(of(entry, talk=said)) == [("user", "q"), ("assistant", "r")]


# Tools


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([{"name": "f"}], ({"name": "f"},)),
        ('[{"name": "f"}]', ({"name": "f"},)),
        ("[]", ()),
        ("", ()),
        ("  ", ()),
        (None, ()),
        ([], ()),
    ],
)
def test_tools_are_a_list_or_its_text(tools: Any, expected: tuple[dict[str, str], ...]) -> None:
    outcome = sharegpt("human", "gpt", tools=tools)
    assert isinstance(outcome, Conversation) and outcome.tools == expected


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ("[{", "tools is not valid JSON"),
        ({"name": "f"}, "tools is not a list of objects"),
        ('{"name": "f"}', "tools is not a list of objects"),
        (["f"], "tools is not a list of objects"),
    ],
)
def test_other_tools_are_dropped(tools: Any, why: str) -> None:
    assert reason(sharegpt("human", "gpt", tools=tools)) == why


# OpenAI


def openai(*messages: dict[str, Any], **columns: Any) -> Conversation | Dropped:
    return of(OPENAI, messages=list(messages), **columns)


USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "r"}
RESULT = {"role": "tool", "content": "t"}


@pytest.mark.parametrize("arguments", [{"城": [1, None]}, '{"城": [1, null]}', '{"\\u57ce":[1,null]}'])
@pytest.mark.parametrize("nested", [True, False])
def test_openai_arguments_as_a_value_or_as_text_are_the_same(arguments: Any, nested: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function} if nested else function
    outcome = openai(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT, REPLY)
    assert isinstance(outcome, Conversation)
    assert outcome.turns[1] == Message("assistant", "", tool_calls=(ToolCall("f", {"城": [1, None]}),))


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    call = {"role": "assistant", "function_call": {"name": "f", "arguments": arguments}}
    outcome = openai(USER, call, RESULT, REPLY)
    assert isinstance(outcome, Conversation) and outcome.turns[1].tool_calls == (ToolCall("f", {}),)


@pytest.mark.parametrize("none", [None, [], ""])
def test_openai_null_calls_and_content_in_parts(none: Any) -> None:
    parts = [{"type": "text", "text": "r"}, {"type": "text", "text": "s"}]
    outcome = openai(
        USER, {"role": "assistant", "content": parts, "tool_calls": none, "reasoning_content": none or None}
    )
    assert turns(outcome) == [("user", "q"), ("assistant", "rs")]
    assert isinstance(outcome, Conversation) and outcome.turns[1] == Message("assistant", "rs")
    assert reason(openai(USER, {"role": "assistant", "content": none})) == "empty reply"


def test_openai_keeps_reasoning_apart_and_injects_no_system_message() -> None:
    outcome = openai(USER, {**REPLY, "reasoning_content": "why"})
    assert isinstance(outcome, Conversation)
    assert outcome.turns[1].reasoning == "why" and outcome.system is None


def test_openai_developer_and_function_roles() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    outcome = openai(
        {"role": "developer", "content": "S"}, USER, call, {"role": "function", "content": "t"}, REPLY
    )
    assert isinstance(outcome, Conversation) and outcome.system == "S"
    assert [turn.role for turn in outcome.turns] == ["user", "assistant", "tool", "assistant"]


def test_a_picture_in_the_content_is_dropped() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    assert reason(openai(picture, REPLY)) == "turn holds a part that is not text"
