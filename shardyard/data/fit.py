"""Whether a model can read the samples of its data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from shardyard.data.parts import Part
from shardyard.errors import UserError

logger = logging.getLogger("shardyard.data")


def check_fit(parts: Sequence[Part], config: Any) -> None:
    """An id or a position without an embedding would crash a device kernel, or read another row.

    ``config``: the model's, the part about text.

    Raises:
        UserError: it would.
    """
    for part in parts:
        if part.report.largest_id >= config.vocab_size:
            raise UserError(
                f"model.tokenizer_name_or_path: {part.name} ({part.path}) holds token id "
                f"{part.report.largest_id}, but the model's vocabulary has {config.vocab_size} entries; use "
                "the tokenizer that belongs to the model"
            )
    longest = max(part.report.longest for part in parts)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or longest <= positions:
        return
    too_long = (
        f"data.cutoff_len: a sample has {longest} tokens, and the model was made for {positions} positions"
    )
    if getattr(config, "rope_parameters", None) is None:
        raise UserError(f"{too_long}; set data.cutoff_len to {positions} at most")
    logger.warning("%s; rotary positions go on beyond that, but were not trained there", too_long)
