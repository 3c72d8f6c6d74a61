"""What stands beside converted weights: config.json as it now is, copies of the tokenizer and the like."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardyard.durable import remove_leftovers, sync, temporary_name

_KINDS = ("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py", "additional_chat_templates/*.jinja")
_OTHER = (
    "*.index.json", "config.json", "manifest.json", "run_state.json", "trainer_state.json",
    "adapter_config.json",  # a model beside one would be taken for an adapter
)  # fmt: skip


def side_files(source: Path) -> list[Path]:
    """Files of a model's folder, relative to it, that go with its weights, but config.json."""
    found = {path for kind in _KINDS for path in source.glob(kind) if path.is_file()}
    return sorted(path.relative_to(source) for path in found if not any(map(path.match, _OTHER)))


def write_side_files(config: Mapping[str, Any], source: Path, folder: Path) -> None:
    """config.json and copies of the side files of ``source``; each appears whole."""
    for name in side_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        with _arriving(folder / name) as temporary:
            shutil.copyfile(source / name, temporary)
    with _arriving(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _arriving(path: Path) -> Iterator[Path]:
    """The temporary name of a file that is there whole afterwards, or not at all."""
    remove_leftovers(path)
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
