"""docs/templates.md says what the code does: its names, its texts, its keys."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from support.tokenizers import byte_tokenizer

from shardyard.data.templates.build import build_template
from shardyard.data.templates.spec import (
    TemplateSpec,
    known_templates,
    known_tool_formats,
    load_named,
)
from shardyard.data.types import Conversation, Message

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "templates.md").read_text(encoding="utf-8")
NAMES = sorted(known_templates())
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in DOCS.partition("## Names")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    and cells[0] != "`data.template`"
}  # fmt: skip
ONE = Conversation((Message("user", "Q"), Message("assistant", "R")))


@cache
def texts_of_the_page() -> dict[str, str]:
    """The first indented block below each ``### `name```."""
    found = re.findall(r"^### `([^`]+)`\n\n((?:    .*\n|\n)+)", DOCS, re.MULTILINE)
    return {name: re.sub(r"^    ", "", block, flags=re.MULTILINE).strip("\n") for name, block in found}


def tokenizer_for(name: str) -> Any:
    spec = load_named(name)
    tokenizer = byte_tokenizer(special=tuple(dict.fromkeys(("<bos>", "<eos>", *spec.tokens))), eos="<eos>")
    tokenizer.bos_token = "<bos>"
    return tokenizer


def test_the_table_lists_every_name() -> None:
    assert sorted(ROWS) == NAMES == sorted(texts_of_the_page())
    for others in known_templates().values():
        assert all(f"`{other}`" in DOCS for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_shown_is_the_text_trained(name: str) -> None:
    tokenizer = tokenizer_for(name)
    ((turn,),) = build_template(name, tokenizer).encode(ONE)
    assert f"{tokenizer.decode(turn.prompt)}[[{tokenizer.decode(turn.reply)}]]" == texts_of_the_page()[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_s_cells(name: str) -> None:
    _, system, tools, _, eos = ROWS[name]
    spec = load_named(name)
    assert (system == "no") == (spec.system is None and spec.system_in_user is None)
    assert ("in the first question" in system) == (spec.system_in_user is not None)
    assert ("has its own" in system) == bool(spec.default_system)
    assert tools.partition("`:")[0].strip("`") == (spec.tools or "none")
    tokenizer = tokenizer_for(name)
    build_template(name, tokenizer)
    changed = tokenizer.eos_token if tokenizer.eos_token != "<eos>" else "unchanged"
    assert eos.strip("`").replace("\\|", "|") == changed


def test_the_tool_formats_are_listed() -> None:
    section = DOCS.partition("## Tool formats")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in section for name in known_tool_formats())


def keys_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def test_the_keys_of_a_template_file_are_listed() -> None:
    section = DOCS.partition("## A template of your own")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_.]+)`", section))
    listed = {part for key in named for part in key.strip(".").split(".")}
    for model in (TemplateSpec, *parts_of(TemplateSpec)):
        assert keys_of(model) <= listed, keys_of(model) - listed


def parts_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models inside a model, at any depth."""
    found: list[type[BaseModel]] = []
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += [kind, *parts_of(kind)]
    return found


def test_the_example_file_works(tmp_path: Path) -> None:
    section = DOCS.partition("## A template of your own")[2]
    block = re.search(r"\n\n((?:    .*\n)+)", section)
    assert block
    text = re.sub(r"^    ", "", block[1], flags=re.MULTILINE)
    assert yaml.safe_load(text)["tools"] == "qwen"
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    tokenizer = byte_tokenizer()
    ((turn,),) = build_template(str(path), tokenizer).encode(ONE)
    assert tokenizer.decode(turn.prompt + turn.reply) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nR<|im_end|>\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
