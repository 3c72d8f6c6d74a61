"""Tool formats -> text: the tools as the model is told of them, and the calls that it makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardyard.data.dropped import NotUsable
from shardyard.data.templates.spec import ToolCalls, ToolList, fill
from shardyard.data.types import ToolCall


def tools_text(style: ToolList, tools: Sequence[dict[str, Any]]) -> str:
    """The list of tools.

    Raises:
        NotUsable: the format names the tools, and one has no name or parameters of an unknown form.
    """
    names = ", ".join(_name(tool) for tool in tools) if "{names}" in style.after else ""
    listed = style.between.join(_tool(style, tool) for tool in tools)
    return style.before + listed + fill(style.after, names=names)


def calls_text(style: ToolCalls, calls: Sequence[ToolCall]) -> str:
    """The calls of one reply.

    Raises:
        NotUsable: more calls than the format has room for, or arguments that it cannot write.
    """
    if style.most is not None and len(calls) > style.most:
        raise NotUsable(f"the template writes at most {style.most} function call in a reply")
    return style.before + style.between.join(_call(style, call) for call in calls) + style.after


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates write it: keys in their order, no escapes but those that JSON needs."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _call(style: ToolCalls, call: ToolCall) -> str:
    each_argument = ""
    if "{each_argument}" in style.each:
        if not isinstance(call.arguments, dict):
            raise NotUsable("the template writes function call arguments by name, and they have none")
        each_argument = "".join(
            fill(style.argument, key=key, value=value if isinstance(value, str) else json_text(value))
            for key, value in call.arguments.items()
        )
    return fill(
        style.each,
        name=call.name,
        name_json=json_text(call.name),
        arguments=json_text(call.arguments),
        each_argument=each_argument,
    )


def _tool(style: ToolList, tool: dict[str, Any]) -> str:
    values: dict[str, str] = {}
    if "{json}" in style.each:
        wrapped = tool if "function" in tool or not style.wrap else {"type": "function", "function": tool}
        values["json"] = json_text(wrapped, style.indent)
    if "{name}" in style.each:
        values["name"] = _name(tool)
        values["description"] = str(_function(tool).get("description") or "")
    if "{parameters}" in style.each:
        values["parameters"] = _parameters(_function(tool).get("parameters") or {})
    return fill(style.each, **values)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise NotUsable("a tool whose function is not an object")
    return function


def _name(tool: dict[str, Any]) -> str:
    name = _function(tool).get("name")
    if not isinstance(name, str) or not name:
        raise NotUsable("a tool without a name, which the template's tool format needs")
    return name


def _parameters(schema: Any) -> str:
    """A line for each parameter of a JSON schema, as LLaMA-Factory's default format has them."""
    properties = schema.get("properties") or {} if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(value, dict) for value in properties.values()):
        raise NotUsable("a tool whose parameters are not a JSON schema")
    required = schema.get("required")
    lines: list[str] = []
    for name, value in properties.items():
        kind = str(value.get("type") or "")
        if isinstance(required, list) and name in required:
            kind += ", required"
        text = str(value.get("description") or "")
        if isinstance(value.get("enum"), list) and value["enum"]:
            text += f", should be one of [{', '.join(map(str, value['enum']))}]"
        if isinstance(value.get("items"), dict):
            text += f", where each item should be {value['items'].get('type', '')}"
        lines.append(f"  - {name} ({kind}): {text}\n")
    return "".join(lines)
