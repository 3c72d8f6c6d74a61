"""A talk on an engine that says what the test wants: history, room, Ctrl-C, and the terminal's words."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.families import family_template
from support.tokenizers import byte_tokenizer

from shardyard.cli.chat import Loop, read_chat
from shardyard.cli.chat_screen import Screen
from shardyard.data.types import Message, ToolCall
from shardyard.errors import UserError
from shardyard.infer.chat import Talk
from shardyard.infer.chat_format import ChatFormat
from shardyard.infer.replies import Delta
from shardyard.infer.types import Finished, Load, Request, Sampling, Token

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@cache
def tokenizer() -> Any:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    return byte_tokenizer(family_template("qwen3"), special=special, eos="<|im_end|>")


@cache
def chat_format() -> ChatFormat:
    return ChatFormat(tokenizer())


class Parrot:
    """An engine that says the next of ``lines``, token by token."""

    fault: str | None = None

    def __init__(self, lines: Sequence[str], context_length: int = 10_000) -> None:
        self.context_length = context_length
        self.lines = list(lines)
        self.requests: list[Request] = []
        self.cancelled: list[str] = []

    def submit(self, request: Request, deliver: Callable[[Any], None]) -> str:
        self.requests.append(request)
        for token_id in tokenizer()(self.lines.pop(0), add_special_tokens=False)["input_ids"]:
            deliver(Token(token_id))
            if token_id in request.sampling.stop_ids:
                deliver(Finished("stop"))
                break
        else:
            deliver(Finished("length"))
        return str(len(self.requests))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def load(self) -> Load:
        return Load(0, 0, 0, 0)

    def close(self) -> None: ...

    def shown(self, number: int) -> str:
        return tokenizer().decode(list(self.requests[number].prompt_ids))


def talk_of(engine: Parrot, **options: Any) -> Talk:
    return Talk(engine, tokenizer(), chat_format(), Sampling(max_new_tokens=8), **options)


def quiet(_: Delta) -> None: ...


def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    talk: Talk,
    typed: str,
    **options: Any,
) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    Loop(talk, **options).run("model")
    return tuple(capsys.readouterr())  # pyright: ignore[reportReturnType]


def test_the_history_is_shown_and_retried() -> None:
    engine = Parrot(["One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>"])
    talk = talk_of(engine, system="S")
    assert talk.ask("a", quiet).reply.content == "One."
    assert talk.ask("b", quiet).reason == "stop"
    assert talk.retry(quiet).reply.content == "Three."
    assert [turn.content for turn in talk.turns] == ["a", "One.", "b", "Three."]
    assert engine.shown(1) == engine.shown(2)
    asked = chat_format().ids(type(talk.conversation())((*talk.turns[:3],), "S"))
    assert list(engine.requests[1].prompt_ids) == asked
    talk.clear()
    assert talk.turns == [] and talk.system == "S"
    with pytest.raises(UserError, match="nothing to answer"):
        talk.retry(quiet)


def test_calls_and_their_results() -> None:
    engine = Parrot([f"<think>\nhm\n</think>\n\nWait.\n{CALL}\n{CALL}<|im_end|>", "Done.<|im_end|>"])
    talk = talk_of(engine, tools=TOOLS)
    with pytest.raises(UserError, match="no call"):
        talk.result("1")
    answered = talk.ask("a", quiet)
    assert answered.reply.tool_calls == (ToolCall("f", {"a": 1}),) * 2
    assert talk.turns[1] == Message("assistant", "Wait.", "hm", answered.reply.tool_calls)
    assert (talk.result("1"), talk.result("2")) == (False, True)
    assert talk.go_on(quiet).reply.content == "Done."
    assert "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>" in engine.shown(1)


def test_what_has_no_room_is_dropped_from_the_beginning() -> None:
    engine = Parrot([f"{n}.<|im_end|>" for n in range(4)], context_length=130)
    talk = talk_of(engine)
    dropped = [talk.ask(letter * 20, quiet).dropped for letter in "abcd"]
    assert sum(dropped) > 0 and not dropped[0]
    assert "aaaa" not in engine.shown(3) and "dddd" in engine.shown(3)
    assert talk.turns[0].role == "user" and len(talk.turns) == 8 - sum(dropped)
    before = list(talk.turns)
    with pytest.raises(UserError, match=r"130.*Shorten it"):
        talk.ask("x" * 200, quiet)
    assert talk.turns == before


def test_ctrl_c_keeps_what_was_said() -> None:
    engine = Parrot(["Hello there.<|im_end|>", "Yes.<|im_end|>"])
    talk = talk_of(engine)
    said: list[str] = []

    def interrupted(delta: Delta) -> None:
        said.append(delta.content)
        if len(said) == 4:
            raise KeyboardInterrupt

    answered = talk.ask("a", interrupted)
    assert (answered.reason, answered.reply.content, engine.cancelled) == ("interrupted", "Hell", ["1"])
    assert talk.ask("b", quiet).reply.content == "Yes."
    assert [turn.content for turn in talk.turns] == ["a", "Hell", "b", "Yes."]


def test_an_empty_answer_is_no_message() -> None:
    talk = talk_of(Parrot(["<|im_end|>", "Yes.<|im_end|>"]))
    assert talk.ask("a", quiet).reply.content == ""
    assert [turn.content for turn in talk.turns] == ["a"]


def test_a_stop_text_ends_the_answer() -> None:
    engine = Parrot(["One. Two."])
    answered = talk_of(engine, stop=(". ",)).ask("a", quiet)
    assert (answered.reply.content, answered.reason, engine.cancelled) == ("One", "stop", ["1"])


def test_piped_input_is_a_message_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = Parrot([f"{n}.<|im_end|>" for n in range(9)])
    file = tmp_path / "talk.jsonl"
    typed = (
        f'Hi\n\n/retry\na\\\nb\n"""\n/c\n\nd\n"""\n/save {file}\n/nope\nnew\n/system Be brief.\ne\nexit\nf\n'
    )
    out, err = run(monkeypatch, capsys, talk_of(engine), typed, stats=True)
    assert out == "0.\n1.\n2.\n3.\n4.\n"
    assert "/nope: no such command" in err and err.count("tokens/s)") == 5
    [row] = map(json.loads, file.read_text().splitlines())
    assert [message["content"] for message in row["messages"]] == ["Hi", "1.", "a\nb", "2.", "/c\n\nd", "3."]
    assert "system\nBe brief." in engine.shown(4) and "Hi" not in engine.shown(4)


def test_faults_do_not_end_the_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    typed = f"/retry\n/save\n/save {tmp_path}\n/result x\n\ud800\nHi\n/save {tmp_path}\n"
    out, err = run(monkeypatch, capsys, talk_of(Parrot(["1.<|im_end|>"])), typed)
    assert out == "1.\n"
    assert err.count("error: ") == 6


def test_thoughts_and_calls_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"<think>\nhm\n</think>\n\nWait.\n{CALL}<|im_end|>"
    shown = 'Wait.\n[call] f({"a": 1})\n'
    out, err = run(monkeypatch, capsys, talk_of(Parrot([line]), tools=TOOLS), "Hi\n")
    assert out == shown and "/result TEXT" in err
    out, _ = run(monkeypatch, capsys, talk_of(Parrot([line]), tools=TOOLS), "Hi\n", thoughts=True)
    assert out == "<think>\nhm\n</think>\n" + shown


def test_an_answer_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    screen = Screen(thoughts=True, out=out)
    for delta in (Delta(reasoning="a\x1b[31m"), Delta(content="b\x1b]0;t\x07\tc\x9b")):
        screen.show(delta)
    screen.end()
    assert out.getvalue() == "\x1b[2ma\\x1b[31m\n\x1b[0m\nb\\x1b]0;t\\x07\tc\\x9b\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model"),
        (["--model", "m", "--tools", "/no/such"], "--tools /no/such: No such file"),
        (["--model", "m", "--top-p", "2"], "--top-p"),
        (["--model", "m", "--colour"], "--colour"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_chat(words)


def test_wrong_tools_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    for text, message in (("[{}]", r"tools\[0\].name"), ("{", "not JSON"), ("3", "a list of functions")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            read_chat(["--model", "m", "--tools", str(file)])
