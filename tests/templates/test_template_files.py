"""User-supplied templates: YAML in the package's own format, jinja in place of the tokenizer's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.families import as_messages
from support.tokenizers import CHATML, byte_tokenizer, trained_text

from shardyard.data.encode import Encoder
from shardyard.data.templates import build_template
from shardyard.data.templates.build import exported_chat_template
from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError

TALK = Conversation(
    (Message("user", "Q1"), Message("assistant", "R1"), Message("user", "Q2"), Message("assistant", "R2")),
    "S",
)

MINE = r"""
about: mine
tokens: ["<|end|>"]
eos: "<|end|>"
prefix: "{bos}"
system: "SYS {content}\n"
user: "ASK {content}\n"
assistant:
  header: "SAY "
  end: "<|end|>\n"
results:
  each: "GOT {content}\n"
tools:
  calls:
    each: "CALL {name} {arguments}"
    between: "; "
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<s>"
    path = write(tmp_path, MINE)
    samples = Encoder(tokenizer, template=path).encode(TALK)
    text = "<s>SYS S\nASK Q1\nSAY R1<|end|>\nASK Q2\nSAY R2<|end|>\n"
    assert [sample.input_ids.tolist() for sample in samples] == [tokenizer(text)["input_ids"]]  # type: ignore[union-attr]
    assert trained_text(tokenizer, samples) == [["R1<|end|>\n", "R2<|end|>\n"]]
    assert tokenizer.eos_token == "<|end|>"
    tokenizer.chat_template = exported_chat_template(path)
    assert tokenizer.apply_chat_template(as_messages(TALK), tokenize=False) == text


def test_a_file_s_own_tool_format(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<s>"
    calls = (ToolCall("f", {"a": 1}), ToolCall("g", {}))
    turns = (
        Message("user", "Q"),
        Message("assistant", "", tool_calls=calls),
        Message("tool", "X"),
        Message("assistant", "R"),
    )
    samples = Encoder(tokenizer, template=write(tmp_path, MINE)).encode(Conversation(turns))
    assert trained_text(tokenizer, samples) == [['CALL f {"a": 1}; CALL g {}<|end|>\n', "R<|end|>\n"]]
    assert tokenizer.decode(samples[0].input_ids).endswith("GOT X\nSAY R<|end|>\n")  # type: ignore[index]


def test_a_jinja_file_takes_the_place_of_the_tokenizer_s_own(tmp_path: Path) -> None:
    path = write(tmp_path, CHATML, "mine.jinja")
    with_own = byte_tokenizer("{{ raise_exception('not this one') }}")
    for tokenizer in (byte_tokenizer(None), with_own):
        samples = Encoder(tokenizer, template=path).encode(TALK)
        assert trained_text(tokenizer, samples) == [["R1<|im_end|>\n", "R2<|im_end|>\n"]]
    assert exported_chat_template(path) == CHATML
    assert exported_chat_template(None) is None


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("user: 'Q'\nassistant: {}\nuzer: x\n", 3, "uzer: no such key; did you mean user?"),
        ("user: 'Q'\nassistant:\n  header: a\n  ending: b\n", 4, "assistant.ending: no such key"),
        ("user: 'Q'\nassistant:\n  header: 3\n", 3, "assistant.header: Input should be a valid string"),
        ("user: 'Q'\nasistant: {}\n", 2, "asistant: no such key; did you mean assistant?"),
        ("assistant: {}\n", 1, "user: this key is missing"),
        ("user: 'Q'\nassistant: {}\n\ntools_at: nowhere\n", 4, "tools_at: Input should be 'system'"),
        ("user: 'Q'\nassistant: {}\ntrim: [tool]\n", 3, "trim.0: Input should be 'system'"),
        ("user: 'Q'\n  assistant: {}\n", 2, "not valid YAML"),
        ("user: !!python/object/apply:os.system [ls]\nassistant: {}\n", 1, "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        build_template(path, byte_tokenizer())
    assert str(caught.value).startswith(f"{path}:{line}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_template_at_all_is_refused_in_one_line(tmp_path: Path) -> None:
    cases = {
        write(tmp_path, "- a\n", "list.yaml"): "a template is a mapping of keys",
        write(tmp_path, "", "empty.yml"): "a template is a mapping of keys",
        str(tmp_path / "missing.yaml"): "cannot read .*No such file",
        str(tmp_path / "missing.jinja"): "cannot read .*No such file",
        str(tmp_path / "mine.txt"): "a template file ends in .yaml or .jinja",
        write(tmp_path, "user: Q\nassistant: {}\ntools: qwem\n", "tools.yaml"): "'qwem' is not a tool format",
        "lama3": r"'lama3' is not a template; did you mean llama3\?",
        "QWEN3": r"did you mean qwen3\?",
    }
    (tmp_path / "latin.yaml").write_bytes(b"user: \xe9\n")
    cases[str(tmp_path / "latin.yaml")] = "not UTF-8"
    (tmp_path / "folder.yaml").mkdir()
    cases[str(tmp_path / "folder.yaml")] = "cannot read"
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            build_template(name, byte_tokenizer())
        assert "\n" not in str(caught.value)


def test_tokens_that_the_tokenizer_lacks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "tokens: ['<|mine|>', '<|end|>']\nuser: Q\nassistant: {}\n")
    with pytest.raises(UserError, match=r"needs the tokens <\|mine\|>, which the tokenizer"):
        build_template(path, byte_tokenizer())
    with pytest.raises(UserError, match=r"needs the tokens <start_of_turn> and <end_of_turn>"):
        tokenizer = byte_tokenizer()
        tokenizer.bos_token = "<s>"
        build_template("gemma", tokenizer)
    with pytest.raises(UserError, match="llama3 needs a bos token"):
        build_template("llama3", byte_tokenizer())
