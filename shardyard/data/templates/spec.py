"""The declarative template: what a template file may hold, and reading one.

A file is YAML; its texts are *slots*, in which ``{content}`` stands for the message. ``{bos}`` and ``{eos}``
stand for the tokenizer's own tokens in any slot. All other braces are plain text. Nothing in a file is code.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from shardyard.errors import UserError

_PACKAGE = "shardyard.data.templates"

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Modes = Annotated[tuple[bool | None, ...], BeforeValidator(_as_tuple)]


class ToolList(_Part):
    """How the tools are told to the model: ``before``, each tool with ``between`` in between, ``after``.

    ``each`` knows ``{json}`` (the tool as the row has it), ``{name}``, ``{description}`` and ``{parameters}``
    (a line per parameter); ``after`` knows ``{names}``.
    """

    before: str = ""
    each: str = "{json}"
    between: str = ""
    after: str = ""
    indent: int | None = None
    """Of ``{json}``; null writes it on one line."""
    wrap: bool = False
    """``{json}`` of a bare function gets OpenAI's ``type`` and ``function`` around it."""


class ToolCalls(_Part):
    """How a reply's calls are written.

    ``each`` knows ``{name}``, ``{name_json}``, ``{arguments}`` (JSON) and ``{each_argument}``, which is
    ``argument`` once per argument, with ``{key}`` and ``{value}`` (text as it is, other values as JSON).
    """

    before: str = ""
    each: str
    between: str = "\n"
    after: str = ""
    after_words: str = ""
    """Between words of the reply and its calls."""
    argument: str = ""
    words: bool = True
    """Whether a reply may both speak and call."""
    most: int | None = None
    """Calls in one reply."""
    rounds: int | None = None
    """Replies with calls in one conversation."""


class ToolFormat(_Part):
    """``list`` null: the tools are not shown, and rows with tools are dropped; ``calls`` alike."""

    about: str = ""
    list: ToolList | None = None
    calls: ToolCalls | None = None


class Results(_Part):
    """Tool results in a row; ``each`` knows ``{content}`` and ``{json}`` (the content as a JSON text)."""

    before: str = ""
    each: str = "{content}"
    between: str = ""
    after: str = ""


class Assistant(_Part):
    """``header`` is given; ``text`` (left out where the reply has no words) and ``end`` are trained."""

    header: str = ""
    header_after_results: str | None = None
    """Null: the same header."""
    text: str = "{content}"
    end: str = ""
    ended_by: Texts = ()
    """For a family without an end-of-turn token: the markers of the next turn, one of which ends a reply (the
    first one words, the last one calls). It is trained with the reply before it, also after the last reply,
    where it is not written."""


class Thinking(_Part):
    """What becomes of a thought, inline (``<think>...</think>`` in the text) or given apart."""

    inline: Literal["keep", "cut", "apart"] = "keep"
    """An inline thought is left as it is; cut off with all before it; or read like one given apart."""
    cut_plain_only: bool = False
    """``cut`` spares replies that call or that follow tool results."""
    open: str = ""
    close: str = ""
    """Around a thought given apart; both empty: it is left out."""
    open_given: bool = False
    """``open`` is the end of the prompt."""
    trim: bool = False
    """White space around a thought goes; else only its line ends."""
    marks: Annotated[tuple[str, str], BeforeValidator(_as_tuple)] = ("<think>", "</think>")
    """What an inline thought stands between."""
    empty: str = ""
    """In front of a reply without a thought."""
    empty_given: Modes = ()
    """The values of ``data.enable_thinking`` under which the empty thought ends the prompt; else trained."""
    earlier: Literal["keep", "leave_out"] = "keep"
    """Thoughts of replies before the last question."""


class TemplateSpec(_Part):
    """One template. Sections of a sample in order: prefix, tools (unless elsewhere), system, turns, end."""

    about: str = ""
    aliases: Texts = ()
    tokens: Texts = ()
    """Texts that must be one token each in the tokenizer."""
    eos: str | None = None
    """Becomes the tokenizer's eos token."""
    pieces: Literal["whole", "apart"] = "whole"
    """The ids of the whole text, or of each prompt and each reply for itself."""
    trains_prompt: bool = True
    """Whether ``data.train_on_prompt`` may be used."""
    prefix: str = ""
    system: str | None = None
    """Null: the system message goes into the first question, or there is no place for it."""
    system_with_tools: str | None = None
    """In place of ``system`` where the row has tools."""
    system_always: bool = False
    system_in_user: str | None = None
    """In front of the first question's text."""
    default_system: str = ""
    user: str
    user_without_thinking: str = ""
    """Ends a question's text under ``data.enable_thinking: false``, unless it is there."""
    separator: str = ""
    """In front of a question that is not the first."""
    assistant: Assistant
    results: Results | None = None
    """Null: a question that holds them."""
    end: str = ""
    """After the last reply, trained."""
    trim: Annotated[tuple[Literal["system", "user", "assistant"], ...], BeforeValidator(_as_tuple)] = ()
    """Messages whose outer white space goes."""
    thinking: Thinking = Thinking()
    tools: str | ToolFormat | None = None
    """A tool format: its name, or written here; null: rows with tools are dropped."""
    tools_at: Literal["system", "prefix", "first_user"] = "system"
    """At the end of the system text, in ``tools_slot`` before it, or in front of the first question."""
    tools_slot: str = "{content}"

    @property
    def result_style(self) -> Results:
        """``results``, or a question with a line for each of them."""
        if self.results is not None:
            return self.results
        before, _, after = self.user.partition("{content}")
        return Results(before=self.separator + before, between="\n", after=after)


_Spec = TypeVar("_Spec", bound=_Part)


def fill(slot: str, **values: str) -> str:
    """The slot with its placeholders filled, in one pass; braces of another kind stay."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), slot)


def known_templates() -> dict[str, tuple[str, ...]]:
    """Every template name of this package, with its other names."""
    return {name: load_named(name).aliases for name in _names("named")}


def known_tool_formats() -> tuple[str, ...]:
    """Every name that ``data.tool_format`` may have."""
    return _names("tool_formats")


@cache
def load_named(name: str) -> TemplateSpec:
    """A template of this package; ``name`` is one of ``known_templates``."""
    return _read(files(_PACKAGE) / "named" / f"{name}.yaml", TemplateSpec, f"template {name}")


@cache
def load_tool_format(name: str) -> ToolFormat:
    """A tool format of this package; ``name`` is one of ``known_tool_formats``."""
    return _read(files(_PACKAGE) / "tool_formats" / f"{name}.yaml", ToolFormat, f"tool format {name}")


def load_file(path: Path) -> TemplateSpec:
    """A user's template.

    Raises:
        UserError: the file is missing or not YAML, or holds something else than a template (with its line).
    """
    return _read(path, TemplateSpec, str(path))


def read_text(path: Path) -> str:
    """The text of a user's file. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"data.template: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.template: {path} is not UTF-8 text") from error


def _names(folder: str) -> tuple[str, ...]:
    entries = (files(_PACKAGE) / folder).iterdir()
    return tuple(sorted(entry.name[:-5] for entry in entries if entry.name.endswith(".yaml")))


def _read(path: Any, kind: type[_Spec], where: str) -> _Spec:
    text = read_text(path)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: a template is a mapping of keys; see docs/templates.md")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # A misspelt key is two faults, one too many and one that is missing: the one that stands in the file
        faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        first = faults[0]
        key = ".".join(map(str, first["loc"]))
        line = _line(yaml.compose(text, yaml.SafeLoader), first["loc"])
        said = first["msg"]
        if first["type"] == "extra_forbidden":
            said = f"no such key{_nearest(kind, first['loc'])}"
        elif first["type"] == "missing":
            said = "this key is missing"
        raise UserError(f"{where}:{line}: {key}: {said}; see docs/templates.md") from error


def _nearest(kind: type[_Part], path: tuple[Any, ...]) -> str:
    """The known key that was meant, as the end of a message."""
    for step in path[:-1]:
        of_step = kind.model_fields.get(str(step))
        inner = of_step.annotation if of_step else None
        if not (isinstance(inner, type) and issubclass(inner, _Part)):
            return ""
        kind = inner
    close = get_close_matches(str(path[-1]), kind.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _line(node: Any, path: tuple[Any, ...]) -> int:
    """The line of the innermost key of ``path`` that the file holds."""
    line = 1
    for step in path:
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(key, value) for key, value in node.value if key.value == step]
        if found:
            line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line
