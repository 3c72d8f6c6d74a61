"""Tools, calls and results: every spelling of a call becomes the same ``ToolCall``.

Results follow the calls that they answer. Where calls have ids, the results of one assistant turn are brought
into the order of its calls by ``tool_call_id``, as chat templates that write no ids count on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardyard.data.converters.values import check_json, given_or_parsed, parse, text_of
from shardyard.data.dropped import NotUsable
from shardyard.data.types import Message, ToolCall


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools column: a list of objects or of their JSON texts, or its JSON text; empty means no tools."""
    tools = given_or_parsed(value, "tools")
    if tools is None:
        return ()
    if isinstance(tools, list):
        tools = [_object(tool) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise NotUsable("tools is not a list of objects")
    check_json(tools, "tools")
    return tuple(tools)


def _object(tool: Any) -> Any:
    if isinstance(tool, str) and tool.lstrip().startswith("{"):
        return parse(tool, "tools")
    return tool


def calls_of_content(value: Any) -> list[dict[str, Any]]:
    """The calls of a function turn: one call or a list of them, or the JSON text of either."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    ):
        value = text_of(value, "function call")
    value = given_or_parsed(value, "function call")
    calls = value if isinstance(value, list) else [value]
    if not calls or value is None:
        raise NotUsable("function call without a call")
    return [_described(call) for call in calls]


def calls_of_turn(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """An assistant turn's ``tool_calls`` (a list or its JSON text), or its older ``function_call``."""
    calls = given_or_parsed(turn.get("tool_calls"), "tool_calls") or []
    if not isinstance(calls, list):
        raise NotUsable("tool_calls is not a list")
    if not calls and turn.get("function_call"):
        calls = [given_or_parsed(turn["function_call"], "function call")]
    return [_described(call) for call in calls]


def _described(call: Any) -> dict[str, Any]:
    if isinstance(call, str) and call.lstrip().startswith("{"):
        call = parse(call, "function call")
    if not isinstance(call, dict):
        raise NotUsable("function call without a name")
    return call


def tool_call(call: dict[str, Any]) -> ToolCall:
    """``{"name", "arguments"}``, bare or under ``function``; arguments as a value or as JSON text."""
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise NotUsable("function call without a name")
    arguments = given_or_parsed(arguments, "function call's arguments")
    check_json(arguments, "function call's arguments")
    return ToolCall(name, {} if arguments is None else arguments)


def call_id(value: Any) -> str | None:
    """An id as text; None for none."""
    return str(value) if isinstance(value, str | int) and value != "" else None


def in_call_order(turns: Sequence[Message], ids: Sequence[tuple[str | None, ...]]) -> list[Message]:
    """The turns, the results of each assistant turn in the order of its calls, by their ids.

    ``ids`` holds for each turn those of its calls, or the one that a result answers. Results without ids, or
    of calls without ids, stay as they are.

    Raises:
        NotUsable: ids are given, and results and calls do not match one to one.
    """
    ordered: list[Message] = []
    position = 0
    while position < len(turns):
        ordered.append(turns[position])
        end = position + 1
        while end < len(turns) and turns[end].role == "tool":
            end += 1
        results = list(turns[position + 1 : end])
        answers = [answered[0] for answered in ids[position + 1 : end]]
        order = _order(ids[position], answers)
        ordered += [results[index] for index in order]
        position = end
    return ordered


def _order(calls: Sequence[str | None], answers: Sequence[str | None]) -> list[int]:
    """For each call the index of its answer."""
    if not any(answers) or not any(calls):
        return list(range(len(answers)))
    if None in calls or len(set(calls)) < len(calls):
        raise NotUsable("function calls without an id of their own, though results name ids")
    if None in answers or not set(answers) <= set(calls):
        raise NotUsable("a tool result without the id of a call before it")
    if len(set(answers)) < len(answers):
        raise NotUsable("two tool results for one function call")
    if len(answers) < len(calls):
        raise NotUsable("a function call without its result")
    return [answers.index(call) for call in calls]
