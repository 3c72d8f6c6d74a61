"""Loading the tokenizer: what is missing is said, and padding is settled."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizers import byte_tokenizer

from shardyard.config.sections.model import ModelConfig
from shardyard.data.tokenizer import load_tokenizer
from shardyard.errors import UserError


def test_a_tokenizer_loads_from_the_models_folder_or_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces 模型"
    byte_tokenizer("{{ messages }}").save_pretrained(folder)
    for model in (
        ModelConfig(model_name_or_path=str(folder)),
        ModelConfig(model_name_or_path="some/model", tokenizer_name_or_path=str(folder)),
    ):
        tokenizer = load_tokenizer(model)
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
        assert tokenizer.chat_template == "{{ messages }}"


def test_a_padding_token_is_kept_and_an_eos_of_id_zero_counts_as_one(tmp_path: Path) -> None:
    byte_tokenizer(pad="<s>").save_pretrained(tmp_path / "pad")
    assert load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path / "pad"))).pad_token == "<s>"
    byte_tokenizer(special=("<|im_end|>",), eos="<|im_end|>").save_pretrained(tmp_path / "zero")
    assert load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path / "zero"))).pad_token_id == 0


@pytest.mark.parametrize("name", ["./missing", "/nowhere/at/all", "a/b/c", "missing/"])
def test_a_missing_folder_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(UserError, match=f"model.model_name_or_path: no such folder: {name}"):
        load_tokenizer(ModelConfig(model_name_or_path=name))


def test_a_folder_without_a_tokenizer_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no tokenizer that loads"):
        load_tokenizer(
            ModelConfig(model_name_or_path="some/model", tokenizer_name_or_path=str(tmp_path / "empty"))
        )
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="is a file"):
        load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path / "file")))


def test_code_that_comes_with_a_tokenizer_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "coded"
    folder.mkdir()
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').write('x')\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Tok", null]}, "tokenizer_class": "Tok"}', encoding="utf-8"
    )
    with pytest.raises(UserError):
        load_tokenizer(ModelConfig(model_name_or_path=str(folder)))
    assert not marker.exists()
