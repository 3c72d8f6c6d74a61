"""Rows of ranking entries -> a prompt with a chosen and a rejected reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.data.converters import convert_pair
from shardyard.data.dropped import Dropped
from shardyard.data.sources import Columns, DatasetEntry, Row, Tags
from shardyard.data.sources.entry import OPENAI_COLUMNS, OPENAI_TAGS
from shardyard.data.types import Conversation, Message, PreferencePair, ToolCall

BOTH = {"chosen": "chosen", "rejected": "rejected"}
FILES = (Path("p.json"),)
ALPACA = DatasetEntry(
    "a", FILES, columns=Columns(history="history", system="system", tools="tools", **BOTH), ranking=True
)
SHAREGPT = DatasetEntry("s", FILES, "sharegpt", Columns(system="system", tools="tools", **BOTH), ranking=True)
OPENAI = DatasetEntry(
    "o",
    FILES,
    "openai",
    Columns(messages=OPENAI_COLUMNS.messages, tools=OPENAI_COLUMNS.tools, **BOTH),
    OPENAI_TAGS,
    ranking=True,
)

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}


def of(entry: DatasetEntry, **data: Any) -> PreferencePair | Dropped:
    return convert_pair(Row(data, "f:7"), entry)


def reason(outcome: PreferencePair | Dropped) -> str:
    assert isinstance(outcome, Dropped), outcome
    assert outcome.where == "f:7"
    return outcome.reason


def test_alpaca_columns_hold_the_two_texts() -> None:
    outcome = of(
        ALPACA,
        instruction="I",
        input="X",
        history=[["q0", "r0"]],
        system="S",
        tools='[{"name": "f"}]',
        chosen="good",
        rejected="bad",
    )
    prompt = (Message("user", "q0"), Message("assistant", "r0"), Message("user", "I\nX"))
    good, bad = Message("assistant", "good"), Message("assistant", "bad")
    assert outcome == PreferencePair(prompt, good, bad, "S", ({"name": "f"},), "f:7")
    assert outcome.conversation(outcome.rejected) == Conversation(
        (*prompt, bad), "S", ({"name": "f"},), "f:7"
    )


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"from": "gpt", "value": "good"}, {"from": "gpt", "value": "bad"}),
        ([{"from": "gpt", "value": "good"}], [{"from": "gpt", "value": "bad"}]),
        (json.dumps({"from": "gpt", "value": "good"}), json.dumps([{"from": "gpt", "value": "bad"}])),
        ("good", "bad"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_sharegpt_replies_are_messages_or_texts(good: Any, bad: Any, as_text: bool) -> None:
    turns: Any = [{"from": "system", "value": "S"}, {"from": "human", "value": "q"}]
    outcome = of(
        SHAREGPT, conversations=json.dumps(turns) if as_text else turns, chosen=good, rejected=bad, system="c"
    )
    good, bad = Message("assistant", "good"), Message("assistant", "bad")
    assert outcome == PreferencePair((Message("user", "q"),), good, bad, "S", (), "f:7")


def test_openai_replies_may_think_and_call_after_a_tools_result() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
    ]
    again = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"}
    outcome = of(OPENAI, messages=turns, chosen=again, rejected=BAD, tools=[{"name": "f"}])
    assert isinstance(outcome, PreferencePair)
    assert [turn.role for turn in outcome.prompt] == ["user", "assistant", "tool"]
    assert outcome.chosen == Message("assistant", "", "why", (ToolCall("f", {"x": 1}),))
    assert outcome.rejected == Message("assistant", "bad") and outcome.tools == ({"name": "f"},)


@pytest.mark.parametrize("text", ['{"answer": 42}', "[1, 2]", "{not json", '{"role": ', "[]"])
def test_a_reply_that_is_itself_json_stays_text(text: str) -> None:
    outcome = of(OPENAI, messages=[USER], chosen=text, rejected="bad")
    assert isinstance(outcome, PreferencePair) and outcome.chosen == Message("assistant", text)
    outcome = of(ALPACA, instruction="I", chosen=json.dumps(GOOD), rejected="bad")
    assert isinstance(outcome, PreferencePair) and outcome.chosen.content == json.dumps(GOOD)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"chosen": None}, "chosen is empty"),
        ({"rejected": " \n"}, "rejected is empty"),
        ({"rejected": {"role": "assistant", "content": []}}, "rejected is empty"),
        ({"chosen": USER}, "chosen is not a reply of the assistant"),
        ({"chosen": {"role": "system", "content": "s"}}, "chosen is not a reply of the assistant"),
        ({"chosen": [GOOD, BAD]}, "chosen holds a part that is not text"),
        ({"chosen": 5}, "chosen is not text but int"),
        ({"chosen": {"role": "critic", "content": "x"}}, "unknown role 'critic'"),
        ({"chosen": {**GOOD, "weight": 0}}, "chosen is not to be trained (weight: 0 or train: false)"),
        ({"chosen": {**GOOD, "weight": 3}}, "weight must be 0 or 1"),
        ({"rejected": GOOD}, "chosen and rejected are the same"),
        ({"rejected": "good"}, "chosen and rejected are the same"),
        ({"messages": [USER, GOOD]}, "the prompt ends with a reply"),
        ({"messages": []}, "no turns"),
        ({"messages": None}, "no turns"),
        ({"messages": [{"role": "system", "content": "s"}]}, "begins with the assistant"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty prompt"),
        ({"messages": [USER, USER]}, "two user turns in a row"),
        ({"tools": "[{"}, "tools is not valid JSON"),
    ],
)
def test_a_pair_that_cannot_be_used_is_dropped_with_its_reason(changed: dict[str, Any], why: str) -> None:
    row: dict[str, Any] = {"messages": [USER], "chosen": GOOD, "rejected": BAD}
    assert reason(of(OPENAI, **{**row, **changed})) == why


def test_an_alpaca_pair_without_a_prompt_is_dropped() -> None:
    assert reason(of(ALPACA, instruction="", chosen="good", rejected="bad")) == "empty prompt"
    assert reason(of(ALPACA, instruction="I", chosen="good")) == "rejected is empty"


def test_tags_name_the_roles_of_the_replies_too() -> None:
    tags = Tags(role_tag="who", content_tag="text", user_tag="U", assistant_tag="A")
    entry = DatasetEntry("t", FILES, "sharegpt", Columns(messages="talk", **BOTH), tags, ranking=True)
    outcome = of(entry, talk=[{"who": "U", "text": "q"}], chosen={"who": "A", "text": "good"}, rejected="bad")
    assert isinstance(outcome, PreferencePair) and outcome.chosen.content == "good"
