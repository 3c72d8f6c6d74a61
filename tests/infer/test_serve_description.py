"""schemathesis asks the service whatever its own OpenAPI description allows, and what it does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from support.fake_engine import FakeEngine, FakeSide, says
from support.tokenizers import QWEN3_LIKE, byte_tokenizer

from shardyard.infer.opening import Choice
from shardyard.infer.serve.application import build_app
from shardyard.infer.serve.limits import Limits
from shardyard.infer.serve.service import Service
from shardyard.infer.serve.subject import Subject

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


def description() -> Any:
    tokenizer = byte_tokenizer(QWEN3_LIKE)
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    limits = Limits(max_running=400, max_waiting=0, max_body_bytes=100_000)
    side = FakeSide(tokenizer, frozenset({ends}), choice=Choice("somewhere"))
    subject = Subject(side, "tiny", limits, 512)
    return schemathesis.openapi.from_asgi(
        "/openapi.json", build_app(Service(FakeEngine(says(tokenizer, "yes")), subject, limits))
    )


def attack(method: str, path: str, examples: int) -> Counter[int]:
    """How often each status came: to so many requests that fit the description, and as many that do not."""
    statuses: Counter[int] = Counter()

    def hold(case: Any) -> None:
        statuses[case.call_and_validate(checks=CHECKS).status_code] += 1

    operation = description()[path][method]
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 2 if method == "POST" else 1]:
        bounded = settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        bounded(given(case=operation.as_strategy(generation_mode=mode))(hold))()
    return statuses


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_service_does_as_it_is_described(method: str, path: str) -> None:
    statuses = attack(method, path, 40 if method == "POST" else 5)
    assert statuses[404 if "{" in path else 200] and (method == "GET" or statuses[400])


@pytest.mark.soak
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_service_does_as_it_is_described_at_length(method: str, path: str) -> None:
    assert attack(method, path, 500 if method == "POST" else 50)
