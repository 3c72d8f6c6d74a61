"""Requests of the API as types: every field that is known, and what it may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from shardyard.infer.serve.limits import MAX_BIASED_TOKENS, MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOPS
from shardyard.infer.types import MAX_TOP_LOGPROBS

_MOST_TOKENS = 2**31 - 1


def _integral(value: Any) -> Any:
    """JSON has one kind of numbers: 5.0 is whole."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


_WHOLE = BeforeValidator(_integral)
"""Stands behind a field's bounds, so that its JSON schema has them."""
_Count = Annotated[int, Field(ge=1, le=_MOST_TOKENS), _WHOLE]
_StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Closed):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(_Closed):
    type: Literal["text"]


class TemplateOptions(_Closed):
    enable_thinking: bool | None = None


class Asked(_Closed):
    """What both APIs know. Whatever is left out, or null, is as the model's own files say."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE] | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...] | None:
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


_STRING = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_NAME = {"type": "string", "minLength": 1}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


_PART = _object({"type": {"const": "text"}, "text": _STRING}, "type", "text")
_TEXT = {"anyOf": [_STRING, {"type": "array", "items": _PART}]}
_CALLED = _object({"name": _NAME, "arguments": {"type": ["string", "object"]}}, "name", "arguments")
_CALL = _object({"id": _MAYBE, "type": {"const": "function"}, "function": _CALLED}, "function")
_CALLS = {"type": "array", "minItems": 1, "items": _CALL}


def _message(roles: list[str], more: dict[str, Any], *required: str) -> dict[str, Any]:
    properties = {"role": {"enum": roles}, "content": _TEXT, "name": _MAYBE, **more}
    # other keys may be there with nothing in them: clients send back what they were given
    return _object(properties, "role", *required, additionalProperties={"enum": [None, "", [], {}]})


_THOUGHT = {"reasoning_content": _MAYBE, "reasoning": _MAYBE}
_CALLING = {"content": {"anyOf": [*_TEXT["anyOf"], {"type": "null"}]}, "tool_calls": _CALLS, **_THOUGHT}
_MESSAGE = {
    "anyOf": [
        _message(["system", "developer", "user"], {}, "content"),
        _message(["assistant"], _THOUGHT, "content"),
        _message(["assistant"], _CALLING, "tool_calls"),
        _message(["tool"], {"tool_call_id": _MAYBE}, "content"),
    ]
}
_FUNCTION = {"name": _NAME, "description": _MAYBE, "parameters": {"type": ["object", "null"]}}
_TOOL = {
    "anyOf": [
        _object({"type": {"const": "function"}, "function": _object(_FUNCTION, "name")}, "function"),
        _object({"type": {"const": "function"}, **_FUNCTION}, "name"),
    ]
}


class ChatRequest(Asked):
    """``messages`` and ``tools`` are looked at where the prompt is made, field by field."""

    messages: Annotated[
        list[Any], Field(min_length=1), WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})
    ]
    tools: Annotated[list[Any], WithJsonSchema({"type": "array", "items": _TOOL})] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE] | None = None
    response_format: ResponseFormat | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def _prompt(value: Any) -> Any:
    """A text, texts, token ids, or lists of them; checked here, as a union would try each item as each."""
    many = isinstance(value, list) and bool(value) and not all(_is_id(item) for item in value)
    for item in value if many else [value]:
        is_ids = isinstance(item, list) and bool(item) and all(_is_id(one) for one in item)
        if not (is_ids or isinstance(item, str)):
            raise ValueError("a text, a list of texts, a list of token ids or a list of such lists is wanted")
    if many and len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} prompts are taken at once")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _MOST_TOKENS}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _IDS},
    ]
}


class CompletionRequest(Asked):
    prompt: Annotated[Any, AfterValidator(_prompt), WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, each a text or token ids."""
        given: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [given] if all(_is_id(item) for item in given) else given
