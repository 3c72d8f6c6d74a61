"""Copies beside the computing: who waits for whom, on streams that write down what they are told."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from shardyard.device import CopyStream, Device, copy_stream


class Streams:
    """As torch.cuda: streams, the current one, and a log of what happens on which."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = "computing"

    def Stream(self) -> Any:
        return self

    def record_event(self) -> str:
        self.log.append(("event", "copying"))
        return "copied"

    @contextmanager
    def stream(self, stream: Any):
        before, self.current = self.current, "copying"
        yield
        self.current = before

    def current_stream(self) -> Any:
        return self

    def wait_event(self, event: str) -> None:
        self.log.append(("wait", self.current, event))


class Tensor:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def to(self, device: Any, *, non_blocking: bool) -> Tensor:
        self.streams.log.append(("copy", self.streams.current, str(device), non_blocking))
        return Tensor(self.streams)

    def record_stream(self, stream: Any) -> None:
        self.streams.log.append(("read on", stream.current))


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_copy_begins_on_its_own_stream_and_is_waited_for_on_the_one_that_computes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    streams = Streams()
    monkeypatch.setattr(Device, "_module", streams)
    monkeypatch.setattr(Device, "torch_device", f"{kind}:1")
    copies = copy_stream(Device(kind, 1))
    assert isinstance(copies, CopyStream)
    source: Any = Tensor(streams)
    arrival = copies.start(source)
    assert streams.log == [("copy", "copying", f"{kind}:1", True), ("event", "copying")]
    copied = arrival.wait()
    assert copied is arrival.tensor and copied is not source
    assert streams.log[2:] == [("wait", "computing", "copied"), ("read on", "computing")]


def test_a_cpu_has_no_copies() -> None:
    assert copy_stream(Device("cpu")) is None
