"""The verb as a process: its words, its socket, its signals and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import write_tiny_model
from support.tokenizers import QWEN3_LIKE, byte_tokenizer

from shardyard.cli.serve import read_serve
from shardyard.errors import UserError
from shardyard.infer.serve.front import Front, bind, is_loopback

COMMAND = [sys.executable, "-m", "shardyard", "serve"]
SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ein Modell"
    tokenizer = byte_tokenizer(QWEN3_LIKE, eos="<|im_end|>")
    write_tiny_model(folder, "qwen3", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its root address."""
    environment = os.environ | {"SHARDYARD_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*COMMAND, "--model", str(folder), "--port", "0", "--grace", "5"], stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("serving"))
        found = re.fullmatch(r"serving ein Modell at (http://127\.0\.0\.1:\d+)/v1 \(Ctrl-C stops\)\n", line)
        assert found
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def test_it_serves_until_a_signal(served: tuple[subprocess.Popen[str], str]) -> None:
    process, root = served
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    request = urllib.request.Request(
        f"{root}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer sesame"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=SECONDS) as reply:
        told = json.load(reply)
    assert told["model"] == "ein Modell" and told["usage"]["completion_tokens"] <= 3
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    rest = process.stderr.read()
    assert process.wait(SECONDS) == 0
    assert "Traceback" not in rest and "sesame" not in rest


def test_a_port_in_use_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--model", str(tmp_path), "--port", str(port)], capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --port {port} on 127.0.0.1: Address already in use")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--port", "65536"], "--port 65536"),
        (["--port", "-1"], "--port"),
        (["--max-running", "0"], "--max-running"),
        (["--max-body-mib", "0"], "--max-body-mib"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--grace", "-1"], "--grace"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "a\nb"], "--api-key"),
        (["--temperature", "1"], "--temperature"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)):
        read_serve(["--model", "m", *words])


def test_the_key_comes_from_the_words_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*words: str) -> str | None:
        job = read_serve(["--model", "m", *words])
        assert job is not None
        return job.front.api_key

    assert key() is None and key("--api-key", "a") == "a"
    monkeypatch.setenv("SHARDYARD_API_KEY", "b")
    assert key() == "b" and key("--api-key", "a") == "a"
    monkeypatch.setenv("SHARDYARD_API_KEY", " ")
    with pytest.raises(UserError, match="SHARDYARD_API_KEY"):
        key()


def test_it_shows_itself_to_this_machine_only_unless_asked() -> None:
    with bind(Front(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "example.org"))
    with pytest.raises(UserError, match="--host"):
        bind(Front(host="no such host", port=0))
