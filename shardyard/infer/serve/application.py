"""The routes of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from shardyard import __version__
from shardyard.infer.serve import told
from shardyard.infer.serve.asked import Asked, ChatRequest, CompletionRequest
from shardyard.infer.serve.body import read_model
from shardyard.infer.serve.errors import ApiFault
from shardyard.infer.serve.forms import ChatForm, Envelope, Form, TextForm, dumps
from shardyard.infer.serve.guard import Guard
from shardyard.infer.serve.metrics import CONTENT_TYPE
from shardyard.infer.serve.sending import GONE, EventStream, events, timed_out, unless_gone, whole
from shardyard.infer.serve.service import Service
from shardyard.infer.serve.subject import Ask

_ALWAYS = {401: "no valid key", 500: "the server is at fault"}
_OF_BODIES = {
    400: "a field that is unknown, wrong or too long",
    404: "another model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "not JSON in UTF-8",
    429: "the queue is full",
    503: "shutting down, or the model has stopped",
    504: "the answer took too long",
}


def build_app(
    service: Service,
    *,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
    access_log: bool = False,
) -> FastAPI:
    """The application, for uvicorn or a test. ``allow_origins``: whose pages may call it (CORS)."""
    app = FastAPI(
        title="Shardyard", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_models(app, service)
    _add_answers(app, service)
    _add_watches(app, service)
    app.add_exception_handler(ApiFault, _fault)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_fault)  # type: ignore[arg-type]
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, metrics=service.metrics, api_key=api_key, access_log=access_log)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allow_origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )  # fmt: skip
    return app


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content)


def _add_models(app: FastAPI, service: Service) -> None:
    subject = service.subject
    card = {
        "id": subject.name, "object": "model", "created": service.started, "owned_by": "shardyard",
        "max_model_len": subject.context_length,
    }  # fmt: skip

    @app.get("/v1/models", response_class=_Json, responses=_faults(told.ModelList))
    async def list_models() -> Response:
        return _Json({"object": "list", "data": [card]})

    @app.get(
        "/v1/models/{model:path}", response_class=_Json, responses=_faults(told.ModelCard, 404),
        openapi_extra={
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        },
    )  # fmt: skip
    async def get_model(request: Request) -> Response:
        _check_model(service, request.path_params["model"])
        return _Json(card)


def _add_answers(app: FastAPI, service: Service) -> None:
    subject = service.subject

    @app.post("/v1/chat/completions", **_answering(ChatRequest, told.ChatCompletion))
    async def chat(request: Request) -> Response:
        async with AsyncExitStack() as held:
            asked = await read_model(request, ChatRequest, service.limits.max_body_bytes)
            held.enter_context(_places(service, asked, 1))
            asks = await service.prepared(lambda: subject.chat(asked))
            return await _answer(service, request, asked, asks, ChatForm(bool(asked.logprobs)), 1, held)

    @app.post("/v1/completions", **_answering(CompletionRequest, told.Completion))
    async def complete(request: Request) -> Response:
        async with AsyncExitStack() as held:
            asked = await read_model(request, CompletionRequest, service.limits.max_body_bytes)
            prompts = len(asked.prompts)
            held.enter_context(_places(service, asked, prompts))
            asks = await service.prepared(lambda: subject.completions(asked))
            form = TextForm(asks, asked.logprobs)
            return await _answer(service, request, asked, asks, form, prompts, held)


def _places(service: Service, asked: Asked, prompts: int) -> Any:
    _check_model(service, asked.model)
    if asked.stream_options is not None and not asked.stream:
        raise ApiFault(400, "stream_options is for stream: true.", param="stream_options")
    return service.places(prompts * (asked.n or 1))


async def _answer(
    service: Service, request: Request, asked: Asked, asks: Sequence[Ask], form: Form, prompts: int,
    held: AsyncExitStack,
) -> Response:  # fmt: skip
    """Start the answers and send them as the request wants. What ``held`` holds ends with them."""
    arrived = request.scope["shardyard.arrived"]
    running = service.start(asks, arrived)
    held.callback(running.close)
    envelope = Envelope(form, service.subject.name, asks, prompts)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.limits.request_timeout - (time.perf_counter() - arrived)
    if asked.stream:
        source = events(running, envelope, usage=asked.includes_usage)
        return EventStream(source, held.pop_all(), deadline)
    try:
        async with asyncio.timeout_at(deadline):
            answer = await unless_gone(request, whole(running, envelope))
    except TimeoutError:
        raise timed_out() from None
    return Response(status_code=GONE) if answer is None else _Json(answer)


def _add_watches(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=_Json, responses=_faults(told.Health, 503))
    async def health() -> Response:
        if (refusal := service.refusal) is not None:
            raise refusal
        return _Json({"status": "ok"})

    page: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", response_class=Response, responses=page | _listed(_ALWAYS))
    async def metrics() -> Response:
        return Response(service.page(), headers={"content-type": CONTENT_TYPE})


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.subject.name:
        raise ApiFault(
            404, f"The model {name[:100]!a} is not served here; there is '{service.subject.name}'.",
            param="model", code="model_not_found",
        )  # fmt: skip


async def _fault(_: Request, fault: ApiFault) -> Response:
    return _Json(fault.body(), status_code=fault.status, headers=fault.headers)


async def _http_fault(request: Request, error: HTTPException) -> Response:
    """What the framework finds: routes and methods that are not there."""
    known = {
        404: "There is no such route; see /openapi.json.",
        405: f"This route does not take {request.method[:20]}.",
    }
    fault = ApiFault(error.status_code, known.get(error.status_code, "The request cannot be read."))
    fault.headers.update(error.headers or {})
    return await _fault(request, fault)


def _answering(asked: type[Asked], answer: type[BaseModel]) -> dict[str, Any]:
    """How a route that answers is described."""
    responses = _faults(answer, *_OF_BODIES)
    responses[200]["content"] = {"text/event-stream": {}}
    schema = {"$ref": f"#/components/schemas/{asked.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"response_class": _Json, "responses": responses, "openapi_extra": {"requestBody": body}}


def _faults(answer: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    named = {status: _OF_BODIES[status] for status in statuses}
    return {200: {"model": answer}} | _listed(_ALWAYS | named)


def _listed(named: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": told.FaultBody, "description": text} for status, text in named.items()}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        schemas |= told.component_schemas(ChatRequest, CompletionRequest)
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = found
    return app.openapi_schema
