"""infer_backend vllm and sglang, with stand-ins of the two packages that answer what is told here."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.generation import prompt_ids, write_chat_model

from shardyard.cli.generate import read_generate, run_generate
from shardyard.errors import UserError

ANSWER = "yes, it is"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("others") / "m")


@pytest.fixture
def asked(monkeypatch, model) -> dict[str, Any]:
    """What the stand-ins were asked: they are importable while the test runs."""
    seen: dict[str, Any] = {}
    ids = prompt_ids(model, ANSWER)

    class LLM:
        def __init__(self, **options: Any) -> None:
            seen["start"] = options

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            seen["prompts"] = [prompt["prompt_token_ids"] for prompt in prompts]
            seen["params"] = params
            told = [
                {token: SimpleNamespace(logprob=-0.5, rank=2), 0: SimpleNamespace(logprob=-0.25, rank=1)}
                for token in ids
            ]
            output = SimpleNamespace(token_ids=ids, finish_reason="length", logprobs=told)
            return [SimpleNamespace(outputs=[output]) for _ in prompts]

    class Engine:
        def __init__(self, **options: Any) -> None:
            seen["start"] = options

        def generate(self, input_ids: Any, sampling_params: Any) -> Any:
            seen["prompts"], seen["params"] = input_ids, sampling_params
            told = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}}
            return [told for _ in input_ids]

        def shutdown(self) -> None:
            seen["shut"] = True

    for name, parts in (("vllm", {"LLM": LLM, "SamplingParams": dict}), ("sglang", {"Engine": Engine})):
        package = ModuleType(name)
        vars(package).update(parts)
        monkeypatch.setitem(sys.modules, name, package)
    return seen


def run(*words: object) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        job = read_generate([str(word) for word in words])
        assert job is not None
        assert run_generate(job) == 0
    return out.getvalue().splitlines()


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_prompts_go_as_ids_and_answers_come_back_as_text(asked, model, backend):
    words = ["--model", model, "--raw", "--infer-backend", backend, "--prompt", "a", "--prompt", "bc"]
    lines = run(*words, "--max-new-tokens", 9, "--temperature", 0.5, "--top-p", 0.9, "--stop", " is")
    found = [json.loads(line) for line in lines]
    assert [row["text"] for row in found] == ["yes, it"] * 2 and found[0]["finish_reason"] == "stop"
    assert asked["prompts"] == [prompt_ids(model, "a"), prompt_ids(model, "bc")]
    params = asked["params"][0]
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}
    assert {key: params[key] for key in expected} == expected
    assert params["max_tokens" if backend == "vllm" else "max_new_tokens"] == 9
    start = asked["start"]
    assert start["model" if backend == "vllm" else "model_path"] == str(model)
    assert start["trust_remote_code"] is False and start["dtype"] == "auto"
    assert asked.get("shut", False) is (backend == "sglang")


def test_vllms_logprobs(asked, model):
    words = ["--model", model, "--raw", "--infer-backend", "vllm", "--prompt", "a", "--logprobs", 1]
    (line,) = run(*words)
    told = json.loads(line)["logprobs"][0]
    assert told["logprob"] == -0.5 and [(top["id"], top["logprob"]) for top in told["top"]] == [(0, -0.25)]
    assert asked["params"][0]["logprobs"] == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--infer-backend", "vllm", "--num-beams", "2"], "num_beams: beams are searched by infer_backend"),
        (["--infer-backend", "sglang", "--logprobs"], "logprobs: infer_backend huggingface or vllm"),
    ],
)
def test_what_they_cannot_do_is_refused(asked, model, words, part):
    with pytest.raises(UserError, match=part):
        run("--model", model, "--raw", "--prompt", "a", *words)


def test_an_engine_that_is_not_there_and_a_folder_that_it_cannot_read(asked, model, tmp_path, monkeypatch):
    words = ["--prompt", "a", "--infer-backend", "vllm"]
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match=r"shardyard convert .* --to hf --verify"):
        run("--model", tmp_path, *words)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="pip install vllm"):
        run("--model", model, *words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="it starts processes of its own"):
        run("--model", model, *words)
