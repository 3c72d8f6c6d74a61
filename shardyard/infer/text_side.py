"""What is known of a Hugging Face folder without its weights, for engines that read these themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config import ModelConfig
from shardyard.data.tokenizer import load_tokenizer
from shardyard.errors import UserError
from shardyard.infer import folder_facts
from shardyard.infer.opening import Choice, find
from shardyard.infer.types import Sampling
from shardyard.models import load_model_config, resolve_source, tokenizer_options


@dataclass(frozen=True)
class TextSide:
    """A model's folder and how it is asked: a `plan.Side`."""

    folder: str
    tokenizer: Any
    stop_ids: frozenset[int]
    defaults: Sampling
    context_length: int
    run: dict[str, Any] | None
    choice: Choice


def read_text_side(choice: Choice) -> TextSide:
    """By the rules of `open_model`.

    Raises:
        UserError: what ``choice`` names is no folder in Hugging Face's form, or has no tokenizer.
    """
    found = find(choice)
    weights = Path(found.weights)
    if weights.is_dir() and not any(weights.glob("*.safetensors")):
        raise UserError(
            f"--model: {weights} has no safetensors files, which this engine reads; export it first: "
            f"shardyard convert {weights} NEW_FOLDER --to hf --verify"
        )
    options = ModelConfig(
        model_name_or_path=found.weights, tokenizer_name_or_path=choice.tokenizer,
        config_name_or_path=choice.config, trust_remote_code=choice.trust_remote_code,
    )  # fmt: skip
    source = resolve_source(options, fetch_first=lambda fetch: fetch())
    config = load_model_config(options, source)
    tokenizer = load_tokenizer(tokenizer_options(options, source))
    folder_facts.set_template(tokenizer, choice, found)
    generation = folder_facts.generation_config(source)
    return TextSide(
        folder=str(source.weights),
        tokenizer=tokenizer,
        stop_ids=folder_facts.stop_ids(generation, config, tokenizer),
        defaults=folder_facts.defaults(generation),
        context_length=folder_facts.context_length(config, tokenizer),
        run=found.run,
        choice=choice,
    )
