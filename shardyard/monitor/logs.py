"""Where log records go: rank 0 speaks on stdout, the others raise their voice on stderr only to warn."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(levelname)s [%(asctime)s] >> %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"

_SAME_ON_EVERY_RANK = frozenset(f"shardyard.{room}" for room in ("parallel", "models", "train"))

# Warns on each rank that gathering a tensor-parallel shard takes two steps; an export sums nothing.
_TORCH_TWO_GATHERS = "torch.distributed.tensor._redistribute"

logger = logging.getLogger("shardyard.monitor")


def setup_logging(rank: int) -> None:
    """Send the package's log to stdout on global rank 0; other ranks' warnings, with the rank, to stderr.

    Calling it again replaces what an earlier call set up.
    """
    if rank == 0:
        handler = logging.StreamHandler(sys.stdout)
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
        handler.addFilter(_differs_by_rank)
        text = _FORMAT.replace("%(message)s", f"rank {rank}: %(message)s")
        handler.setFormatter(logging.Formatter(text, _DATE))
    handler.set_name("shardyard")
    package = logging.getLogger("shardyard")
    for old in [h for h in package.handlers if h.get_name() == handler.get_name()]:
        package.removeHandler(old)
    package.addHandler(handler)
    package.setLevel(handler.level)
    package.propagate = False
    logging.getLogger(_TORCH_TWO_GATHERS).setLevel(logging.ERROR)


def _differs_by_rank(record: logging.LogRecord) -> bool:
    """Warnings of the rooms that do the same on every rank are said once, by rank 0."""
    return record.levelno > logging.WARNING or record.name not in _SAME_ON_EVERY_RANK


def log_run_start(
    *,
    num_examples: int | None,
    num_epochs: float | None,
    total_batch_size: int,
    gradient_accumulation_steps: int | None,
    total_steps: int,
) -> None:
    """The start lines, worded as users of the reference know them; batch sizes are in samples (or packs).

    ``num_examples`` are those of an epoch. Of a stream nobody knows it, nor the number of epochs (None).
    ``gradient_accumulation_steps`` None: lengths decide.
    """
    logger.info("***** Running training (FSDP2) *****")
    logger.info("  Num examples = %s", "unknown (a stream)" if num_examples is None else num_examples)
    logger.info("  Num Epochs = %s", "unknown (a stream)" if num_epochs is None else f"{num_epochs:.3g}")
    logger.info("  Total Batch Size = %d", total_batch_size)
    steps = "by tokens" if gradient_accumulation_steps is None else gradient_accumulation_steps
    logger.info("  Gradient Accumulation steps = %s", steps)
    logger.info("  Total optimization steps = %d", total_steps)
