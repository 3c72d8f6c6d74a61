"""The prompt loops of the reference's scripts: their words, their history, and what ends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardyard.errors import UserError
from shardyard.infer.answers import Answer
from shardyard.infer.plan import Task, TooLongError
from shardyard.infer.prompts import Row
from shardyard.infer.talk import FSDP2, Manner, megatron, talk
from shardyard.infer.types import Request


def conversation(manner: Manner, lines: Iterable[str], room: int = 99) -> tuple[str, list[list[str]]]:
    """(what the screen shows, the contents that each answer was asked with); ``room``: messages that fit."""
    screen: list[str] = []
    asked: list[list[str]] = []
    left = iter(lines)

    def read(shown: str) -> str:
        screen.append(shown)
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    def planner(rows: list[Row]) -> list[Task]:
        if len(rows[0].messages or []) > room or "long" in str(rows[0].messages[-1]):  # type: ignore[index]
            raise TooLongError("this message: too long")
        return [Task(rows[0], 0, Request((1,)))]

    def ask(task: Task, write: Any) -> Answer:
        messages = task.row.messages or []
        asked.append([message["content"] for message in messages])
        if messages[-1]["content"] == "bad":
            return Answer(finish_reason="error", error="NaN")
        if messages[-1]["content"] == "foreign":
            raise UserError("token id 9 is not in the vocabulary of 5")
        text = messages[-1]["content"].upper()
        write(text)
        return Answer(text, finish_reason="stop")

    talk(manner, planner, ask, read, lambda text: screen.append(text))  # type: ignore[arg-type]
    return "".join(screen), asked


def test_the_fsdp2_loop_has_the_references_words():
    screen, asked = conversation(FSDP2, ["hi", "", "there", "EXIT", "never"])
    rule = "-" * 40
    assert screen == (
        ">>> Entering Interactive Chat Mode. Type 'exit' to quit.\n"
        f"\nUser: Assistant: HI\n{rule}\n\nUser: \nUser: Assistant: THERE\n{rule}\n\nUser: \n"
    )
    assert asked == [["hi"], ["hi", "HI", "there"]]


def test_the_input_s_end_leaves_and_a_fault_is_told_and_forgotten():
    screen, asked = conversation(FSDP2, ["hi", "long", "bad", "foreign", "there"])
    assert "no answer: token id 9" in screen
    assert "this message: too long\n" in screen and "no answer: NaN\n" in screen
    assert asked == [["hi"], *(["hi", "HI", last] for last in ("bad", "foreign", "there"))]


def test_the_oldest_turns_are_dropped_where_all_do_not_fit():
    screen, asked = conversation(FSDP2, ["a", "b", "c"], room=3)
    assert asked[-1] == ["b", "B", "c"] and "(1 earlier turn(s) do not fit" in screen


def test_the_megatron_loop_forgets_and_keeps_few_turns():
    _, asked = conversation(megatron(1), ["a", "b", "c", "clear", "d", "q", "e"])
    assert asked == [["a"], ["a", "A", "b"], ["b", "B", "c"], ["d"]]
    _, asked = conversation(megatron(0), ["a", "b"])
    assert asked == [["a"], ["b"]]
