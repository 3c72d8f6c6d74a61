"""What the store keeps of each sample beside its tokens: what was left out of it, and its row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_verb.runs import Folder, pair

from shardyard.data.store import FLAG_LOST_THOUGHT, FLAG_TRUNCATED, SampleBlock, StoreWriter
from shardyard.data.types import Sample


def block(count: int, **known: list[int]) -> SampleBlock:
    ids = np.arange(2, dtype=np.int32)
    return SampleBlock.of([Sample(ids, ids, (2,))] * count, **known)


def test_they_come_back_and_are_unknown_where_nobody_told(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:
        writer.add(block(2, flags=[FLAG_TRUNCATED, FLAG_TRUNCATED | FLAG_LOST_THOUGHT], rows=[5, 2**40]))
        writer.add(block(1))
        store = writer.finish({})
    assert store.flags.tolist() == [1, 3, 0]
    assert store.rows.tolist() == [5, 2**40, -1]


@pytest.mark.parametrize("known", [{"flags": [0]}, {"rows": [0, 1, 2]}])
def test_too_few_or_many_are_refused(known: dict[str, list[int]], tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer, pytest.raises(ValueError, match="do not fit"):
        writer.add(block(2, **known))


def test_a_cache_of_the_layout_before_is_made_again(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [pair("q", ""), pair("q", "x" * 99), pair("q", "a")]
    folder.config(dataset={"file_name": folder.rows("a.jsonl", rows)})
    made = Path(folder.report(capsys)["sources"][0]["path"])
    manifest = json.loads((made / "manifest.json").read_text(encoding="utf-8"))
    (made / "manifest.json").write_text(json.dumps({**manifest, "format": 1}), encoding="utf-8")
    for name in ("flags.bin", "rows.bin"):
        (made / name).unlink()
    assert folder.report(capsys)["sources"][0]["path"] == str(made)
    assert np.fromfile(made / "flags.bin", "u1").tolist() == [FLAG_TRUNCATED, 0]
    assert np.fromfile(made / "rows.bin", "<i8").tolist() == [1, 2]
