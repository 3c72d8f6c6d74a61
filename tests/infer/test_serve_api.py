"""The service's two APIs over a scripted engine: what is asked of it, and what clients are told."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fake_engine import FakeEngine, FakeSide, says
from support.tokenizers import QWEN3_LIKE, byte_tokenizer

from shardyard.infer.opening import Choice
from shardyard.infer.serve.application import build_app
from shardyard.infer.serve.limits import Limits
from shardyard.infer.serve.service import Service
from shardyard.infer.serve.subject import Subject
from shardyard.infer.types import Finished, Token

TOKENIZER = byte_tokenizer(QWEN3_LIKE)
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]


def service_of(answer: Any, *, limits: Limits | None = None, run: Any = None, **options: Any) -> Service:
    script = says(TOKENIZER, answer, **options) if isinstance(answer, str) else answer
    limits = limits or Limits(max_running=4, max_waiting=4, max_body_bytes=100_000)
    side = FakeSide(TOKENIZER, frozenset({STOP}), run=run, choice=Choice("somewhere"))
    engine = FakeEngine(script)
    return Service(engine, Subject(side, "tiny", limits, engine.context_length), limits)


def client_of(service: Service, **options: Any) -> TestClient:
    return TestClient(build_app(service, **options))


def ask(answer: Any, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    reply = client_of(service_of(answer, **options)).post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(answer: Any, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    reply = client_of(service_of(answer, **options)).post(path, json=body | {"stream": True})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    *events, last, end = reply.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@cache
def _shared() -> TestClient:
    """For requests that are refused, and leave nothing behind."""
    return client_of(service_of("x"))


def fault_of(path: str, body: Any, **options: Any) -> dict[str, Any]:
    """The error of a refused request, in OpenAI's shape."""
    client = client_of(service_of("x", **options)) if options else _shared()
    reply = client.post(path, json=body)
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error | {"status": reply.status_code}


def sampling_of(path: str, body: dict[str, Any], **options: Any) -> Any:
    service = service_of("ok", **options)
    assert client_of(service).post(path, json=body).status_code == 200
    return service.engine.asked[0].sampling  # type: ignore[attr-defined]


def test_chat_answers_in_the_apis_form() -> None:
    told = ask("Good day", CHAT, {"model": "tiny", "messages": HELLO})
    assert (told["object"], told["model"]) == ("chat.completion", "tiny")
    assert told["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "Good day"}, "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    prompt = len(TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"])
    made = len(TOKENIZER("Good day")["input_ids"]) + 1  # and the stop token
    assert told["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
    }  # fmt: skip


def test_chat_asks_for_the_templates_own_prompt() -> None:
    service = service_of("x")
    client_of(service).post(
        CHAT, json={"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    )
    expected = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True, enable_thinking=False)
    assert list(service.engine.asked[0].prompt_ids) == expected["input_ids"]  # type: ignore[attr-defined]


def test_a_message_is_gone_on_with() -> None:
    service = service_of("x")
    messages = [*HELLO, {"role": "assistant", "content": "Good d"}]
    client_of(service).post(CHAT, json={"messages": messages, "continue_final_message": True})
    text = TOKENIZER.decode(service.engine.asked[0].prompt_ids)  # type: ignore[attr-defined]
    assert text.endswith("Good d")


def test_thoughts_and_calls_are_told_apart() -> None:
    reply = '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    choice = ask(reply, CHAT, {"messages": HELLO, "tools": TOOLS})["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "hm")
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert choice["finish_reason"] == "tool_calls"


def test_without_tools_nothing_is_a_call() -> None:
    reply = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for body in ({"messages": HELLO}, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}):
        choice = ask(reply, CHAT, body)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (reply, "stop")


def test_a_stream_joins_to_the_whole_answer() -> None:
    reply = (
        '<think>\nhm\n</think>\n\nSo é:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    body = {"messages": HELLO, "tools": TOOLS, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, usage = stream(reply, CHAT, body)
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] > 0
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    for number in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == number]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "So é:"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["index"] == 0 and json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
        assert choices[-1]["delta"] == {}


def test_a_stream_without_usage_does_not_speak_of_it() -> None:
    assert all("usage" not in chunk for chunk in stream("yes", CHAT, {"messages": HELLO}))


def test_logprobs_of_a_chat() -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    (choice,) = ask("hé", CHAT, body)["choices"]
    tokens = choice["logprobs"]["content"]
    # one token a byte, and the stop token is not part of the answer
    assert [token["bytes"] for token in tokens] == [[byte] for byte in "hé".encode()]
    assert [token["logprob"] for token in tokens] == [-1.0, -2.0, -3.0]
    assert [top["token"] for top in tokens[0]["top_logprobs"]] == ["h", "\ufffd"]
    streamed = [
        c["logprobs"]["content"] for e in stream("hé", CHAT, body) for c in e["choices"] if c["logprobs"]
    ]
    assert [token for part in streamed for token in part] == tokens


def test_logprobs_of_a_completion() -> None:
    (choice,) = ask("hé!", TEXT, {"prompt": "a", "logprobs": 1})["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "!"], "token_logprobs": [-1.0, -2.0, -3.0, -4.0],
        "top_logprobs": [{"h": -1.0}] * 4, "text_offset": [0, 1, 2, 2],
    }  # fmt: skip


def test_tokens_behind_a_stop_text_have_no_logprobs() -> None:
    (choice,) = ask("abcdef", TEXT, {"prompt": "a", "logprobs": 0, "stop": ["cd"]})["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == (
        "ab",
        ["a", "b"],
        "stop",
    )


def test_a_token_that_cannot_be_is_a_number() -> None:
    events = [Token(80, float("-inf")), Finished("length")]
    (choice,) = ask(lambda request: events, TEXT, {"prompt": "a", "logprobs": 0})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


def test_completions_of_several_prompts() -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "echo": True}
    told = ask("abcdef", TEXT, body)
    assert [(choice["index"], choice["text"]) for choice in told["choices"]] == [
        (0, "oneabc"), (1, "oneabc"), (2, "twoabc"), (3, "twoabc"),
    ]  # fmt: skip
    assert {choice["finish_reason"] for choice in told["choices"]} == {"length"}
    made = 4 * 3
    prompts = sum(len(TOKENIZER(text)["input_ids"]) for text in ("one", "two"))
    assert told["usage"] == {
        "prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made,
    }  # fmt: skip


def test_completions_of_token_ids() -> None:
    ids = TOKENIZER("one")["input_ids"]
    service = service_of("x")
    for prompt, expected in ((ids, [ids]), ([ids, ids[:1]], [ids, ids[:1]])):
        service.engine.asked.clear()  # type: ignore[attr-defined]
        client_of(service).post(TEXT, json={"prompt": prompt})
        found = [list(request.prompt_ids) for request in service.engine.asked]  # type: ignore[attr-defined]
        assert found == expected
    echoed = stream("x", TEXT, {"prompt": ids, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in echoed) == "onex"


def test_stop_texts_end_an_answer_in_the_engine_too() -> None:
    service = service_of("ab.cd" * 50, wait_after=20)
    told = client_of(service).post(TEXT, json={"prompt": "a", "stop": ".c", "max_tokens": 200}).json()
    assert told["choices"][0]["text"] == "ab"
    assert service.engine.cancelled == ["request-0"]  # type: ignore[attr-defined]


def test_every_sampling_field_reaches_the_engine() -> None:
    body = {
        "prompt": "a", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "max_tokens": 9,
        "logit_bias": {"3": -100, "4": 2.5},
    }  # fmt: skip
    sampling = sampling_of(TEXT, body)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_new_tokens) == (1.1, 5, 9)
    assert sampling.logit_bias == {3: -100.0, 4: 2.5} and sampling.stop_ids == {STOP}


def test_what_is_left_out_is_as_the_run_and_the_model_say() -> None:
    run = {"inference": {"temperature": 0.7, "max_new_tokens": 33, "system": "Be brief.", "stop": ["!"]}}
    sampling = sampling_of(CHAT, {"messages": HELLO}, run=run)
    assert (sampling.temperature, sampling.max_new_tokens) == (0.7, 33)
    assert sampling_of(CHAT, {"messages": HELLO, "temperature": 0}, run=run).is_greedy
    assert sampling_of(TEXT, {"prompt": "a"}).max_new_tokens == 16  # as OpenAI has it
    assert sampling_of(TEXT, {"prompt": "abc", "max_tokens": 10**6}).max_new_tokens == 512 - 3
    service = service_of("no!", run=run)
    told = client_of(service).post(CHAT, json={"messages": HELLO}).json()
    assert told["choices"][0]["message"]["content"] == "no"
    text = TOKENIZER.decode(service.engine.asked[0].prompt_ids)  # type: ignore[attr-defined]
    assert "system\nBe brief." in text


def test_answers_of_one_request_have_seeds_of_their_own() -> None:
    service = service_of("x")
    client_of(service).post(TEXT, json={"prompt": "a", "n": 3, "seed": 2**63 - 1, "temperature": 1})
    seeds = [request.sampling.seed for request in service.engine.asked]  # type: ignore[attr-defined]
    assert seeds == [2**63 - 1, 0, 1]


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"stop": None},
        {"response_format": {"type": "text"}}, {"parallel_tool_calls": True}, {"temperature": None},
        {"max_completion_tokens": 4}, {"logit_bias": {}}, {"tools": []}, {"tool_choice": "auto"},
        {"modalities": ["text"]}, {"stream_options": None}, {"top_k": -1}, {"best_of": None},
    ],
)  # fmt: skip
def test_fields_that_change_nothing_are_taken(field: dict[str, Any]) -> None:
    if field == {"best_of": None}:
        ask("x", TEXT, {"prompt": "a"} | field)
    else:
        ask("x", CHAT, {"messages": HELLO} | field)


@pytest.mark.parametrize(
    ("field", "param", "code"),
    [
        ({"foo": 1}, "foo", "unknown_parameter"),
        ({"functions": []}, "functions", "unknown_parameter"),
        ({"stream": True, "stream_options": {"bar": 1}}, "stream_options.bar", "unknown_parameter"),
        ({"chat_template_kwargs": {"bar": 1}}, "chat_template_kwargs.bar", "unknown_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
         "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 10**40}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 9}, "n", None),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "invalid_value"),
        ({"logit_bias": {"399": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"400": 1}}, None, "invalid_value"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice",
         "invalid_value"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "invalid_value"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "invalid_value"),
        ({"store": True}, "store", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking",
         "invalid_value"),
        ({"continue_final_message": True}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_is_refused_by_field(field: dict[str, Any], param: str, code: str) -> None:
    error = fault_of(CHAT, {"messages": HELLO} | field)
    assert (error["status"], error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["code"] == code


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [400]}, None),
        ({"prompt": "a" * 600}, "prompt"), ({"suffix": "b"}, "suffix"), ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"), ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"prompt": ["a"] * 200}, "prompt"),
    ],
)  # fmt: skip
def test_a_completion_that_cannot_be_is_refused_by_field(field: dict[str, Any], param: str | None) -> None:
    error = fault_of(TEXT, {"prompt": "a"} | field)
    assert (error["status"], error["param"]) == (400, param)


def test_a_required_field_is_missed_by_name() -> None:
    assert fault_of(CHAT, {})["code"] == fault_of(TEXT, {})["code"] == "missing_required_parameter"


def test_the_bounds_of_the_operator_hold() -> None:
    limits = Limits(max_running=2, max_waiting=0, max_prompt_tokens=20, max_new_tokens=10)
    assert fault_of(TEXT, {"prompt": "a" * 21}, limits=limits)["code"] == "context_length_exceeded"
    error = fault_of(TEXT, {"prompt": "a", "max_tokens": 11}, limits=limits)
    assert (error["param"], error["status"]) == ("max_tokens", 400)
    assert sampling_of(TEXT, {"prompt": "a" * 20, "max_tokens": 10}, limits=limits).max_new_tokens == 10
    assert sampling_of(TEXT, {"prompt": "a"}, limits=limits).max_new_tokens == 10


def test_another_model_is_not_there() -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        error = fault_of(path, body | {"model": "gpt-4"})
        assert (error["status"], error["param"], error["code"]) == (404, "model", "model_not_found")


def test_a_model_without_a_template_takes_completions_only() -> None:
    tokenizer = byte_tokenizer()
    limits = Limits()
    side = FakeSide(tokenizer, frozenset({STOP}), choice=Choice("somewhere"))
    service = Service(FakeEngine(says(tokenizer, "yes")), Subject(side, "tiny", limits, 512), limits)
    client = client_of(service)
    assert client.post(CHAT, json={"messages": HELLO}).json()["error"]["code"] == "no_chat_template"
    assert client.post(TEXT, json={"prompt": "a"}).json()["choices"][0]["text"] == "yes"
