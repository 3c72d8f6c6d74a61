"""The very rows that a run of Shardyard would train, in its order, as JSON for trainers that know none of it.

    python benchmarks/peer_rows.py OUT.json FILE [overrides]

Each row has ``input_ids``, ``labels`` as Hugging Face models take them (not shifted; -100 where nothing is
trained) and ``tokens``, those that Shardyard feeds. Where a row's last token has a target of its own, as in a
pretraining window, that target is put behind the row, so that the peer trains the same targets; it reads one
position more for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardyard.config import Config, load_config
from shardyard.data.build import build_run_data
from shardyard.data.tokenizer import load_tokenizer
from shardyard.data.types import IGNORE_INDEX, Sample
from shardyard.models import load_model_config, resolve_source, tokenizer_options


def rows_of(config: Config) -> list[dict[str, Any]]:
    """The rows of the run's updates, one global batch after the other."""
    source = resolve_source(config.model, fetch_first=lambda work: work())
    tokenizer = load_tokenizer(tokenizer_options(config.model, source))
    vocab_size = load_model_config(config.model, source).get_text_config().vocab_size
    data = build_run_data(config, tokenizer, vocab_size=vocab_size)
    rows: list[dict[str, Any]] = []
    cursor = 0
    for _ in range(config.training.max_steps):
        batch = data.sampler.global_batch_at(cursor)
        rows += [unshifted(data.samples[int(index)]) for index in batch.indices]
        cursor = batch.end
    data.close()
    return rows


def unshifted(sample: Sample) -> dict[str, Any]:
    """A sample's row, with ``labels[t]`` at the place of the token itself."""
    ids, targets = sample.input_ids.tolist(), sample.labels.tolist()
    labels = [IGNORE_INDEX, *targets]
    if targets[-1] != IGNORE_INDEX:
        ids.append(targets[-1])
    return {"input_ids": ids, "labels": labels[: len(ids)], "tokens": len(sample.input_ids)}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(rows_of(load_config(sys.argv[2:]).config)), encoding="utf-8")
