"""What stands beside converted weights: config.json as it now is, copies of the tokenizer and the like."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardyard.durable import flush, sync, temporary_name

_KINDS = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py", "additional_chat_templates/*.jinja")
_WEIGHTS = ("*.index.json", "config.json", "manifest.json", "run_state.json", "trainer_state.json")


def side_files(source: Path) -> list[Path]:
    """Files of a model's folder, relative to it, that go with its weights, but config.json."""
    found = {path for kind in _KINDS for path in source.glob(kind) if path.is_file()}
    return sorted(path.relative_to(source) for path in found if not any(map(path.match, _WEIGHTS)))


def write_side_files(config: Mapping[str, Any], source: Path, folder: Path) -> None:
    """config.json and copies of the side files of ``source``; each appears whole."""
    for name in side_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        temporary = temporary_name(folder / name)
        shutil.copyfile(source / name, temporary)
        _publish(temporary, folder / name)
    temporary = temporary_name(folder / "config.json")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n")
        flush(file)
    _publish(temporary, folder / "config.json")


def _publish(temporary: Path, path: Path) -> None:
    sync(temporary)
    temporary.replace(path)
