"""What a long preprocessing says of itself."""

from __future__ import annotations

from shardyard.data.progress import InputProgress


def test_the_line_tells_share_speed_and_time_left():
    progress = InputProgress(1000, done=500)
    progress.advance(250, documents=3, tokens=100)
    # 250 bytes in 10 seconds: as much again is left; 750 of 1,000 are done
    assert progress.line(10.0) == "75.0 %, 3 documents, 100 tokens, 10 tokens/s, 0:00:10 left"


def test_before_the_first_bytes_the_time_left_is_not_made_up():
    assert InputProgress(1000).line(1.0) == "0.0 %, 0 documents, 0 tokens, 0 tokens/s, time left unknown"


def test_a_line_every_so_many_documents(caplog):
    caplog.set_level("INFO", "shardyard.data")
    with InputProgress(100, every_documents=10) as progress:
        for _ in range(8):
            progress.advance(5, documents=4, tokens=1)
    done = [record.message.split(" documents")[0].rsplit(" ", 1)[1] for record in caplog.records]
    assert done == ["12", "20", "32"]
