"""Write what the quick start trains on: a small Qwen3 model with random weights, its own tokenizer, its rows.

    python examples/quickstart/make_assets.py [FOLDER]

FOLDER (default: ``assets`` beside this file) receives ``model/``, in Hugging Face format, and the rows as
``alpaca.parquet``, in a few seconds and without the network. If it holds both already, it is kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rows as data

HERE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
MAX_VOCAB_SIZE = 1024
MAX_ROWS, MAX_ROW_TOKENS = 150, 60
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Stripped when text is decoded; the first is the padding token, the last ends a turn."""
MARKUP_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""One token each, but part of the text, as in the published Qwen3 tokenizers."""


def main(argv: list[str]) -> int:
    folder = Path(argv[0]) if argv else HERE / "assets"
    if is_current(folder):
        print(f"quick start assets: {folder} is up to date")
        return 0
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    parameters = build(building)
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    print(f"quick start assets: wrote {folder} ({parameters:,} parameters, {len(data.alpaca_rows())} rows)")
    return 0


def build(folder: Path) -> int:
    """Write model, tokenizer, rows and the manifest into the new ``folder``; return the parameter count."""
    rows = data.alpaca_rows()
    tokenizer = train_tokenizer(rows)
    check_sizes(rows, tokenizer)
    model = random_model(tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_parquet(rows, folder / "alpaca.parquet")
    manifest = {"recipe": recipe(), "files": digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def train_tokenizer(rows: list[dict[str, str]]) -> Any:
    """A byte-level BPE tokenizer learnt from the rows, with Qwen's special tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE - len(MARKUP_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for row in rows for text in (data.question(row), row["output"])]
    tokenizer.train_from_iterator([*texts, "system", "user\n", "assistant\n", "\n\n"], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=512,
    )
    fast.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def check_sizes(rows: list[dict[str, str]], tokenizer: Any) -> None:
    """Hold the promise of the data: few rows, all short, every question once."""
    longest = max(len(tokenizer(conversation_text(row, tokenizer))["input_ids"]) for row in rows)
    questions = {data.question(row) for row in rows}
    if len(rows) > MAX_ROWS or longest > MAX_ROW_TOKENS or len(questions) != len(rows):
        raise SystemExit(f"{len(rows)} rows, {len(questions)} questions, longest row {longest} tokens")


def conversation_text(row: dict[str, str], tokenizer: Any) -> str:
    """The whole text of a row, as it is trained on."""
    user = {"role": "user", "content": data.question(row)}
    reply = {"role": "assistant", "content": row["output"]}
    return tokenizer.apply_chat_template([user, reply], tokenize=False)


def random_model(tokenizer: Any) -> Any:
    """A Qwen3 of about one million parameters, the same weights every time."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config: Any = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_ROW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def write_parquet(rows: list[dict[str, str]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def recipe() -> dict[str, str]:
    """What decides the content: these sources and the libraries that write the files."""
    sources = [HERE / "rows.py", HERE / "chat_template.jinja", Path(__file__)]
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers", "pyarrow")}
    return {path.name: _digest(path) for path in sources} | libraries


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` but the manifest, by relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def is_current(folder: Path) -> bool:
    """Whether ``folder`` holds, byte for byte, what today's recipe wrote into it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return manifest == {"recipe": recipe(), "files": digests(folder)}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
