"""What is to be answered: prompts of the command line, of a file, of standard input. No torch is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardyard.errors import UserError
from shardyard.infer.asked import Asked

Format = Literal["text", "lines", "jsonl"]
FORMATS: dict[str, Format] = {".txt": "lines", ".jsonl": "jsonl"}
"""Ending of a file -> how it is read."""
ANSWER_KEYS = (
    "text", "tokens", "finish_reason", "prompt_tokens", "answer", "score", "reasoning", "content",
    "tool_calls", "error",
)  # fmt: skip
"""What the answer adds to a row, besides ``logprobs`` and ``seed``, which a row may ask for."""
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "max_new_tokens": ((int,), "a whole number"),
    "do_sample": ((bool,), "true or false"),
    "temperature": ((int, float), "a number"),
    "top_p": ((int, float), "a number"),
    "top_k": ((int,), "a whole number"),
    "min_p": ((int, float), "a number"),
    "repetition_penalty": ((int, float), "a number"),
    "presence_penalty": ((int, float), "a number"),
    "frequency_penalty": ((int, float), "a number"),
    "seed": ((int,), "a whole number"),
    "logprobs": ((int,), "a whole number"),
    "n": ((int,), "a whole number"),
}
"""Sampling of one row, and what its value is."""
_MOST_DIGITS = 2**63


@dataclass(frozen=True)
class Row:
    """One prompt, as text or as messages in OpenAI's form. ``where`` is for messages: ``file:line``."""

    where: str
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    asked: Asked = field(default_factory=Asked)
    n: int | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The row as it was read, for the row that answers it."""


def prompts_of_words(prompts: Sequence[str]) -> list[Row]:
    """The values of ``--prompt``."""
    return [
        _text_row(f"--prompt {number}" if len(prompts) > 1 else "--prompt", prompt)
        for number, prompt in enumerate(prompts, 1)
    ]


def format_of(path: Path, wanted: Format | None) -> Format:
    """How a file is read: as ``wanted``, or by its ending.

    Raises:
        UserError: an ending that says nothing.
    """
    if wanted is not None:
        return wanted
    if path.suffix not in FORMATS:
        raise UserError(
            f"--prompt-file {path}: the ending says how a file is read, {' or '.join(FORMATS)}; or say "
            "--prompt-format text, lines or jsonl"
        )
    return FORMATS[path.suffix]


def prompts_of_file(path: Path, form: Format) -> list[Row]:
    """The rows of a file.

    Raises:
        UserError: a file that cannot be read, or a row (``file:line``) that is none.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--prompt-file {path}: {error.strerror or error}") from error
    return prompts_of_text(content, form, str(path))


def prompts_of_text(content: bytes, form: Format, name: str) -> list[Row]:
    """``text``: one prompt; ``lines``: one a line; ``jsonl``: one JSON object a line. At least one.

    Raises:
        UserError: as `prompts_of_file`.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: not UTF-8 (byte {content[error.start]:#04x})") from error
    if form == "text":
        return [_text_row(name, text.removesuffix("\n").removesuffix("\r"))]
    rows = [_line_row(where, line, form) for where, line in _lines(text, name)]
    if not rows:
        raise UserError(f"{name}: the file is empty; there is nothing to answer")
    return rows


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Lines end at newlines only: text and JSON may hold Unicode's other separators."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield f"{name}:{number}", line.removesuffix("\r")


def _line_row(where: str, line: str, form: Format) -> Row:
    if not line.strip():
        hint = "; a prompt of several lines goes into a .jsonl file" if form == "lines" else ""
        raise UserError(f"{where}: the line is empty{hint}")
    return _text_row(where, line) if form == "lines" else _json_row(where, line)


def _text_row(where: str, prompt: str) -> Row:
    if not prompt.strip():
        raise UserError(f"{where}: the prompt is empty")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt is not valid Unicode (half of a surrogate pair)") from None
    return Row(where, prompt=prompt, kept={"prompt": prompt})


def _json_row(where: str, line: str) -> Row:
    try:
        found = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f'{where}: a JSON object is wanted, such as {{"prompt": "..."}}')
    if ("prompt" in found) == ("messages" in found):
        what = "both are there" if "prompt" in found else f"found {', '.join(found) or 'nothing'}"
        raise UserError(f"{where}: a row has prompt or messages; {what}")
    if taken := [key for key in ANSWER_KEYS if key in found]:
        raise UserError(f"{where}: the answer writes {taken[0]}; give the row's key another name")
    if "num_beams" in found:
        raise UserError(f"{where}: num_beams is one for all rows: --num-beams")
    asked, n = _asked(where, found)
    row = Row(where, messages=found.get("messages"), tools=found.get("tools"), asked=asked, n=n, kept=found)
    if row.tools is not None and not isinstance(row.tools, list):
        raise UserError(f"{where}: tools is a list of functions, or left out")
    if "prompt" in found:
        if not isinstance(found["prompt"], str):
            raise UserError(f"{where}: prompt is text; a conversation goes under messages")
        prompt = _text_row(where, found["prompt"]).prompt
        return Row(where, prompt=prompt, tools=row.tools, asked=asked, n=n, kept=found)
    if not isinstance(row.messages, list) or not row.messages:
        raise UserError(f"{where}: messages is a list of at least one message")
    return row


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _asked(where: str, found: Mapping[str, Any]) -> tuple[Asked, int | None]:
    """The sampling that a row asks for; null leaves a setting to the command line."""
    values: dict[str, Any] = {}
    for key, (kinds, words) in _KINDS.items():
        value = found.get(key)
        if value is None:
            continue
        if key == "logprobs" and isinstance(value, bool):
            value = 0 if value else None
        elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{where}: {key}: {value!r} is not {words}")
        elif isinstance(value, int) and not -_MOST_DIGITS < value < _MOST_DIGITS:
            raise UserError(f"{where}: {key}: the number is too large")
        values[key] = value
    n = values.pop("n", None)
    if n is not None and n < 1:
        raise UserError(f"{where}: n: {n} is out of range; at least 1")
    if values.get("seed", 0) < 0:
        raise UserError(f"{where}: seed: {values['seed']} is out of range; at least 0")
    if (stop := found.get("stop")) is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"{where}: stop: a text or a list of texts is wanted, none of them empty")
        values["stop"] = texts
    return Asked.of(values), n


@dataclass(frozen=True)
class Wanted:
    """What a command says for all its rows."""

    asked: Asked = field(default_factory=Asked)
    n: int = 1
    raw: bool = False
    """Prompts are gone on from as they are, though the model has a chat template."""
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
