"""A tokenizer of bytes, rows and a configuration, for tests that prepare the data of a run."""

from __future__ import annotations

import json

from shardyard.config import Config

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Rendezvous:
    """What simulated ranks of one process tell each other."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self.told[key] = value

    def wait(self, key: str) -> str:
        return self.told[key]


def make_tokenizer(extra=(), chat_template=None, eos="<eos>"):
    """One token a byte, ids 0 to 255, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_tokens(list(extra))
    tokenizer.chat_template = chat_template
    return tokenizer


def write_rows(file, texts):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def write_pairs(file, count=4):
    rows = [{"text": f"{n} words", "instruction": f"q{n}", "output": "a" * (n + 1)} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_config(tmp_path, file, training=None, model=None, **data):
    return Config.model_validate(
        {
            "model": {"model_name_or_path": "m", "cache_dir": str(tmp_path / "cache"), **(model or {})},
            "data": {
                "dataset": {"file_name": str(file)},
                "dataset_dir": str(tmp_path / "data"),
                "data_manager_type": "mg",
                "append_eod": True,
                "cutoff_len": 8,
                **data,
            },
            "training": {
                "output_dir": str(tmp_path / "out"),
                "stage": "pt",
                "disable_shuffling": True,
                **(training or {}),
            },
        }
    )
