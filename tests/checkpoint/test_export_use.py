"""What whoever loads an export meets: a config that reads back, stop ids and template of the training, and
no export that is lost to our own check of it. One process and plain models, as nothing here depends on ranks.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_config
from support.tokenizers import byte_tokenizer

from shardyard.data.templates import build_template
from shardyard.data.templates.build import exported_chat_template
from shardyard.data.templates.exported import template_for_export
from shardyard.errors import UserError


def tiny(name: str, **options: Any) -> Any:
    """A random model of transformers' own, in fp32."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    config = tiny_config("qwen3") if name == "qwen3" else getattr(hf, f"{name}Config")(**options)
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def export(model: Any, out: Path, source: Path | None = None, **options: Any) -> Any:
    from shardyard.checkpoint import check_exportable, export_hf

    options = {"tokenizer": None} | options
    check_exportable(model, source_dir=source, tokenizer=options["tokenizer"])
    return export_hf(model, out_dir=out, source_dir=source, **options)


def test_a_model_with_fewer_positions_than_the_probe_is_exported(tmp_path: Path) -> None:
    model = tiny("GPT2", n_embd=8, n_head=2, n_layer=1, n_positions=6, vocab_size=11)
    report = export(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file() and report.tensors > 0


def test_infinities_of_a_config_are_read_back(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = tiny(
        "Mamba2", hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=4, vocab_size=11,
        n_groups=1, chunk_size=4, time_step_limit=(0.0, math.inf), bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "source")
    export(model, tmp_path / "out", tmp_path / "source")
    assert list(AutoConfig.from_pretrained(tmp_path / "out").time_step_limit) == [0.0, math.inf]


def test_a_forward_that_cannot_be_asked_keeps_the_complete_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file

    model = tiny("GPT2", n_embd=8, n_head=2, n_layer=1, vocab_size=11)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR, "shardyard.checkpoint"):
        patch.setattr(type(model), "forward", _refuse)
        export(model, tmp_path)
    assert "the export is complete and loads" in caplog.text and "RuntimeError: wants an image" in caplog.text
    assert load_file(tmp_path / "model.safetensors").keys() >= {"transformer.wte.weight"}


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("wants an image\nand more")


def test_a_config_that_does_not_read_back_is_refused_before_training(tmp_path: Path) -> None:
    from shardyard.checkpoint import check_exportable

    model = tiny("qwen3")
    model.config.hidden_act = "no such function"
    with pytest.raises(UserError, match=r"config\.json.*cannot be read back.*no such function"):
        check_exportable(model, source_dir=None, tokenizer=None)


def test_a_config_that_makes_another_model_is_refused_before_training() -> None:
    from shardyard.checkpoint import check_exportable

    model = tiny("qwen3")
    model.config.intermediate_size = 48
    with pytest.raises(UserError, match=r"mlp\.gate_proj\.weight is \(56, 32\) here and \(48, 32\) there"):
        check_exportable(model, source_dir=None, tokenizer=None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"early_stopping": "x"}', r"not taken by transformers: .*early_stopping"),
        ('{"max_new_tokens": -1}', r"not taken by transformers: .*must be greater than 0, but is -1"),
        ("{", r"source/generation_config\.json holds no JSON object"),
        ("[1]", r"source/generation_config\.json holds no JSON object"),
    ],
)
def test_a_generation_config_that_nobody_could_load_is_found_before_training(
    source: Path, text: str, said: str
) -> None:
    from shardyard.checkpoint import check_exportable

    (source / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=said):
        check_exportable(tiny("qwen3"), source_dir=source, tokenizer=None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny("qwen3").save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_the_end_of_a_trained_turn_joins_the_stop_ids(tmp_path: Path, source: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = byte_tokenizer(special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    build_template("qwen3", tokenizer)  # which makes <|im_end|>, id 1, the eos token
    text = '{\n  "eos_token_id": [2, 0],\n  "top_k": 20\n}'
    (source / "generation_config.json").write_text(text, encoding="utf-8")
    template = exported_chat_template("qwen3")
    export(tiny("qwen3"), tmp_path / "out", source, tokenizer=tokenizer, chat_template=template)

    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [2, 0, 1] and generation.top_k == 20
    configs = [
        json.loads((folder / "config.json").read_text("utf-8")) for folder in (source, tmp_path / "out")
    ]
    assert configs[0]["eos_token_id"] == configs[1]["eos_token_id"]
    assert tokenizer.chat_template is None
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Hi"}]
    ids = exported.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert exported.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert exported.eos_token == "<|im_end|>"


@pytest.mark.parametrize("stop", ["1", "[0, 1]"])
def test_a_generation_config_with_the_stop_id_stays_byte_for_byte(
    tmp_path: Path, source: Path, stop: str
) -> None:
    text = '{"eos_token_id":' + stop + ' , "do_sample": false, "temperature": 0.9}'
    (source / "generation_config.json").write_text(text, encoding="utf-8")
    tokenizer = byte_tokenizer(eos="<|im_end|>")
    assert tokenizer.eos_token_id == 1
    export(tiny("qwen3"), tmp_path / "out", source, tokenizer=tokenizer)
    assert (tmp_path / "out" / "generation_config.json").read_text("utf-8") == text


@pytest.mark.parametrize(("eos", "wanted"), [("<|im_end|>", 1), ("<|im_start|>", [1, 0]), (None, 1)])
def test_without_the_file_the_config_s_stop_id_counts(
    tmp_path: Path, source: Path, eos: str | None, wanted: Any
) -> None:
    (source / "generation_config.json").unlink()  # the config's eos_token_id is 1
    export(tiny("qwen3"), tmp_path / "out", source, tokenizer=byte_tokenizer(eos=eos))
    options = json.loads((tmp_path / "out" / "generation_config.json").read_text("utf-8"))
    assert options["eos_token_id"] == wanted


QWEN3_QUESTION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("own", "stays"),
    [(QWEN3_QUESTION, True), ("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}", False)],
)
def test_an_own_chat_template_stays_only_if_it_asks_as_training_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str, stays: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer(own)
    chosen = template_for_export(tokenizer, "qwen3")
    export(tiny("qwen3"), tmp_path, tokenizer=tokenizer, chat_template=chosen)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert (exported.chat_template == own) is stays
    assert ("that was trained, data.template: qwen3" in caplog.text) is not stays
    question = [{"role": "user", "content": "Who?"}]
    asked = exported.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert asked == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
