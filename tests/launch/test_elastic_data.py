"""Runs killed with SIGKILL at random moments go on with other ranks, workers and accumulation: no row is lost
or comes twice. Told from the texts that were trained.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers import byte_tokenizer
from support.whole_runs import (
    EOS,
    Leg,
    latest_checkpoint,
    metrics,
    numbers_of,
    train,
    train_and_kill,
    write_numbered,
    write_workspace,
)

ROWS, EPOCHS, GLOBAL_BATCH = 37, 3, 4
STEPS_PER_EPOCH = -(-ROWS // GLOBAL_BATCH)
RESUME = ("--training.resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("elastic"))
    write_numbered(folder / "rows.jsonl", range(1, ROWS + 1))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(eos=EOS, pad="<|endoftext|>")


def data_words(streaming: bool, packing: bool) -> list[str]:
    """What stays the same over all legs of a run."""
    words: list[str] = []
    if packing:
        words += ["--data.packing", "--data.preprocessing_batch_size", "16"]
    if streaming:  # an epoch has at most as many packs as rows
        words += ["--data.streaming", "--data.buffer_size", "10"]
        words += ["--training.max_steps", str(EPOCHS * STEPS_PER_EPOCH)]
    return words


def split_words(world: int, per_device: int, workers: int) -> list[str]:
    """One of the ways to make global batches of GLOBAL_BATCH."""
    return [
        "--training.per_device_train_batch_size", str(per_device),
        "--training.gradient_accumulation_steps", str(GLOBAL_BATCH // (world * per_device)),
        "--training.dataloader_num_workers", str(workers),
    ]  # fmt: skip


def draw_split(rng: random.Random, but: int = 0) -> tuple[int, list[str]]:
    """(ranks, settings), with another number of ranks than ``but``."""
    world = rng.choice([ranks for ranks in (1, 2, 4) if ranks != but])
    per_device = rng.choice([size for size in (1, 2, 4) if world * size <= GLOBAL_BATCH])
    return world, split_words(world, per_device, rng.choice([0, 2]))


def trained_before(leg: Leg, step: int, tokenizer: Any) -> list[int]:
    """The rows of a leg's steps up to ``step``, in training order."""
    return [number for s in sorted(leg.steps) if s <= step for number in numbers_of(tokenizer, leg.steps[s])]


def assert_each_once(numbers: list[int], *, ends: bool) -> None:
    """``numbers`` in training order; ``ends``: with the last epoch."""
    assert len(numbers) == EPOCHS * ROWS if ends else len(numbers) >= EPOCHS * ROWS
    for epoch in range(EPOCHS):
        assert sorted(numbers[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(1, ROWS + 1)), epoch


def check(ranks, folder: Path, name: str, tokenizer: Any, words: list[str], legs: list[Any]) -> list[int]:
    """Run the legs, each (world, its settings, kill after so many steps or None, seconds to wait).

    Returns the steps from which runs went on.
    """
    numbers: list[int] = []
    resumed: list[int] = []
    for number, (world, split, after, wait_s) in enumerate(legs):
        more = [*words, *split, *(RESUME if number else ())]
        place = latest_checkpoint(folder, name)
        if after is None:
            leg = train(ranks, folder, name, *more, world=world, leg=str(number))
        else:
            leg = train_and_kill(
                ranks, folder, name, *more, world=world, leg=str(number), after=after, wait_s=wait_s
            )
        assert leg.first_step == place + 1, "it goes on from the newest whole checkpoint"
        resumed.append(place)
        end = latest_checkpoint(folder, name) if after is not None else max(leg.steps)
        numbers += trained_before(leg, end, tokenizer)
    streams_packs = "--data.streaming" in words and "--data.packing" in words
    assert_each_once(numbers, ends=not streams_packs)
    steps = [record["step"] for record in metrics(folder, name)]
    assert steps == list(range(1, len(steps) + 1)), "metrics.jsonl has each step once"
    return resumed[1:]


def test_a_packed_run_killed_twice_trains_each_row_once(ranks, workspace, tokenizer):
    words = [*data_words(streaming=False, packing=True), "--training.save_steps", "2"]
    legs = [
        (2, split_words(2, 1, 0), 4, 0.02),
        (1, split_words(1, 4, 2), 3, 0.0),
        (2, split_words(2, 1, 0), None, 0.0),
    ]
    check(ranks, workspace, "packed", tokenizer, words, legs)


@pytest.mark.soak
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_goes_on_exactly_at_an_epoch_s_end(ranks, workspace, tokenizer, streaming):
    words = [*data_words(streaming, packing=False), "--training.save_steps", str(STEPS_PER_EPOCH)]
    legs = [
        (1, split_words(1, 4, 0), STEPS_PER_EPOCH + 1, 0.0),
        (2, split_words(2, 2, 0), None, 0.0),
    ]
    resumed = check(ranks, workspace, f"boundary-{streaming}", tokenizer, words, legs)
    assert resumed == [STEPS_PER_EPOCH]


POINTS = 20


@pytest.mark.soak
@pytest.mark.parametrize("point", range(POINTS))
def test_runs_killed_at_random_points_train_each_row_once(ranks, workspace, tokenizer, point):
    rng = random.Random(point)
    streaming, packing = point % 2 == 1, point // 2 % 2 == 1  # five points in each kind of data
    words = [*data_words(streaming, packing), "--training.save_steps", str(rng.randrange(1, 4))]
    legs: list[Any] = []
    world = 0
    for _ in range(rng.choice([1, 1, 2])):
        world, split = draw_split(rng, but=world)
        # An epoch of packs has five updates or more, so a second leg has enough of them left to be killed.
        legs.append((world, split, rng.randrange(1, 6), rng.uniform(0, 0.2)))
    legs.append((*draw_split(rng, but=world), None, 0.0))
    check(ranks, workspace, f"point-{point}", tokenizer, words, legs)
