"""Handlers by name, the reference's and short ones: which rows an input holds and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from shardyard.errors import UserError


@dataclass(frozen=True)
class Handler:
    """``kind`` is what is made (see ``job.Kind``), ``formatting`` how a row is laid out; None: the entries of
    a dataset_info.json say both.
    """

    kind: Literal["text", "document", "sft", "pairs"]
    formatting: str | None


_TEXT = Handler("text", "alpaca")
_ALPACA, _SHAREGPT, _OPENAI = (Handler("sft", name) for name in ("alpaca", "sharegpt", "openai"))
_ALPACA_PAIRS, _SHAREGPT_PAIRS = (Handler("pairs", name) for name in ("alpaca", "sharegpt"))

HANDLERS = {
    "text": _TEXT,
    "alpaca": _ALPACA,
    "sharegpt": _SHAREGPT,
    "openai": _OPENAI,
    "pairs": _ALPACA_PAIRS,
    "sharegpt-pairs": _SHAREGPT_PAIRS,
    "openai-pairs": Handler("pairs", "openai"),
    "alpaca-text": Handler("document", "alpaca"),
    "sharegpt-text": Handler("document", "sharegpt"),
    "dataset-info": Handler("sft", None),
    "GeneralPretrainHandler": _TEXT,
    "AlpacaPretrainHandler": Handler("document", "alpaca"),
    "SharegptPretrainHandler": Handler("document", "sharegpt"),
    "AlpacaStyleInstructionHandler": _ALPACA,
    "SharegptStyleInstructionHandler": _SHAREGPT,
    "OpenAIInstructionHandler": _OPENAI,
    "R1AlpacaStyleInstructionHandler": _ALPACA,
    "R1SharegptStyleInstructionHandler": _SHAREGPT,
    "AlpacaStylePairwiseHandler": _ALPACA_PAIRS,
    "SharegptStylePairwiseHandler": _SHAREGPT_PAIRS,
    "LlamaFactoryInstructionHandler": Handler("sft", None),
}

_OWN_LAYOUT = "reads the layout of one published data set; write its rows as Alpaca or ShareGPT rows"
_REFUSED = {
    "HunyuanInstructionHandler": "its rows are OpenAI's messages; use OpenAIInstructionHandler",
    "PPOAlpacaStyleInstructionHandler": "prompts without replies are for PPO, which is not trained here",
    "GeneralInstructionHandler": _OWN_LAYOUT,
    "BelleMultiTurnInstructionHandler": _OWN_LAYOUT,
    "MOSSInstructionHandler": _OWN_LAYOUT,
    "MOSSMultiTurnHandler": _OWN_LAYOUT,
    "LeetcodePythonInstructionHandler": _OWN_LAYOUT,
    "StackOverflowPythonPretrainHandler": _OWN_LAYOUT,
}


def find_handler(name: str) -> Handler:
    """The handler of this name.

    Raises:
        UserError: an unknown name (the reference takes it for text), or one that is refused.
    """
    if name in HANDLERS:
        return HANDLERS[name]
    if name in _REFUSED:
        raise UserError(f"--handler-name: {name} {_said(_REFUSED[name])}")
    near = get_close_matches(name, [*HANDLERS, *_REFUSED], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(HANDLERS)}"
    raise UserError(f"--handler-name: {name!r} is not a handler; {hint}")


def _said(reason: str) -> str:
    return reason if reason.startswith("reads") else f"is refused: {reason}"
