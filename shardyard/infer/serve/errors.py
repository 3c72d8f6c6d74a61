"""Faults in the shape of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_INVALID = "invalid_request_error"
_SHOWN = 60
"""Most characters of a client's own value in a message."""
_INSTEAD = {
    "tool_choice": "the model chooses (auto), or is shown no tools (none); a call cannot be forced here",
    "parallel_tool_calls": "the number of calls cannot be held to one here; leave it out",
    "response_format.type": "output is not constrained to JSON here; leave it out, or say text",
    "suffix": "text is not filled in before a suffix here; leave it out",
    "store": "nothing is stored here; leave it out",
    "service_tier": "there are no tiers here; leave it out",
    "modalities": "there is text only",
}
"""What to say of fields that are known, but of which one value is held only."""
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning_effort": "use enable_thinking",
    "guided_json": "output is not constrained here",
    "use_beam_search": "beams are for `shardyard generate --num-beams`",
}


class ApiFault(Exception):
    """A request's fault. ``param`` names the field, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiFault:
    """A 400 that names its field."""
    return ApiFault(400, message, param=param, code=code)


def of_validation(error: ValidationError) -> ApiFault:
    """The fault of the first field that does not fit."""
    faults = error.errors(include_url=False)
    field = min(faults, key=lambda one: one["type"] != "extra_forbidden")["loc"][0]
    # of the members of a union the one that the value came closest to
    found = max(
        (one for one in faults if one["loc"][0] == field),
        key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")),
    )
    param = _path(found["loc"])
    match found["type"]:
        case "extra_forbidden":
            hint = _HINTS.get(str(found["loc"][-1]))
            text = f"Unknown parameter: '{param}'{f': {hint}' if hint else ''}."
            return invalid(param, text, "unknown_parameter")
        case "missing":
            return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            problem = _INSTEAD.get(param) or found["msg"].removeprefix("Value error, ")
            return invalid(param, f"Invalid '{param}': {problem} (found {shown(found['input'])}).", code)


def shown(value: Any) -> str:
    """A client's value, short enough for a message."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _path(loc: Sequence[int | str]) -> str:
    """``("stop", "list[...]", 2)`` -> ``stop[2]``: pydantic names the members of unions too."""
    parts = ""
    for place in loc:
        if isinstance(place, int):
            parts += f"[{place}]"
        elif not parts:
            parts = place[:_SHOWN]
        elif place.isidentifier() and place not in ("str", "list", "int", "float", "bool", "dict"):
            parts += f".{place[:_SHOWN]}"
    return parts
