"""Is a generated answer right? One function a scorer: (row, answer) -> metrics, each 0.0 or 1.0."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Row = dict[str, Any]
Scorer = Callable[[Row, str], dict[str, float]]

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


def letter(row: Row, answer: str) -> dict[str, float]:
    """The last letter that the answer announces, else the last one that stands alone."""
    letters = "".join(row["letters"])
    announced = re.findall(
        rf"(?:answer|choice|option|答案|选项)(?:\s*(?:is|应为|应选|为|是|选))?\s*[:：]?\s*\**\s*[(（\[]?([{letters}])(?![A-Za-z])",
        answer, re.I,
    )  # fmt: skip
    alone = re.findall(rf"(?<![A-Za-z'’])([{letters}])(?![A-Za-z'’])", answer)
    found = [*alone[-1:], *(each.upper() for each in announced[-1:])]
    return {"acc": float(bool(found) and found[-1] == row["letter"])}


def number(row: Row, answer: str) -> dict[str, float]:
    """``exact_match``: the number after ####, else the last one. ``strict_match``: only the former."""
    wanted = _value(str(row["answer"]))
    strict = re.findall(rf"####\s*({_NUMBER})", answer)
    any_form = strict[:1] or re.findall(_NUMBER, answer)[-1:]
    return {
        "exact_match": float(wanted is not None and [_value(text) for text in any_form] == [wanted]),
        "strict_match": float(wanted is not None and [_value(text) for text in strict[:1]] == [wanted]),
    }


def _value(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None


def phrase(row: Row, answer: str) -> dict[str, float]:
    """The words after "the answer is", else the whole answer; case, brackets and a last stop aside."""
    announced = re.findall(r"[Tt]he answer is:?\s*(.*)", answer)
    given = announced[-1] if announced else answer
    return {"exact_match": float(_plain(given) == _plain(str(row["answer"])))}


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", text.strip().strip("$").rstrip(".。").strip().lower())
    bracketed = re.fullmatch(r"\(([a-z])\)", text)
    return bracketed[1] if bracketed else text


def contains(row: Row, answer: str) -> dict[str, float]:
    """The answer holds the wanted words."""
    return {"acc": float(bool(row["answer"]) and str(row["answer"]).lower() in answer.lower())}


def code(row: Row, answer: str) -> dict[str, float]:
    """``pass@1``: the function passes its tests, in the sandbox."""
    from shardyard.evaluate.tasks.sandbox import run_program

    program = f"{program_of(row, answer)}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"
    return {"pass@1": float(run_program(program).passed)}


def program_of(row: Row, answer: str) -> str:
    """The function: a whole one from a code block, or the prompt and how it goes on."""
    block = re.search(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", answer, re.S)
    text = block[1] if block else answer
    if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(row['entry_point'])}\b", text, re.M):
        before = row["prompt"].split(f"def {row['entry_point']}")[0]  # imports and helpers of the prompt
        return f"{before}\n{text}"
    return row["prompt"] + text


SCORERS: dict[str, Scorer] = {
    "letter": letter, "number": number, "phrase": phrase, "contains": contains, "code": code,
}  # fmt: skip
METRICS = {
    "letter": ("acc",), "number": ("exact_match", "strict_match"), "phrase": ("exact_match",),
    "contains": ("acc",), "code": ("pass@1",),
}  # fmt: skip
