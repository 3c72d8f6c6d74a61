"""Engines: what turns requests into tokens, many at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from shardyard.device import in_passing_thread
from shardyard.infer.engines.batches import BatchEngine
from shardyard.infer.engines.batches import follow as follow_batches
from shardyard.infer.engines.continuous import ContinuousEngine, Room
from shardyard.infer.engines.continuous import follow as follow_continuous
from shardyard.infer.engines.trial import pads_exactly, scores_of_continuous
from shardyard.infer.model import Opened
from shardyard.infer.types import Engine

__all__ = ["with_engine"]
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
    """``work`` with an engine, on rank 0; the other ranks follow it to its end and get None.

    Continuous batching where one rank has the model or all share each layer, and transformers' paged caches
    give the numbers of its plain forward; else batches of `generate`.

    ``cache_tokens``: the most tokens that all running requests hold together; by default what a quarter of
    the free memory holds, and no more than ``max_running`` whole contexts.
    """
    model, is_main = opened.model, opened.group.is_main
    room = in_passing_thread(opened.device, lambda: _room(opened, max_running, cache_tokens))
    if room is not None:
        engine = _continuous(model, room, is_main)
        return None if engine is None else _closing(engine, work)
    ranks = opened.group.world_size
    padded = ranks > 1 or in_passing_thread(opened.device, lambda: pads_exactly(model))
    if not is_main:
        follow_batches(model, opened.context_length)
        return None
    if not padded:
        logger.info("prompts of unequal length are answered one after another: padding would change them")
    batches = BatchEngine(
        model, context_length=opened.context_length, max_running=max_running, padded=padded, ranks=ranks
    )
    return _closing(batches, work)


def _closing(engine: Engine, work: Callable[[Engine], _Result]) -> _Result:
    try:
        return work(engine)
    finally:
        engine.close()


def _room(opened: Opened, max_running: int, cache_tokens: int | None) -> Room | None:
    """What continuous batching may hold, the same on every rank; None where it does not carry the model."""
    if opened.parallel == "fsdp":
        return None  # transformers' loop refuses shards that are gathered for each forward
    model = opened.model
    mine = cache_tokens or _cache_tokens(opened, max_running)
    tokens = int(opened.group.gather([mine]).min())
    small = Room(opened.context_length, 2, min(tokens, 512), PREFILL_TOKENS)
    why = scores_of_continuous(model, lambda: _continuous(model, small, opened.group.is_main), opened.group)
    if why is None:
        return Room(opened.context_length, max_running, tokens, PREFILL_TOKENS)
    logger.info("requests are answered in batches that begin and end together: %s", why)
    return None


def _continuous(model: Any, room: Room, is_main: bool) -> ContinuousEngine | None:
    """The engine of rank 0; another rank follows it to its end."""
    if is_main:
        return ContinuousEngine(model, room)
    follow_continuous(model, room)
    return None


def _cache_tokens(opened: Opened, max_running: int) -> int:
    """As many as fit a share of the free memory: keys and values, and a row of the mask of a step.

    What a config does not say is taken from its width, which is more than any layer keeps: so too for models
    without attention, whose caches are none of this.
    """
    config = opened.config.get_text_config()
    queries = getattr(config, "num_attention_heads", None)
    queries = queries if isinstance(queries, int) else 1
    told = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    heads, size = (value if isinstance(value, int) else None for value in told)
    heads, size = heads or queries, size or config.hidden_size // queries
    item = opened.model.dtype.itemsize
    per_token = item * (2 * config.num_hidden_layers * heads * size + 2 * PREFILL_TOKENS)
    fitting = int(_SHARE_OF_MEMORY * opened.device.free_memory()) // per_token
    return max(PREFILL_TOKENS, min(fitting, max_running * opened.context_length))
