"""A declarative template as jinja, the chat template of an exported tokenizer: the text that was trained.

What training did with thoughts is written into the text. Whoever renders may pass ``enable_thinking``, which
decides about the reply to come: false ends the generation prompt with the empty thought (and the question
with the template's mark for it). Without it the run's own setting holds; a thought that training neither
asked for nor removed (null) is left to the model. Templates that end a sample with a token of its own write
it after the last reply, as training did.
"""

from __future__ import annotations

import json
import re

from shardyard.data.templates.spec import TemplateSpec, ToolCalls, ToolFormat, ToolList

_SPLIT = re.compile(r"\{([a-z_]+)\}")

_JSON_OF_TOOL = "(tool if tool.function is defined else {'type': 'function', 'function': tool})"


def chat_template_text(
    spec: TemplateSpec,
    tools: ToolFormat | None,
    *,
    enable_thinking: bool | None,
    default_system: str | None,
) -> str:
    """The jinja text; ``enable_thinking`` and ``default_system`` are those of the training."""
    tools = tools or ToolFormat()
    removes = enable_thinking is False
    system = spec.default_system if default_system is None else default_system
    lines = [
        f"{{%- set thinking = enable_thinking if enable_thinking is defined else {_bool(not removes)} %}}",
        "{%- set ns = namespace(first='', question=-1, text='', words='') %}",
        *_opening(spec, tools.list, system),
        "{%- for message in messages %}",
        "    {%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}",
        "{%- endfor %}",
        "{%- for message in messages %}",
        "    {%- set content = message.content if message.content is string else '' %}",
        "    {%- if message.role == 'assistant' %}",
        *_indented([*_header(spec), *_reply(spec, removes), *_calls(tools.calls), *_end_of_reply(spec)], 2),
        "    {%- elif message.role == 'tool' %}",
        *_indented(_results(spec), 2),
        "    {%- elif message.role == 'user' %}",
        *_indented(_question(spec), 2),
        "    {%- elif not loop.first %}",
        *_indented(_later_system(spec), 2),
        "    {%- endif %}",
        "{%- endfor %}",
        *_generation_prompt(spec),
    ]
    return "\n".join(lines)


def _opening(spec: TemplateSpec, style: ToolList | None, default_system: str) -> list[str]:
    """The lines that write what stands before the first turn, and set ``ns.first``."""
    trim = " | trim" if "system" in spec.trim else ""
    lines = [
        "{%- set given = messages[0].content if messages and messages[0].role == 'system' else '' %}",
        f"{{%- set system = (given or {_literal(default_system)}){trim} %}}",
        *_write(_slot(spec.prefix)),
        *_tools(style),
    ]
    if style is not None and spec.tools_at == "prefix":
        lines += _when("tools", _write(_slot(spec.tools_slot, content="ns.text")))
    elif style is not None and spec.tools_at == "system":
        lines.append("{%- set system = system + ns.text %}")
    elif style is not None:
        lines.append("{%- set ns.first = ns.text %}")
    if spec.system is not None:
        plain, with_tools = spec.system, spec.system_with_tools
        written = _write(_slot(plain, content="system"))
        if with_tools is not None:
            other = _write(_slot(with_tools, content="system"))
            written = _when("tools", other, written)
        return lines + (written if spec.system_always else _when("system", written))
    if spec.system_in_user is None:
        return lines + _when("system", ["{{- raise_exception('no place for a system message') }}"])
    first = _slot(spec.system_in_user, content="system")
    return lines + _when("system", [f"{{%- set ns.first = ({first}) + ns.first %}}"])


def _tools(style: ToolList | None) -> list[str]:
    """The lines that set ``ns.text`` to the list of tools, or to nothing."""
    if style is None:
        return []
    indent = "" if style.indent is None else f"(indent={style.indent})"
    one = _slot(
        style.each,
        json=f"({_JSON_OF_TOOL if style.wrap else 'tool'} | tojson{indent})",
        name="function.name",
        description="(function.description or '')",
        parameters="ns.words",
    )
    by_name = "{names}" in style.after
    lines = [
        "{%- if tools %}",
        f"    {{%- set ns.text = {_literal(style.before)} %}}",
        *(["    {%- set listed = namespace(names=[]) %}"] if by_name else []),
        "    {%- for tool in tools %}",
        "        {%- set function = tool.function if tool.function is defined else tool %}",
        *(["        {%- set listed.names = listed.names + [function.name] %}"] if by_name else []),
        *(_indented(_parameters(), 2) if "{parameters}" in style.each else []),
        f"        {{%- set ns.text = ns.text ~ {_unless_first(style.between)}{one} %}}",
        "    {%- endfor %}",
    ]
    names = "(listed.names | join(', '))"
    return [
        *lines,
        f"    {{%- set ns.text = ns.text ~ {_slot(style.after, names=names)} %}}",
        "{%- endif %}",
    ]


def _parameters() -> list[str]:
    """The lines that set ``ns.words`` to a line per parameter (tool_text.py)."""
    return [
        "{%- set ns.words = '' %}",
        "{%- set schema = function.parameters or {} %}",
        "{%- for key, value in (schema.properties or {}).items() %}",
        "    {%- set kind = (value.type or '') ~ (', required' if key in (schema.required or []) else '') %}",
        "    {%- set one_of = ', should be one of [' ~ ((value.enum or []) | join(', ')) ~ ']' %}",
        "    {%- set items = value['items'] if value['items'] is mapping else {} %}",
        "    {%- set each = ', where each item should be ' ~ (items.type or '') %}",
        "    {%- set ns.words = ns.words ~ '  - ' ~ key ~ ' (' ~ kind ~ '): ' ~ (value.description or '')",
        "        ~ (one_of if value.enum else '') ~ (each if value['items'] is mapping else '') ~ '\\n' %}",
        "{%- endfor %}",
    ]


def _header(spec: TemplateSpec) -> list[str]:
    """The lines that write the header of a reply."""
    plain, after = spec.assistant.header, spec.assistant.header_after_results
    if after is None or after == plain:
        return _write(_slot(plain))
    follows = "not loop.first and loop.previtem.role == 'tool'"
    return _when(follows, _write(_slot(after)), _write(_slot(plain)))


def _reply(spec: TemplateSpec, removes: bool) -> list[str]:
    """The lines that write a reply's thought and words, and leave the words in ``ns.words``."""
    thinking = spec.thinking
    lines = ["{%- set ns.text = content %}", *(_without_thoughts(spec) if removes else [])]
    if thinking.inline == "keep":
        return lines + _thought_inside(spec, removes)
    before = _thought_before(spec, removes)
    if not thinking.cut_plain_only:
        return lines + before
    spared = "message.tool_calls or (not loop.first and loop.previtem.role == 'tool')"
    return lines + _when(spared, _thought_inside(spec, removes), before)


def _without_thoughts(spec: TemplateSpec) -> list[str]:
    """The lines that take inline thoughts, and the line ends they leave in front, out of ``ns.text``."""
    opened, closed = map(_literal, spec.thinking.marks)
    return [
        "{%- set ns.text = '' %}",
        f"{{%- for piece in content.split({closed}) %}}",
        "    {%- if loop.last %}",
        "        {%- set ns.text = ns.text + piece %}",
        f"    {{%- elif {opened} in piece %}}",
        f"        {{%- set ns.text = ns.text + piece.split({opened})[0] %}}",
        "    {%- else %}",
        f"        {{%- set ns.text = ns.text + piece + {closed} %}}",
        "    {%- endif %}",
        "{%- endfor %}",
        "{%- set ns.text = ns.text.lstrip('\\n') %}",
    ]


def _thought_inside(spec: TemplateSpec, removes: bool) -> list[str]:
    """The lines for a template in whose words inline thoughts stay (replies.py)."""
    thinking, lines = spec.thinking, list[str]()
    opened, closed = map(_literal, thinking.marks)
    written = bool(thinking.open or thinking.close)
    if written and not removes:
        strip = ".strip()" if thinking.trim else ".strip('\\n')"
        thought = f"{_slot(thinking.open)} ~ message.reasoning_content{strip} ~ {_slot(thinking.close)}"
        lines += _when(
            "message.reasoning_content is string",
            [f"{{%- set ns.text = {thought} ~ content.lstrip('\\n') %}}"],
        )
    if thinking.empty:
        lacks = "true" if removes else f"{opened} not in ns.text and {closed} not in ns.text"
        lines += _when(lacks, _write(_slot(thinking.empty)))
    words = f"ns.text.split({closed})[-1].strip('\\n')" if written else "ns.text"
    return [*lines, *_words(spec), f"{{%- set ns.words = {words} %}}"]


def _thought_before(spec: TemplateSpec, removes: bool) -> list[str]:
    """The lines for a template that parts thoughts from words (replies.py)."""
    thinking = spec.thinking
    opened, closed = map(_literal, thinking.marks)
    cut = f"{{%- set ns.text = ns.text.split({closed})[-1] %}}"
    plain = [*(_write(_slot(thinking.empty)) if thinking.empty else []), *_words(spec)]
    words = "{%- set ns.words = ns.text %}"
    if removes or thinking.inline == "cut":
        return [cut, words, *plain]
    strip = ".strip()" if thinking.trim else ""
    wanted = "" if thinking.earlier == "keep" else " and loop.index0 > ns.question"
    return [
        "{%- if message.reasoning_content is string %}",
        "    {%- set thought = message.reasoning_content.strip('\\n') %}",
        f"{{%- elif {closed} in content %}}",
        f"    {{%- set thought = content.split({closed})[0].split({opened})[-1].strip('\\n') %}}",
        "{%- else %}",
        "    {%- set thought = '' %}",
        "{%- endif %}",
        cut,
        words,
        *_when(
            f"thought{wanted}",
            [
                *_write(f"{_slot(thinking.open)} ~ thought{strip} ~ {_slot(thinking.close)}"),
                "{%- set ns.text = ns.text.lstrip('\\n') %}",
                *_words(spec),
            ],
            plain,
        ),
    ]


def _words(spec: TemplateSpec) -> list[str]:
    """The lines that write the words in ``ns.text``, if there are any."""
    text = "(ns.text | trim)" if "assistant" in spec.trim else "ns.text"
    return _when(text, _write(_slot(spec.assistant.text, content=text)))


def _calls(style: ToolCalls | None) -> list[str]:
    """The lines that write a reply's calls."""
    if style is None:
        return []
    arguments = "(function.arguments if function.arguments is string else function.arguments | tojson)"
    slots = {
        "name": "function.name",
        "name_json": "(function.name | tojson)",
        "arguments": arguments,
        "each_argument": "ns.text",
    }
    first = _when("ns.words", _write(_literal(style.after_words))) + _write(_literal(style.before))
    lines = [
        "{%- for call in message.tool_calls or [] %}",
        "    {%- set function = call.function if call.function is defined else call %}",
        *_indented(_when("loop.first", first, _write(_literal(style.between)))),
    ]
    if "{each_argument}" in style.each:
        one = _slot(style.argument, key="key", value="(value if value is string else value | tojson)")
        lines += [
            "    {%- set ns.text = '' %}",
            "    {%- for key, value in function.arguments.items() %}",
            f"        {{%- set ns.text = ns.text ~ {one} %}}",
            "    {%- endfor %}",
        ]
    return [
        *lines,
        *_indented(_write(_slot(style.each, **slots))),
        *_indented(_when("loop.last", _write(_literal(style.after)))),
        "{%- endfor %}",
    ]


def _end_of_reply(spec: TemplateSpec) -> list[str]:
    lines = _write(_slot(spec.assistant.end))
    if spec.end:
        lines += _when("loop.last and not add_generation_prompt", _write(_slot(spec.end)))
    return lines


def _results(spec: TemplateSpec) -> list[str]:
    """The lines that write one tool result, with what stands around all of them."""
    style = spec.result_style
    first = "loop.first or loop.previtem.role != 'tool'"
    return [
        *_when(first, _write(_slot(style.before)), _write(_slot(style.between))),
        *_write(_slot(style.each, content="content", json="(content | tojson)")),
        *_when("loop.last or loop.nextitem.role != 'tool'", _write(_slot(style.after))),
    ]


def _question(spec: TemplateSpec) -> list[str]:
    """The lines that write a user's turn."""
    trim = " | trim" if "user" in spec.trim else ""
    ending = spec.user_without_thinking
    lines = [
        "{%- set is_first = loop.index0 == (1 if messages[0].role == 'system' else 0) %}",
        f"{{%- set asked = content{trim} %}}",
    ]
    if ending:
        lines += _when(
            f"not thinking and not asked.endswith({_literal(ending)})",
            [f"{{%- set asked = asked + {_literal(ending)} %}}"],
        )
    if spec.separator:
        lines += _when("not is_first", _write(_slot(spec.separator)))
    return lines + _write(_slot(spec.user, content="((ns.first if is_first else '') ~ asked)"))


def _later_system(spec: TemplateSpec) -> list[str]:
    """The lines for a system message that is not the first message."""
    if spec.system is None:
        return ["{{- raise_exception('no place for a system message') }}"]
    return _write(_slot(spec.system, content="content"))


def _generation_prompt(spec: TemplateSpec) -> list[str]:
    """The lines that begin the reply to come."""
    header, after = spec.assistant.header, spec.assistant.header_after_results
    lines = _write(_slot(header))
    if after is not None and after != header:
        other = _write(_slot(after))
        lines = _when("messages[-1].role == 'tool'", other, lines)
    if spec.thinking.empty:
        lines += _when("not thinking", _write(_slot(spec.thinking.empty)))
    if spec.thinking.open_given:
        lines += _when("thinking", _write(_slot(spec.thinking.open)))
    return _when("add_generation_prompt", lines)


def _when(condition: str, lines: list[str], others: list[str] | None = None) -> list[str]:
    """``lines`` if the condition holds, else ``others``."""
    if not lines and not others:
        return []
    if not lines:
        return _when(f"not ({condition})", others or [])
    otherwise = ["{%- else %}", *_indented(others)] if others else []
    return [f"{{%- if {condition} %}}", *_indented(lines), *otherwise, "{%- endif %}"]


def _write(expression: str) -> list[str]:
    return [f"{{{{- {expression} }}}}"] if expression != '""' else []


def _indented(lines: list[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


def _slot(slot: str, **values: str) -> str:
    """A jinja expression for a filled slot; ``values`` are expressions, the rest is literal."""
    values = {"bos": "bos_token", "eos": "eos_token"} | values
    parts: list[str] = []
    position = 0
    for match in _SPLIT.finditer(slot):
        if match[1] in values:
            parts += [_literal(slot[position : match.start()]), values[match[1]]]
            position = match.end()
    parts.append(_literal(slot[position:]))
    return " ~ ".join(part for part in parts if part != '""') or '""'


def _unless_first(text: str) -> str:
    return f"({_literal(text)} if not loop.first else '') ~ " if text else ""


def _literal(text: str) -> str:
    """A string of jinja, whose escapes are Python's: JSON's without the surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)


def _bool(value: bool) -> str:
    return "true" if value else "false"
