"""What a user will do with an export, tried out: plain transformers reads its config and its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardyard.checkpoint.hf_files import Facts
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.checkpoint")

_PROBE_LENGTH = 8


def check_reads_back(facts: Mapping[str, Facts], folder: Path) -> None:
    """The config.json in ``folder`` makes a model (on meta, so without memory) with the tensors of ``facts``.

    Raises:
        UserError: transformers cannot read it, or makes another model of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            rebuilt: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a config class or a model's constructor raises
        raise UserError(
            f"config.json, as it would be exported, cannot be read back by transformers: {_line(error)}"
        ) from error
    theirs = {name: tuple(tensor.shape) for name, tensor in rebuilt.state_dict().items()}
    for name, (shape, _) in facts.items():
        if theirs.get(name) != shape:
            raise UserError(
                f"config.json, as it would be exported, makes another model: {name} is "
                f"{shape} here and {theirs.get(name, 'absent')} there"
            )


def probe(folder: Path) -> None:
    """Load the export as a user will, by plain transformers, and let it answer a fixed prompt.

    A model that loads but cannot be asked this way (its forward wants more than ids) is no worse for it: that
    is logged as an error, and the files stay.

    Raises:
        UserError: it does not load, with all tensors and no others, or it answers with NaN or Inf.
    """
    try:
        both: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # of every type, as each part of transformers has its own
        raise UserError(f"plain transformers does not load the export: {_line(error)}") from error
    loaded, info = both
    faults = [
        f"{what}: {info[what]}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[what]
    ]
    if faults:
        raise UserError(f"plain transformers does not read the export as it was meant: {'; '.join(faults)}")
    try:
        with torch.no_grad():
            logits = loaded(input_ids=_prompt(loaded.config.get_text_config()), use_cache=False).logits
    except Exception as error:  # a family's own forward
        logger.error(
            "the export is complete and loads, but a forward on a fixed prompt failed: %s; try the model "
            "before you rely on it",
            _line(error),
        )
        return
    if not torch.isfinite(logits).all():
        raise UserError("the exported model answers a fixed prompt with NaN or Inf")


def _prompt(config: Any) -> torch.Tensor:
    """Ids 0, 1, 2, ... [1, 8], or fewer for a model with fewer positions."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    length = min([_PROBE_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    return torch.arange(length)[None] % config.vocab_size


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
