"""What a model's folder says besides its weights: its template, how it samples, what ends its answers."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import GenerationConfig

from shardyard.data.templates import build_template, exported_chat_template
from shardyard.errors import UserError, first_line
from shardyard.infer.opening import Choice, Found
from shardyard.infer.types import Sampling
from shardyard.models import ModelSource

logger = logging.getLogger("shardyard.infer")

_LONGEST = 1 << 20
"""Context of a model that states none."""


def set_template(tokenizer: Any, choice: Choice, found: Found) -> None:
    """The chosen template, or the run's ``inference.template``, in the place of the tokenizer's own."""
    run = found.run or {}
    name = choice.template or (run.get("inference") or {}).get("template")
    if name is None:
        return
    data = run.get("data") or {}
    thinking = choice.enable_thinking if choice.enable_thinking is not None else data.get("enable_thinking")
    build_template(name, tokenizer)  # sets the tokenizer's eos
    tokenizer.chat_template = exported_chat_template(name, enable_thinking=thinking)


def generation_config(source: ModelSource) -> GenerationConfig:
    """As it stands in the folder; an empty one where there is none. Raises UserError for a wrong one."""
    file = source.config / "generation_config.json"
    if not file.is_file():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(file.parent)
    except Exception as error:  # of every type, for JSON of another form and for values that contradict
        raise UserError(f"--model: {file} is not taken by transformers: {first_line(error)}") from error


def stop_ids(generation: GenerationConfig, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer by any of the three that may name them."""
    of_config = getattr(config.get_text_config(), "eos_token_id", None)
    named = (generation.eos_token_id, of_config, tokenizer.eos_token_id)
    ids = [part for value in named for part in (value if isinstance(value, list | tuple) else [value])]
    ids = [part for part in ids if part is not None]
    if wrong := [part for part in ids if not isinstance(part, int)]:
        raise UserError(f"--model: eos_token_id {wrong[0]!r} in its generation_config.json is no token id")
    return frozenset(ids)


def defaults(generation: GenerationConfig) -> Sampling:
    """What the folder's generation_config.json asks for; greedy unless it says ``do_sample``."""
    told = {
        "max_new_tokens": generation.max_new_tokens,
        "repetition_penalty": generation.repetition_penalty,
    }
    if generation.do_sample:
        temperature = generation.temperature
        told |= {
            "temperature": 1.0 if temperature is None else temperature, "top_p": generation.top_p,
            "top_k": generation.top_k, "min_p": generation.min_p,
        }  # fmt: skip
    try:
        return Sampling(**{key: value for key, value in told.items() if value is not None})
    except (TypeError, ValueError) as error:
        logger.warning("generation_config.json is left out: %s", error)
        return Sampling()


def context_length(config: Any, tokenizer: Any) -> int:
    """The most tokens of prompt and answer, by the model's positions and the tokenizer's word."""
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)  # MPT's
    length = stated if isinstance(stated, int) and stated > 0 else _LONGEST
    limit = tokenizer.model_max_length
    return int(min(length, limit)) if isinstance(limit, int | float) and math.isfinite(limit) else length
