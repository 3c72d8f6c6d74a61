"""Loading configurations from text, as a user's file and command line would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shardyard.config import Loaded, load_config
from shardyard.errors import UserError

REQUIRED = ("--model.model_name_or_path", "some/model", "--training.output_dir", "out")
"""The words that every configuration needs."""


def load(folder: Path, text: str, *words: str, environ: Mapping[str, str] | None = None) -> Loaded:
    """``text`` as ``folder/run.yaml``, the required words, then ``words``."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config([str(path), *REQUIRED, *words], environ=environ or {})


def fault_of(folder: Path, text: str, *words: str, environ: Mapping[str, str] | None = None) -> str:
    """The message that refuses ``text``, with the folder's name taken out."""
    with pytest.raises(UserError) as caught:
        load(folder, text, *words, environ=environ)
    return str(caught.value).replace(f"{folder}/", "")
