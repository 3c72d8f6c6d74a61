"""One run whose machines change under it: each leg is asked to stop, and another layout goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks import RankPool
from support.whole_runs import (
    TIMEOUT_S,
    metrics,
    numbers_of,
    rank_of_run,
    read_leg,
    train,
    write_numbered,
    write_workspace,
)

ROWS, EPOCHS, BATCH = 24, 3, 12
STEPS = EPOCHS * ROWS // BATCH
STOPS = (2, 3, 5)
LATEST = ["--training.resume_from_checkpoint", "latest"]


def batch(per_device: int, data_parallel: int) -> dict[str, Any]:
    return {
        "training.per_device_train_batch_size": per_device,
        "training.gradient_accumulation_steps": BATCH // (per_device * data_parallel),
    }


ALONE = (1, batch(2, 1))
CHAINS = {
    "dense": ("qwen3", [ALONE, (2, batch(2, 2)), (4, batch(1, 4)), (3, batch(2, 3))]),
    "experts": (
        "parity_moe",
        [
            (4, batch(1, 4)),
            (4, {"parallel.tp_size": 2, **batch(2, 2)}),
            (2, {"parallel.pp_size": 2, **batch(2, 1)}),
            (4, {"parallel.ep_size": 4, **batch(3, 4)}),
        ],
    ),
}
"""Family of the model, and the layouts of the legs: (ranks, settings)."""


def stopping_rank(folder: Path, out: str, leg: str, words: list[str], stop: int) -> int:
    """One rank of a leg, of which rank 0 is asked to stop in step ``stop``."""
    import os
    import signal

    from shardyard.train.step import TrainStep

    make_step = TrainStep.__call__

    def signal_and_step(self, micro_batches, **arguments):
        if arguments["step"] == stop and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return make_step(self, micro_batches, **arguments)

    TrainStep.__call__ = signal_and_step
    return rank_of_run(folder, out, leg, words, None)


def as_words(settings: dict[str, Any]) -> list[str]:
    return ["--training.save_steps", "100", *(w for k, v in settings.items() for w in (f"--{k}", str(v)))]


@pytest.mark.parametrize("chain", ["dense", pytest.param("experts", marks=pytest.mark.soak)])
def test_a_run_goes_on_whatever_its_layout(ranks: RankPool, tmp_path: Path, chain: str) -> None:
    family, layouts = CHAINS[chain]
    folder = write_workspace(tmp_path, family)
    write_numbered(folder / "rows.jsonl", range(ROWS))
    alone = train(ranks, folder, "alone", *as_words(ALONE[1]))
    legs = []
    for number, ((world, settings), stop) in enumerate(zip(layouts, [*STOPS, None], strict=True)):
        words = [*as_words(settings), *(LATEST if number else [])]
        if stop is None:
            legs.append(train(ranks, folder, "chain", *words, world=world, leg=f"leg{number}"))
            continue
        codes = ranks.run(
            world, stopping_rank, folder, "chain", f"leg{number}", words, stop, init_process_group=False,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        assert codes == [75] * world
        legs.append(read_leg(folder, "chain", f"leg{number}", world))
    assert [leg.first_step for leg in legs] == [1, *(stop + 1 for stop in STOPS)]
    ours, theirs = metrics(folder, "chain"), metrics(folder, "alone")
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-5), key
    for key in ("consumed_samples", "consumed_tokens"):
        assert [row[key] for row in ours] == [row[key] for row in theirs], key
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    # Ranks of one batch (tp, pp) are given the same rows: as sets they are those of the run on one rank.
    for leg in legs:
        for step, documents in leg.steps.items():
            given = set(numbers_of(tokenizer, documents))
            assert given == set(numbers_of(tokenizer, alone.steps[step])), step
