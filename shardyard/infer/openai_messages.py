"""Messages and tools in OpenAI's form -> our `Conversation`, and back; every fault names its field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from shardyard.data.types import Conversation, Message, ToolCall
from shardyard.errors import UserError
from shardyard.infer.nesting import is_deeper

MAX_DEPTH = 64
"""How deep tools and arguments may nest: far more than any has, far less than Python's stack."""
_SYSTEM = ("system", "developer")
_ROLES = (*_SYSTEM, "user", "assistant", "tool")
_KEYS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""A key that is not known may be there with nothing in it: clients send back what they were given."""


class ChatFault(UserError):
    """What cannot be shown to the model. ``field``: which one, as ``messages[2].content``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def from_openai(messages: Any, tools: Any = None) -> Conversation:
    """The conversation of a request.

    A system (or developer) message stands first; text parts of a content are joined; results are brought into
    the order of the calls that they answer. Empty thoughts and names are left out: templates show no names.

    Raises:
        ChatFault: anything else, with the field's name.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatFault("messages", "a list of at least one message is wanted")
    system: str | None = None
    turns: list[Message] = []
    calls = _Calls()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = _role(where, message)
        if role in _SYSTEM:
            if number:
                raise ChatFault(f"{where}.role", f"a {role} message stands first, and there is one at most")
            system = _content(where, message)
        elif role == "tool":
            calls.answer(where, message, _content(where, message))
        else:
            turns += calls.results(f"messages[{number - 1}]")
            turn, ids = _turn(where, role, message)
            turns.append(turn)
            calls = _Calls(ids)
    turns += calls.results(f"messages[{len(messages) - 1}]")
    return Conversation(tuple(turns), system, tools_of(tools))


def tools_of(tools: Any, name: str = "tools") -> tuple[dict[str, Any], ...]:
    """Functions that the model may call, each as OpenAI has it or bare; None is none.

    Raises:
        ChatFault: another form.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise ChatFault(name, "a list of functions is wanted")
    for number, tool in enumerate(tools):
        where = f"{name}[{number}]"
        if not isinstance(tool, dict):
            raise ChatFault(where, 'an object is wanted: {"type": "function", "function": {...}}')
        if tool.get("type", "function") != "function":
            raise ChatFault(f"{where}.type", f"{_shown(tool['type'])}: only functions are known")
        wrapped = "function" in tool
        function, at = (tool["function"], f"{where}.function") if wrapped else (tool, where)
        if not isinstance(function, dict):
            raise ChatFault(at, "an object is wanted")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ChatFault(f"{at}.name", "a name is wanted")
        if not isinstance(function.get("description", ""), str | None):
            raise ChatFault(f"{at}.description", "text is wanted")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ChatFault(f"{at}.parameters", "a JSON schema is wanted: an object")
        _check_depth(where, tool)
    return tuple(tools)


def to_openai(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages in OpenAI's form; ids of calls are made up from their place."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    ids: list[str] = []
    for number, turn in enumerate(conversation.turns):
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            ids = [f"call_{number}_{place}" for place in range(len(turn.tool_calls))]
            message["tool_calls"] = [
                call_to_openai(call, call_id) for call, call_id in zip(turn.tool_calls, ids, strict=True)
            ]
        if turn.role == "tool" and ids:
            message["tool_call_id"] = ids.pop(0)
        messages.append(message)
    return messages


def call_to_openai(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A call of an assistant's message; arguments as JSON text."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _role(where: str, message: Any) -> str:
    if not isinstance(message, dict):
        raise ChatFault(where, 'an object is wanted: {"role": "user", "content": "..."}')
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ChatFault(f"{where}.role", f"{_shown(role)} is not one of {', '.join(_ROLES)}")
    for key, value in message.items():
        if key not in _KEYS[role] and value not in _NOTHING:
            raise ChatFault(f"{where}.{key}", f"not known of {role} messages")
    if not isinstance(message.get("name", ""), str | None):
        raise ChatFault(f"{where}.name", "text is wanted")
    return role


def _content(where: str, message: dict[str, Any]) -> str:
    """Text, or the text of a list of parts."""
    content = message.get("content")
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatFault(where, "text or a list of text parts is wanted")
    texts: list[str] = []
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise ChatFault(f"{where}[{number}]", 'an object is wanted: {"type": "text", "text": "..."}')
        if part.get("type") != "text":
            raise ChatFault(f"{where}[{number}].type", f"{_shown(part.get('type'))}: only text is known")
        if not isinstance(part.get("text"), str):
            raise ChatFault(f"{where}[{number}].text", "text is wanted")
        texts.append(part["text"])
    return "".join(texts)


def _turn(where: str, role: str, message: dict[str, Any]) -> tuple[Message, list[str | None]]:
    """A user's or an assistant's turn, and the ids of its calls."""
    if role == "user":
        return Message("user", _content(where, message)), []
    given = message.get("tool_calls")
    if given is not None and not isinstance(given, list):
        raise ChatFault(f"{where}.tool_calls", "a list is wanted")
    calls, ids = [], []
    for number, call in enumerate(given or []):
        found, call_id = _call(f"{where}.tool_calls[{number}]", call)
        calls.append(found)
        ids.append(call_id)
    bare = calls and message.get("content") is None
    content = "" if bare else _content(where, message)
    return Message("assistant", content, _reasoning(where, message), tuple(calls)), ids


def _reasoning(where: str, message: dict[str, Any]) -> str | None:
    for key in ("reasoning_content", "reasoning"):
        value = message.get(key)
        if not isinstance(value, str | None):
            raise ChatFault(f"{where}.{key}", "text is wanted")
        if value:
            return value
    return None


def _call(where: str, call: Any) -> tuple[ToolCall, str | None]:
    if not isinstance(call, dict):
        raise ChatFault(where, "an object is wanted")
    if call.get("type", "function") != "function":
        raise ChatFault(f"{where}.type", f"{_shown(call['type'])}: only functions are known")
    function = call.get("function")
    if not isinstance(function, dict):
        raise ChatFault(f"{where}.function", "an object is wanted")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ChatFault(f"{where}.function.name", "a name is wanted")
    at = f"{where}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ChatFault(at, f"not JSON: {str(error)[:100]}") from None
    if not isinstance(arguments, dict):
        raise ChatFault(at, "the JSON text of an object is wanted")
    _check_depth(at, arguments)
    call_id = call.get("id")
    if not isinstance(call_id, str | None):
        raise ChatFault(f"{where}.id", "text is wanted")
    return ToolCall(name, arguments), call_id or None


class _Calls:
    """The calls of the turn before, and the results that answer them."""

    def __init__(self, ids: Sequence[str | None] = ()) -> None:
        self._ids = list(ids)
        self._results: list[tuple[str | None, Message]] = []

    def answer(self, where: str, message: dict[str, Any], content: str) -> None:
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str | None):
            raise ChatFault(f"{where}.tool_call_id", "text is wanted")
        if len(self._results) >= len(self._ids):
            what = "there are more results than calls" if self._ids else "no call stands before it"
            raise ChatFault(f"{where}.role", f"a tool message answers a call of an assistant; {what}")
        if call_id and any(self._ids):
            if call_id not in self._ids:
                raise ChatFault(f"{where}.tool_call_id", f"no call before it has the id {_shown(call_id)}")
            if call_id in [known for known, _ in self._results]:
                raise ChatFault(f"{where}.tool_call_id", "a second result of this call")
        self._results.append((call_id or None, Message("tool", content)))

    def results(self, last: str) -> list[Message]:
        """In the order of the calls. ``last``: the message before which they have to be complete."""
        if self._results and len(self._results) < len(self._ids):
            raise ChatFault(last, f"{len(self._ids)} calls, and {len(self._results)} results of them")
        answered = [call_id for call_id, _ in self._results]
        if None in answered or None in self._ids:
            return [message for _, message in self._results]
        places = {call_id: place for place, call_id in enumerate(self._ids)}
        ordered = sorted(self._results, key=lambda pair: places[pair[0]])
        return [message for _, message in ordered]


def _check_depth(where: str, value: Any) -> None:
    if is_deeper(value, MAX_DEPTH):
        raise ChatFault(where, f"nested more than {MAX_DEPTH} deep")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _shown(value: Any) -> str:
    return repr(value)[:60]
