"""The examples of docs/parallelism.md fit the models they name, and its arithmetic is right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.published_shapes import PUBLISHED

from shardyard.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"<!-- check: (\S+) (\d+) -->\n```yaml\n(.*?)```", PAGE, flags=re.S)


def test_every_example_is_checked_and_all_sizes_are_there() -> None:
    assert len(SNIPPETS) == PAGE.count("```yaml")
    assert {world for _, world, _ in SNIPPETS} == {"8", "64", "512"}
    assert {model for model, _, _ in SNIPPETS} == {"Qwen3-8B", "Qwen3-235B-A22B", "DeepSeek-V3"}


@pytest.mark.parametrize(("model", "world", "text"), SNIPPETS)
def test_an_example_of_the_page_passes_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, world: str, text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    words = [f"model.model_name_or_path={tmp_path}", f"training.output_dir={tmp_path}/out", "data.dataset=x"]
    assert main(["check", str(tmp_path / "run.yaml"), *words, "--world-size", world]) == 0
    shown = capsys.readouterr().out
    assert f"layout on {world} ranks" in shown
    assert "warning" not in shown and "not checked" not in shown


@pytest.mark.parametrize(
    ("claim", "billions", "ranks"),
    [
        ("8.2 billion x 16 bytes / 8 = 16 GB", 8.2, 8),
        ("Qwen3-235B-A22B (470 GB a device)", 235, 8),
        ("235 billion x 16 bytes / 64 = 59 GB", 235, 64),
        ("DeepSeek-V3 (671 billion, 168 GB a device)", 671, 64),
        ("Qwen3-235B-A22B: 7 GB of state a device", 235, 512),
        ("DeepSeek-V3: 21 GB of state a device", 671, 512),
    ],
)
def test_the_pages_memory_is_sixteen_bytes_a_parameter(claim: str, billions: float, ranks: int) -> None:
    assert claim in PAGE
    (stated,) = re.findall(r"(\d+) GB", claim)
    assert int(stated) == round(billions * 16 / ranks)
