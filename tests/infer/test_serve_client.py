"""The openai client against the service with a model of its own: a tiny Qwen3 behind the real engine."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.inference import open_here
from support.models import write_tiny_model
from support.tokenizers import QWEN3_LIKE, byte_tokenizer

CONTEXT = 512
SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is the byte tokenizer's, so that all that it says is text."""
    folder = tmp_path_factory.mktemp("served") / "tiny-qwen3"
    tokenizer = byte_tokenizer(QWEN3_LIKE, eos="<|im_end|>")
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    write_tiny_model(
        folder, "qwen3", vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, eos_token_id=ends,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def in_rank(folder: Path, work: Callable[[Any, Any, Any], Any], **limits: Any) -> Any:
    """``work(client, service, plain)`` in a rank: an openai client, the service that it talks to, and the
    same model in transformers' own hands (an engine changes the attention of its).
    """
    import openai
    from transformers import AutoModelForCausalLM

    from shardyard.infer.engines import with_engine
    from shardyard.infer.serve import server
    from shardyard.infer.serve.front import Front, bind
    from shardyard.infer.serve.limits import Limits
    from shardyard.infer.serve.service import Service
    from shardyard.infer.serve.subject import Subject

    opened = open_here(folder)
    plain = SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer=opened.tokenizer,
        stop_ids=opened.stop_ids,
    )  # fmt: skip
    bounds = Limits(**{"max_running": 8, "max_waiting": 64, **limits})

    def serve(engine: Any) -> Any:
        service = Service(engine, Subject(opened, opened.name, bounds, engine.context_length), bounds)
        front = Front(port=0, api_key="sesame")
        listener = bind(front)
        listener.listen()
        servers: list[Any] = []
        codes: list[int] = []
        thread = threading.Thread(
            target=lambda: codes.append(server.run(service, front, listener, servers.append))
        )
        port = listener.getsockname()[1]
        thread.start()
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0, timeout=SECONDS
        )
        try:
            return work(client, service, plain)
        finally:
            client.close()
            servers[0].handle_exit(15, None)
            thread.join(SECONDS)
            assert codes == [0]

    return with_engine(opened, serve, max_running=bounds.max_running, cache_tokens=4096)


def run(ranks: Any, folder: Path, work: Any, **limits: Any) -> Any:
    return ranks.run(1, in_rank, folder, work, init_process_group=False, **limits)[0]


def hello(text: str = "Hello") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def greedy(plain: Any, ids: list[int], count: int) -> list[int]:
    """transformers' own generate."""
    import torch

    given = torch.tensor([ids])
    with torch.no_grad():
        found = plain.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
            eos_token_id=sorted(plain.stop_ids), pad_token_id=0,
        )  # fmt: skip
    answer = found[0, len(ids) :].tolist()
    return answer[:-1] if answer[-1] in plain.stop_ids else answer


def talk(client: Any, service: Any, plain: Any) -> None:
    """Chat, streams, logprobs, completions: each equals what transformers' generate says."""
    model = client.models.list().data[0].id
    assert model == "tiny-qwen3" and client.models.retrieve(model).id == model
    prompt = plain.tokenizer.apply_chat_template(hello(), add_generation_prompt=True)["input_ids"]
    expected = plain.tokenizer.decode(greedy(plain, prompt, 12), skip_special_tokens=True)

    whole = client.chat.completions.create(model=model, messages=hello(), max_tokens=12, temperature=0)
    assert whole.choices[0].message.content.strip() == expected.strip()
    assert whole.usage.prompt_tokens == len(prompt)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=hello(), max_completion_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].usage == whole.usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text.strip() == expected.strip()
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason

    ids = plain.tokenizer("abc")["input_ids"]
    answer = greedy(plain, ids, 6)
    texts = client.completions.create(
        model=model, prompt=["abc", "x"], max_tokens=6, temperature=0, logprobs=3, n=2, seed=1
    )
    assert len(texts.choices) == 4 and texts.choices[0].text == texts.choices[1].text
    assert texts.choices[0].text == plain.tokenizer.decode(answer, skip_special_tokens=True)
    check_logprobs(plain, ids, answer, texts.choices[0].logprobs)

    drawn = [
        client.completions.create(model=model, prompt="abc", max_tokens=9, temperature=1.5, seed=seed)
        for seed in (7, 7, 8)
    ]
    same, again, other = (one.choices[0].text for one in drawn)
    assert same == again != other


def check_logprobs(plain: Any, prompt: list[int], answer: list[int], told: Any) -> None:
    """By a plain forward over prompt and answer."""
    import torch

    with torch.no_grad():
        logits = plain.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1)
    expected = scores.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
    assert told.token_logprobs[: len(answer)] == pytest.approx(expected, abs=1e-4)
    for row, top in zip(scores, told.top_logprobs, strict=False):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)


def meet_faults(client: Any, service: Any, plain: Any) -> None:
    """Each fault is the client's own exception, with its parameter and code."""
    import openai

    def fault(kind: type[Exception], path: str = "chat", **body: Any) -> Any:
        create = client.chat.completions.create if path == "chat" else client.completions.create
        with pytest.raises(kind) as found:
            create(**({"model": "tiny-qwen3", "max_tokens": 4} | body))
        return found.value

    found = fault(openai.BadRequestError, messages=hello("a" * 600))
    assert (found.code, found.param) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in found.message
    assert fault(openai.NotFoundError, messages=hello(), model="gpt-4").code == "model_not_found"
    found = fault(openai.BadRequestError, messages=hello(), extra_body={"grammar": "x"})
    assert (found.code, found.param) == ("unknown_parameter", "grammar")
    assert fault(openai.BadRequestError, "text", prompt=[10**6]).status_code == 400
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert service.engine.load().running == 0
    ids = {tool["function"]["name"] for tool in TOOLS}
    reply = client.chat.completions.create(
        model="tiny-qwen3", messages=hello(), tools=TOOLS, max_tokens=3, extra_body={"enable_thinking": False}
    )
    assert reply.choices[0].finish_reason == "length" and ids == {"add"}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]


def ask_at_once(client: Any, service: Any, plain: Any) -> None:
    """16 requests at a time, more than run together, each of another length: as they answer alone."""
    prompts = ["ab" * (1 + 3 * number) for number in range(16)]

    def ask(prompt: str) -> str:
        create = client.completions.create
        if len(prompt) % 4:
            chunks = create(model="tiny-qwen3", prompt=prompt, max_tokens=10, temperature=0, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)
        return create(model="tiny-qwen3", prompt=prompt, max_tokens=10, temperature=0).choices[0].text

    alone = [
        plain.tokenizer.decode(
            greedy(plain, plain.tokenizer(prompt)["input_ids"], 10), skip_special_tokens=True
        )
        for prompt in prompts
    ]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == alone
    wait_for(lambda: service.active == 0)


def leave(client: Any, service: Any, plain: Any) -> None:
    """A client that leaves in the midst of a stream: the engine stops working for it."""
    stream = client.completions.create(
        model="tiny-qwen3", prompt="abc", max_tokens=500, temperature=0, stream=True,
        logit_bias={str(token): -100 for token in plain.stop_ids},
    )  # fmt: skip
    next(iter(stream))
    assert service.engine.load().running == 1
    stream.close()
    wait_for(lambda: service.active == 0 and service.engine.load().running == 0)
    assert service.engine.load().new_tokens < 490
    assert service.metrics.cancelled == 1
    after = client.completions.create(model="tiny-qwen3", prompt="abc", max_tokens=4, temperature=0)
    assert after.choices[0].finish_reason in ("length", "stop")


def ask_often(client: Any, service: Any, plain: Any, count: int = 24) -> None:
    """What living tensors hold does not grow, nor do the service's own objects."""
    sizes = []
    for number in range(count + 10):
        ask_one(client, number)
        if number in (9, count + 9):
            wait_for(lambda: service.active == 0)
            gc.collect()
            sizes.append(living_bytes())
    assert service.engine.load().running == service.engine.load().waiting == 0
    assert sizes[1] - sizes[0] < 2**20, sizes


def ask_500_times(client: Any, service: Any, plain: Any) -> None:
    ask_often(client, service, plain, 500)


def ask_one(client: Any, number: int) -> None:
    import openai

    create = client.completions.create
    common = {"model": "tiny-qwen3", "prompt": "ab" * (1 + number % 7), "max_tokens": 5}
    match number % 4:
        case 0:
            create(**common, n=2, temperature=1.0)
        case 1:
            list(create(**common, stream=True))
        case 2:
            stream = create(**common | {"max_tokens": 100}, stream=True)
            next(iter(stream))
            stream.close()
        case _:
            with pytest.raises(openai.BadRequestError):
                create(**common | {"prompt": "a" * 600})


def living_bytes() -> int:
    import torch

    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def wait_for(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("work", [talk, meet_faults, ask_at_once, leave, ask_often])
def test_the_openai_client(ranks: Any, folder: Path, work: Any) -> None:
    run(ranks, folder, work)


@pytest.mark.soak
def test_memory_is_flat_over_500_requests(ranks: Any, folder: Path) -> None:
    ranks.run(1, in_rank, folder, ask_500_times, init_process_group=False, timeout_s=900)


def test_the_description_names_every_route(ranks: Any, folder: Path) -> None:
    described = run(ranks, folder, describe)
    assert set(described["paths"]) == {
        "/v1/models", "/v1/models/{model}", "/v1/chat/completions", "/v1/completions", "/health", "/metrics",
    }  # fmt: skip


def describe(client: Any, service: Any, plain: Any) -> Any:
    import httpx2

    root = str(client.base_url).removesuffix("/v1/")
    return json.loads(httpx2.get(f"{root}/openapi.json", headers={"authorization": "Bearer sesame"}).content)
