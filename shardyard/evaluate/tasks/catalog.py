"""The benchmarks by their names, each a YAML file beside this module.

Keys of a file: ``layout`` (how a local copy lies, copies.py), ``num_fewshot``, ``scorer`` (how an answer that
was generated is judged, answers.py), ``config`` (lm-eval's own keys of a task), ``variants`` (a file of other
ways to ask, by name), ``chat`` (the variant under a chat template), ``kinds`` (changes for rows of a kind),
``languages``. A variant and a kind change the keys they name, and of ``config`` those they name.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import resources
from typing import Any

import yaml

from shardyard.errors import UserError

BENCHMARKS = (
    "mmlu", "mmlu_ppl", "cmmlu", "ceval", "gsm8k", "boolq", "bbh", "agieval", "human_eval", "hellaswag",
    "needlebench",
)  # fmt: skip
ALIASES = {
    "humaneval": "human_eval",
    "ceval-valid": "ceval",
    "c-eval": "ceval",
    "needle_bench": "needlebench",
}
Spec = dict[str, Any]


def name_of(word: str) -> str | None:
    """The benchmark that ``word`` names; None if it is none of ours."""
    name = ALIASES.get(word.lower(), word.lower())
    return name if name in BENCHMARKS else None


def near(word: str) -> str:
    """What an unknown name may have meant, as the end of a message."""
    close = get_close_matches(word, [*BENCHMARKS, *ALIASES], n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(BENCHMARKS)}"


def load(name: str, *, variant: str = "", with_chat: bool = False) -> Spec:
    """A benchmark's file, changed by its variant.

    Raises:
        UserError: it has no such variant.
    """
    spec = _file(name)
    variants = _file(spec["variants"]) if "variants" in spec else {}
    if variant and variant not in variants:
        option = f"--{variant.replace('_', '-')}"
        raise UserError(f"{option}: {name} is asked in one way only; leave the option out for it")
    chosen = variant or (spec.get("chat", "") if with_chat else "")
    return changed(spec, variants[chosen]) if chosen else spec


def changed(spec: Spec, by: Spec) -> Spec:
    """``spec`` with the keys of ``by``; keys of ``config`` one by one. A scorer needs no list of metrics."""
    config = {**spec["config"], **by.get("config", {})}
    if config["output_type"] == "generate_until":
        config = {key: value for key, value in config.items() if key not in ("metric_list", "doc_to_choice")}
    return {**spec, **by, "config": config}


def _file(name: str) -> Spec:
    text = resources.files("shardyard.evaluate.tasks").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
