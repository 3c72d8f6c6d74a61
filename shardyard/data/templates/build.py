"""``data.template`` -> the template object."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from shardyard.data.templates.base import Template
from shardyard.data.templates.chat import ChatTemplate
from shardyard.data.templates.engine import NamedTemplate
from shardyard.data.templates.spec import (
    TemplateSpec,
    ToolFormat,
    fill,
    known_templates,
    known_tool_formats,
    load_file,
    load_named,
    load_tool_format,
    read_text,
)
from shardyard.data.templates.to_jinja import chat_template_text
from shardyard.data.templates.tokens import TextTokenizer
from shardyard.errors import UserError

_log = logging.getLogger("shardyard.data")

_YAML, _JINJA = (".yaml", ".yml"), (".jinja", ".jinja2", ".j2")

_Part = TypeVar("_Part", TemplateSpec, ToolFormat)


def build_template(
    name: str | None,
    tokenizer: Any,
    *,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
    tool_format: str | None = None,
    split_special_tokens: bool = False,
    train_on_prompt: bool = False,
) -> Template:
    """The template of ``data.template``; None is the tokenizer's own chat template.

    ``name`` is a known name, or the path of a user's template (.yaml) or chat template (.jinja). A template
    with an ``eos`` makes it the tokenizer's eos token, as the reference does for qwen3.

    Raises:
        UserError: an unknown name or a wrong file, a tokenizer without the template's tokens or without a
            chat template, a chat template whose masks cannot be proven right, or an option that the template
            does not know.
    """
    tokens = TextTokenizer(tokenizer, split_special_tokens=split_special_tokens)
    if name is None or name.endswith(_JINJA):
        if tool_format is not None:
            _log.warning("data.tool_format has no effect: the chat template writes the tools")
        return ChatTemplate(
            tokenizer,
            tokens,
            enable_thinking=enable_thinking,
            default_system=default_system,
            train_on_prompt=train_on_prompt,
            chat_template=None if name is None else read_text(Path(name).expanduser()),
        )
    spec, tools = find_template(name, tool_format)
    if train_on_prompt and not spec.trains_prompt:
        raise UserError(f"data.train_on_prompt: the template {name} trains replies only; set it to false")
    if default_system and spec.system is None and spec.system_in_user is None:
        raise UserError(f"data.default_system: the template {name} has no place for a system message")
    _check_tokens(name, spec, tools, tokenizer)
    own = {"bos": tokenizer.bos_token or "", "eos": spec.eos or tokenizer.eos_token or ""}
    template = NamedTemplate(
        name,
        _filled(spec, own),
        tools and _filled(tools, own),
        tokens,
        enable_thinking=enable_thinking,
        default_system=default_system,
    )
    if not (spec.assistant.end or spec.end or spec.assistant.ended_by):
        _log.warning(
            "data.template: %s writes nothing after a row's last reply: rows of one question do not teach a "
            "model where to stop",
            name,
        )
    if spec.eos is not None and tokenizer.eos_token != spec.eos:
        tokenizer.eos_token = spec.eos
    return template


def find_template(name: str, tool_format: str | None = None) -> tuple[TemplateSpec, ToolFormat | None]:
    """The template of this name or file, and its tool format or the one asked for.

    Raises:
        UserError: an unknown name, or a wrong file.
    """
    if name.endswith(_YAML):
        spec = load_file(Path(name).expanduser())
    else:
        known = known_templates()
        others = {other: first for first, names in known.items() for other in names}
        first = others.get(name, name)
        if first not in known:
            raise UserError(f"data.template: {name!r} is not a template; {_advice(name, [*known, *others])}")
        spec = load_named(first)
    wanted = tool_format or spec.tools
    if not isinstance(wanted, str):
        return spec, wanted
    if wanted not in known_tool_formats():
        key = "data.tool_format" if tool_format else f"data.template: {name}: tools"
        raise UserError(
            f"{key}: {wanted!r} is not a tool format; use one of {', '.join(known_tool_formats())}"
        )
    return spec, load_tool_format(wanted)


def exported_chat_template(
    name: str | None,
    *,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
    tool_format: str | None = None,
) -> str | None:
    """The jinja of a model trained with ``data.template``: a named template's text, or the user's file.

    None where the tokenizer's own chat template was used. The other values are those of the training.

    Raises:
        UserError: an unknown name, or a wrong file.
    """
    if name is None:
        return None
    if name.endswith(_JINJA):
        return read_text(Path(name).expanduser())
    spec, tools = find_template(name, tool_format)
    return chat_template_text(spec, tools, enable_thinking=enable_thinking, default_system=default_system)


def _advice(name: str, names: list[str]) -> str:
    if name.endswith((*_YAML, *_JINJA)) or "/" in name:
        return "a template file ends in .yaml or .jinja"
    close = get_close_matches(name.lower(), names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    known = ", ".join(sorted(names))
    return f"{meant}use one of {known}, a .yaml or .jinja file, or null for the tokenizer's own"


def _check_tokens(name: str, spec: TemplateSpec, tools: ToolFormat | None, tokenizer: Any) -> None:
    """Raise UserError for the tokens of the template that the tokenizer lacks."""
    texts = spec.model_dump_json() + (tools.model_dump_json() if tools else "")
    for key, named in (("bos", "a bos"), ("eos", "an eos")):
        if f"{{{key}}}" in texts and not getattr(tokenizer, f"{key}_token"):
            raise UserError(
                f"data.template: {name} needs {named} token, which the tokenizer {tokenizer.name_or_path!r} "
                f"lacks; use another template, or null for the tokenizer's own"
            )
    wanted = (*spec.tokens, *((spec.eos,) if spec.eos else ()))
    missing = [token for token in dict.fromkeys(wanted) if not _is_token(tokenizer, token)]
    if missing:
        raise UserError(
            f"data.template: {name} needs the tokens {' and '.join(missing)}, which the tokenizer "
            f"{tokenizer.name_or_path!r} lacks; set data.template to null to use its own chat template"
        )


def _is_token(tokenizer: Any, text: str) -> bool:
    """Whether ``text`` is one token wherever it stands."""
    return text in tokenizer.get_vocab() and len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1


def _filled(part: _Part, own: dict[str, str]) -> _Part:
    """The part with the tokenizer's own tokens in the places of ``{bos}`` and ``{eos}``."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return fill(value, **own)
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    return type(part).model_validate(changed(part.model_dump()))
