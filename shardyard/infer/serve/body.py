"""The body of a request -> JSON, bounded in size, time and depth, and nothing but JSON."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from shardyard.infer.nesting import is_deeper
from shardyard.infer.serve.errors import ApiFault, of_validation
from shardyard.infer.serve.limits import BODY_SECONDS, MAX_JSON_DEPTH

_Model = TypeVar("_Model", bound=BaseModel)


async def read_model(request: Request, model: type[_Model], most_bytes: int) -> _Model:
    """The request's body as one of the API's types.

    Raises:
        ApiFault: 400, 408, 413 or 415.
    """
    _check_type(request)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, most_bytes)
    except TimeoutError:
        raise ApiFault(408, "The request's body took too long to arrive.", code="request_timeout") from None
    value = parse(data)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None


def parse(data: bytes) -> dict[str, Any]:
    """JSON's object of ``data``.

    Raises:
        ApiFault: 400.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:  # which may spell half a character; encoding finds that
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        kind = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "half of a surrogate pair"
        raise _bad(kind) from None
    except RecursionError:
        raise _bad("nested too deep") from None
    except json.JSONDecodeError as error:
        raise _bad(str(error)[:100]) from None
    except ValueError as error:  # of a number
        raise _bad("a number is too large" if "digits" in str(error) else str(error)) from None
    if not isinstance(value, dict):
        raise _bad("an object is wanted")
    if is_deeper(value, MAX_JSON_DEPTH):
        raise _bad("nested too deep")
    return value


def _bad(problem: str) -> ApiFault:
    return ApiFault(400, f"The body is not the JSON of a request: {problem}.", code="invalid_json")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _check_type(request: Request) -> None:
    kind, *options = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charsets = [option.partition("=")[2].strip('"') for option in options if option.startswith("charset")]
    if kind != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise ApiFault(415, "The body has to be sent as Content-Type: application/json, in UTF-8.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiFault(415, "A compressed body is not read: leave Content-Encoding out.")


async def _read(request: Request, most: int) -> bytes:
    fault = ApiFault(
        413, f"The body is larger than the {most} bytes that this server reads.", code="request_too_large"
    )
    stated = request.headers.get("content-length", "")
    if stated.isascii() and stated.isdigit() and (len(stated) > 15 or int(stated) > most):
        raise fault
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise fault
        parts.append(part)
    return b"".join(parts)
