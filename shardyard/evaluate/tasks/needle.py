"""Retrieval: a sentence is hidden in long texts, and asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardyard.errors import UserError
from shardyard.evaluate.tasks.copies import Part
from shardyard.evaluate.tasks.files import Row, read_rows, text_of

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
"""Tokens of the text, as far as the model's context holds them."""
DEPTHS = (0, 25, 50, 75, 100)
_ROOM = 192
"""Tokens that question, template and answer may take."""
_WORDS = {
    "en": {
        "needle": "The secret word of the old lighthouse is {}.",
        "question": "What is the secret word of the old lighthouse?",
        "before": "Read this text. A question about it follows.",
        "after": "Answer with that word only.",
        "answers": ("marigold", "copper", "harbour", "violet", "juniper"),
    },
    "zh": {
        "needle": "老灯塔的秘密词语是“{}”。",
        "question": "老灯塔的秘密词语是什么？",
        "before": "请阅读下面的文本，然后回答问题。",
        "after": "只回答这个词语。",
        "answers": ("金盏花", "紫罗兰", "杜松", "海港", "黄铜"),
    },
}  # fmt: skip


def read_haystack(home: Path, language: str) -> list[Part]:
    """The texts in ``home``: .txt files whole, rows of .jsonl files under ``text`` or ``content``."""
    part = Part("needlebench")
    for path in sorted([*home.glob("*.txt"), *home.glob("*.jsonl")]):
        if path.stem.startswith("needle"):
            continue
        if path.suffix == ".txt":
            try:
                texts = [(path.read_text(encoding="utf-8"), f"{path}:1")]
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: {error}") from error
        else:
            rows = read_rows(path)
            texts = [(text_of(row, "content" if "content" in row else "text"), row["where"]) for row in rows]
        for text, where in texts:
            if text.strip():
                part.rows.append({"text": text.strip(), "where": where})
            else:
                part.skip("empty text")
    return [part] if part.rows else []


def hide(part: Part, tokenizer: Any, context_length: int, language: str) -> list[Part]:
    """A part for each length that fits, with a row for each depth: prompt, answer, length, depth.

    Texts follow each other, again from the first one where they are too short for a length.
    """
    words = _WORDS[language or "en"]
    wanted = [length for length in LENGTHS if length + _ROOM <= context_length]
    wanted = wanted or [max(context_length - _ROOM, context_length // 2)]
    ids = tokenizer.encode("\n\n".join(row["text"] for row in part.rows), add_special_tokens=False)
    parts = []
    for length in wanted:
        repeated = (ids * (length // len(ids) + 1))[:length]
        held = Part(f"{length}_tokens", skipped=part.skipped if length == wanted[0] else {})
        held.rows = [_row(tokenizer, repeated, depth, words, number) for number, depth in enumerate(DEPTHS)]
        parts.append(held)
    return parts


def _row(tokenizer: Any, ids: list[int], depth: int, words: dict[str, Any], number: int) -> Row:
    answer = words["answers"][number % len(words["answers"])]
    before = tokenizer.decode(ids[: len(ids) * depth // 100])
    after = tokenizer.decode(ids[len(ids) * depth // 100 :])
    cut = max(before.rfind(". "), before.rfind("。"), before.rfind("\n"), 0)  # between two sentences
    cut = len(before) if depth == 100 else cut + 1 if cut else 0
    text = f"{before[:cut]} {words['needle'].format(answer)} {before[cut:]}{after}"
    prompt = f"{words['before']}\n\n{text.strip()}\n\n{words['question']} {words['after']}"
    return {"prompt": prompt, "answer": answer, "length": len(ids), "depth": depth, "subject": "needlebench",
            "where": f"depth {depth} %"}  # fmt: skip
