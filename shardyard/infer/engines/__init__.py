"""Engines: what turns requests into tokens, many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from shardyard.infer.engines.batches import BatchEngine, follow
from shardyard.infer.engines.continuous import ContinuousEngine
from shardyard.infer.engines.trial import pads_exactly, scores_of_continuous
from shardyard.infer.model import Opened
from shardyard.infer.types import Engine

__all__ = ["build_engine", "with_engine"]
logger = logging.getLogger("shardyard.infer")

_Result = TypeVar("_Result")
PREFILL_TOKENS = 512
"""Most tokens of prompts in one step, so that answers under way do not wait long for a new request."""
_SHARE_OF_MEMORY = 0.25
"""Of what is free once the model is there: the most that caches may take."""


def with_engine(
    opened: Opened,
    work: Callable[[Engine], _Result],
    *,
    max_running: int = 32,
    cache_tokens: int | None = None,
) -> _Result | None:
    """``work`` with an engine, on rank 0; the other ranks follow it to its end and get None."""
    if not opened.group.is_main:
        follow(opened.model)
        return None
    engine = build_engine(opened, max_running=max_running, cache_tokens=cache_tokens)
    try:
        return work(engine)
    finally:
        engine.close()


def build_engine(opened: Opened, *, max_running: int = 32, cache_tokens: int | None = None) -> Engine:
    """The engine for this model, on rank 0: continuous batching where one rank has it all and transformers'
    paged caches give the numbers of its plain forward, else batches of `generate`.

    ``cache_tokens``: the most tokens that all running requests hold together; by default what a quarter of
    the free memory holds, and no more than ``max_running`` whole contexts.
    """
    model, length = opened.model, opened.context_length
    ranks = opened.group.world_size
    if ranks == 1:
        tokens = cache_tokens or _cache_tokens(opened, max_running)
        why = scores_of_continuous(model, lambda: _continuous(model, length, 2, min(tokens, 512)))
        if why is None:
            return _continuous(model, length, max_running, tokens)
        logger.info("requests are answered in batches that begin and end together: %s", why)
    padded = ranks > 1 or pads_exactly(model)
    if not padded:
        logger.info("prompts of unequal length are answered one after another: padding would change them")
    return BatchEngine(model, context_length=length, max_running=max_running, padded=padded, ranks=ranks)


def _continuous(model: Any, context_length: int, max_running: int, cache_tokens: int) -> ContinuousEngine:
    return ContinuousEngine(
        model, context_length=context_length, max_running=max_running, cache_tokens=cache_tokens,
        prefill_tokens=PREFILL_TOKENS,
    )  # fmt: skip


def _cache_tokens(opened: Opened, max_running: int) -> int:
    """As many as fit a share of the free memory: keys and values, and a row of the mask of a step."""
    config = opened.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = opened.model.dtype.itemsize
    per_token = item * (2 * config.num_hidden_layers * heads * size + 2 * PREFILL_TOKENS)
    fitting = int(_SHARE_OF_MEMORY * opened.device.free_memory()) // per_token
    return max(PREFILL_TOKENS, min(fitting, max_running * opened.context_length))
