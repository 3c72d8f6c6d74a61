"""The service as a process's server: its socket, clients that leave, faults of bytes, its end."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from support.fake_engine import FakeEngine, FakeSide, says
from support.tokenizers import QWEN3_LIKE, byte_tokenizer

from shardyard.infer.opening import Choice
from shardyard.infer.serve import server
from shardyard.infer.serve.front import Front, bind
from shardyard.infer.serve.growing import Growing
from shardyard.infer.serve.limits import Limits
from shardyard.infer.serve.service import Service
from shardyard.infer.serve.subject import Subject

TOKENIZER = byte_tokenizer(QWEN3_LIKE)
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TEXT = "/v1/completions"
SECONDS = 30.0


class Running:
    """A service on a port of its own, in a thread."""

    def __init__(self, engine: FakeEngine, limits: Limits, **front: Any) -> None:
        side = FakeSide(TOKENIZER, frozenset({STOP}), choice=Choice("somewhere"))
        self.engine = engine
        self.service = Service(engine, Subject(side, "tiny", limits, engine.context_length), limits)
        self.front = Front(port=0, **front)
        listener = bind(self.front)
        listener.listen()  # so that a client may come before the loop runs
        self.port = listener.getsockname()[1]
        self.code: int | None = None
        self.servers: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(listener,))
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        self.code = server.run(self.service, self.front, listener, self.servers.append)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=SECONDS, **options)

    def send(self, data: bytes) -> bytes:
        """What comes back to bytes that need not be HTTP."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def stop(self) -> int | None:
        """As by a signal; the exit code."""
        self.servers[0].handle_exit(15, None)
        return self.end()

    def end(self) -> int | None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.code


@contextlib.contextmanager
def running(script: Any, limits: Limits | None = None, **front: Any) -> Iterator[Running]:
    engine = FakeEngine(script)
    found = Running(engine, limits or Limits(max_running=2, max_waiting=1), **front)
    try:
        wait_for(lambda: found.servers and found.servers[0].started)
        yield found
    finally:
        engine.go.set()
        if found.code is None:
            found.stop()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


HANGS = says(TOKENIZER, "abcdef", wait_after=3)


def post(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post(TEXT, json={"prompt": "a", "max_tokens": 100} | more)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_place(streams: bool) -> None:
    with running(HANGS) as found:
        body = json.dumps({"prompt": "a", "max_tokens": 100, "n": 2, "stream": streams}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", found.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: len(found.engine.asked) == 2)
        assert found.service.active == 2
        connection.close()
        wait_for(lambda: found.service.active == 0)
        assert sorted(found.engine.cancelled) == ["request-0", "request-1"]
        assert f'route="{TEXT}",code="499"}} 1' in found.service.page()
        assert "shardyard_answers_cancelled_total 2" in found.service.page()


def test_a_full_queue_says_when_to_come_again() -> None:
    with running(HANGS) as found, found.client() as client:
        threads = [threading.Thread(target=post, args=(found.client(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: found.service.active == 3)
        refused = post(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert post(client, n=4).status_code == 400  # more than there will ever be room for
        found.engine.go.set()
        for thread in threads:
            thread.join()
        assert post(client).status_code == 200


def test_an_answer_that_takes_too_long_is_ended() -> None:
    with running(HANGS, Limits(request_timeout=0.3)) as found, found.client() as client:
        whole = post(client)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        *_, fault, end = post(client, stream=True).text.split("\n\n")
        assert json.loads(fault.removeprefix("data: "))["error"]["code"] == "timeout" and end == ""
        wait_for(lambda: found.service.active == 0)
        assert len(found.engine.cancelled) == 2


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    long = says(TOKENIZER, "abcdefgh" * 60)
    limits = Limits(max_running=500, max_waiting=0, request_timeout=1.0)
    with running(long, limits) as found:
        # more than the socket's buffers hold
        body = json.dumps(
            {"prompt": "a", "n": 100, "max_tokens": 500, "stream": True, "logprobs": 20}
        ).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", found.port))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: found.service.active == 100)
            wait_for(lambda: found.service.active == 0)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_engine_ends_requests_and_the_process(streams: bool, silently: bool) -> None:
    with running(HANGS) as found, found.client() as client:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(found.client(), stream=streams)))
        thread.start()
        wait_for(lambda: found.engine.asked)
        found.engine.die("RuntimeError in /secret/path", silently=silently)
        assert client.get("/health").status_code == 503
        assert post(client).json()["error"]["code"] == "engine_stopped"
        thread.join()
        text = answers[0].text
        assert "engine_stopped" in text and "/secret" not in text and "[DONE]" not in text
        assert answers[0].status_code == (200 if streams else 503)
        assert found.end() == 1


def test_a_fault_of_one_answer_is_a_500_without_its_text() -> None:
    from shardyard.infer.types import Finished

    with running(lambda request: [Finished("error", "at /secret/path")]) as found, found.client() as client:
        reply = post(client)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert "/secret" not in reply.text
        assert client.get("/health").status_code == 200


def test_a_signal_lets_running_requests_end() -> None:
    with running(HANGS, grace=SECONDS) as found:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(found.client())))
        thread.start()
        with found.client() as client:
            assert client.get("/health").status_code == 200
            wait_for(lambda: found.engine.asked)
            found.servers[0].handle_exit(15, None)
            wait_for(lambda: found.service.closing)
            assert found.service.refusal is not None
            found.engine.go.set()
            thread.join()
        assert answers[0].status_code == 200 and answers[0].json()["choices"][0]["text"] == "abcdef"
        assert found.end() == 0


def test_after_the_grace_requests_are_cut_off() -> None:
    with running(HANGS, grace=0.2) as found:
        connection = socket.create_connection(("127.0.0.1", found.port))
        body = b'{"prompt": "a", "stream": true}'
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: found.engine.asked)
        assert found.stop() == 0
        assert found.engine.cancelled == ["request-0"]
        connection.close()


BODIES = {
    "broken": (b'{"prompt": ', "invalid_json"),
    "nan": (b'{"prompt": "a", "top_p": NaN}', "invalid_json"),
    "infinity": (b'{"prompt": "a", "top_p": -Infinity}', "invalid_json"),
    "too large a float": (b'{"prompt": "a", "top_p": 1e999}', "invalid_json"),
    "too large an int": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    "large int": (b'{"prompt": "a", "seed": ' + b"9" * 50 + b"}", "invalid_value"),
    "deep": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "invalid_json"),
    "deep objects": (b'{"prompt": ' + b'{"a":' * 150 + b"1" + b"}" * 151, "invalid_json"),
    "bytes": (b'{"prompt": "\xff\xfe"}', "invalid_json"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"),
    "half a character": (b'{"prompt": "\\ud83d"}', "invalid_json"),
    "half a key": (b'{"\\udc00": 1}', "invalid_json"),
    "array": (b"[1]", "invalid_json"),
    "nothing": (b"", "invalid_json"),
    "null": (b"null", "invalid_json"),
    "a zero byte in a name": (b'{"prompt": "a", "\\u0000": 1}', "unknown_parameter"),
}


def test_garbage_is_refused_in_the_apis_form() -> None:
    with running(says(TOKENIZER, "x")) as found, found.client() as client:
        for name, (body, code) in BODIES.items():
            reply = client.post(TEXT, content=body, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), name
        for kind in ("text/plain", "application/json; charset=latin-1", "multipart/form-data", ""):
            reply = client.post(TEXT, content=b"{}", headers={"content-type": kind})
            assert reply.status_code == 415, kind
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        assert client.post(TEXT, content=b"{}", headers=headers).status_code == 415
        for method, path, status in (("GET", TEXT, 405), ("GET", "/v1", 404), ("DELETE", "/health", 405)):
            reply = client.request(method, path)
            assert reply.status_code == status and set(reply.json()["error"]) == {
                "message", "type", "param", "code",
            }  # fmt: skip
        assert not found.engine.asked and found.service.active == 0
        assert client.post(TEXT, json={"prompt": "\x00😀"}).status_code == 200


def test_what_is_no_http_is_answered_too() -> None:
    with running(says(TOKENIZER, "x")) as found:
        reply = found.send(b"GARBAGE\r\n\r\n")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert (
            head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["type"] == "invalid_request_error"
        )


def test_a_body_is_bounded_whatever_its_length_says() -> None:
    limits = Limits(max_body_bytes=1000)
    with running(says(TOKENIZER, "x"), limits) as found, found.client() as client:
        large = json.dumps({"prompt": "a" * 1000}).encode()
        kind = {"content-type": "application/json"}
        for content in (large, (large[n : n + 100] for n in range(0, len(large), 100))):
            reply = client.post(TEXT, content=content, headers=kind)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert post(client).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.infer.serve.body.BODY_SECONDS", 0.2)
    with running(says(TOKENIZER, "x")) as found:
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection:
            connection.sendall(head.encode() + b'{"a')
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_the_key_is_wanted_but_for_the_health() -> None:
    with running(says(TOKENIZER, "x"), api_key="sesame") as found, found.client() as client:
        assert client.get("/health").status_code == 200
        for given in (None, "Bearer", "Bearer wrong", "Basic sesame", "Bearer sesame2", "sesame"):
            headers = {} if given is None else {"authorization": given}
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", TEXT), ("GET", "/no")):
                reply = client.request(method, path, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models", headers={"authorization": "bearer  sesame"}).status_code == 200


def test_pages_of_other_origins_are_let_in_by_name_only() -> None:
    there, elsewhere = {"origin": "https://there.example"}, {"origin": "https://elsewhere.example"}
    with running(says(TOKENIZER, "x"), allow_origins=(there["origin"],)) as found, found.client() as client:
        assert client.get("/health", headers=there).headers["access-control-allow-origin"] == there["origin"]
        assert "access-control-allow-origin" not in client.get("/health", headers=elsewhere).headers
    with running(says(TOKENIZER, "x")) as found, found.client() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=there).headers


def test_the_log_has_requests_and_no_prompts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with running(says(TOKENIZER, "x"), access_log=True) as found, found.client() as client:
        reply = client.post(f"{TEXT}?note=private", json={"prompt": "private words"})
        client.get("/a%0Ab")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("access")]
    assert f"POST {TEXT} 200" in lines[0] and reply.headers["x-request-id"] in lines[0]
    assert "GET /a\\nb 404" in lines[1]
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert not [line for line in ours if "private" in line]


def soak(count: int) -> tuple[int, int]:
    """Over ``count`` requests after a first few: (answers that are still there, objects more than before)."""
    with running(says(TOKENIZER, "some words", wait_after=None)) as found, found.client() as client:
        sizes = []
        for number in range(count + 20):
            if number % 5 == 4:
                client.post(TEXT, json={"prompt": "a", "foo": 1})
            else:
                post(client, stream=number % 2 == 0, stop="w" if number % 3 == 0 else None)
            if number in (19, count + 19):
                for kept_by_the_fake in (found.engine.asked, found.engine.finished, found.engine.cancelled):
                    kept_by_the_fake.clear()
                gc.collect()
                sizes.append(len(gc.get_objects()))
        wait_for(lambda: found.service.active == 0)
        gc.collect()
        return sum(isinstance(one, Growing) for one in gc.get_objects()), sizes[1] - sizes[0]


def test_requests_leave_nothing_behind() -> None:
    kept, grown = soak(200)
    assert kept == 0 and grown < 200


@pytest.mark.soak
def test_memory_is_flat_over_500_requests() -> None:
    kept, grown = soak(500)
    assert kept == 0 and grown < 200
