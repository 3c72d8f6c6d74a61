"""A run of several processes that is killed at a random moment and goes on with another world size."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
from data_stream.streams import batches, open_numbers, write_rows

from shardyard.data.batches import BatchLoader

FORK = multiprocessing.get_context("fork")
EPOCHS = 3


def rank_of_a_run(folder, names, rank, ranks, workers, cursor, step, run, options, together):
    """Writes a line for each step that it has read; ``together`` keeps ranks in step, as training does."""
    stream = open_numbers(folder, names, run=run, leads=rank == 0, look_ahead=True, **options)
    loader = BatchLoader(
        stream.store, stream.sampler, dp_rank=rank, dp_size=ranks, per_device=2,
        start_cursor=cursor, start_step=step, num_workers=workers,
    )  # fmt: skip
    with (folder / f"{run}-{rank}.log").open("w") as log:
        for batch in loader:
            if batch.epoch == EPOCHS:
                break
            ids = [index for m in batch.micro_batches for index in m.sample_ids]
            numbers = [int(stream.store[index].input_ids[0]) for index in ids]
            log.write(json.dumps([batch.start, batch.end, numbers]) + "\n")
            log.flush()
            together.wait(60)
    together.wait(60)
    stream.close()


def steps_so_far(folder, run, ranks):
    """(start, end, numbers of all ranks) of the steps that every rank has made."""
    lines = []
    for rank in range(ranks):
        log = folder / f"{run}-{rank}.log"
        whole = log.read_text().splitlines(keepends=True) if log.exists() else []
        lines.append([json.loads(line) for line in whole if line.endswith("\n")])
    steps = []
    for parts in zip(*lines, strict=False):
        assert len({(start, end) for start, end, _ in parts}) == 1
        steps.append((parts[0][0], parts[0][1], sorted(n for part in parts for n in part[2])))
    return steps


def run_until(folder, names, kill_after, *, ranks, workers, cursor, step, run, options):
    """The steps of a run that is killed when ``kill_after`` of them are made (None: it ends by itself)."""
    together = FORK.Barrier(ranks)
    more = (ranks, workers, cursor, step, run, options, together)
    processes = [
        FORK.Process(target=rank_of_a_run, args=(folder, names, rank, *more)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline
        if kill_after is not None and len(steps_so_far(folder, run, ranks)) >= kill_after:
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.003)
    for process in processes:
        process.join(30)
        assert process.exitcode == (0 if kill_after is None else -signal.SIGKILL)
    return steps_so_far(folder, run, ranks)


def check_kill_and_resume(folder, rng):
    names = [
        write_rows(folder / "a.jsonl", range(1, 60), lambda number: "drop" if number % 9 == 0 else "r"),
        write_rows(folder / "b.jsonl", range(101, 141), lambda number: "twice" if number % 7 == 0 else "r"),
    ]
    options = {
        "buffer_size": rng.choice([3, 10, 1000]),
        "packing": rng.choice([False, True]),
        "mix_strategy": rng.choice(["concat", "interleave_under", "interleave_over"]),
        "global_batch": 8,
    }
    whole = open_numbers(folder, names, run="unbroken", **options)
    unbroken = [(b.start, b.end, sorted(numbers)) for b, numbers in batches(whole, EPOCHS)]
    whole.close()
    steps = []
    for leg in range(3):
        kill_after = None if leg == 2 else rng.randrange(1, (len(unbroken) - len(steps)) // 2)
        made = run_until(
            folder, names, kill_after, ranks=rng.choice([1, 2, 4]), workers=rng.choice([0, 2]),
            cursor=steps[-1][1] if steps else 0, step=len(steps), run=f"leg{leg}", options=options,
        )  # fmt: skip
        # The last checkpoint can be older than the last step.
        steps += made if leg == 2 else made[: rng.randrange(1, 1 + len(made))]
    assert steps == unbroken
    # The last run has cleaned up after those that were killed.
    assert not list((folder / "stream").glob("*/*"))


def test_a_run_that_is_killed_twice_sees_everything_once(tmp_path):
    check_kill_and_resume(tmp_path, random.Random("quick"))


@pytest.mark.soak
@pytest.mark.parametrize("point", range(20))
def test_runs_killed_at_random_points_see_everything_once(tmp_path, point):
    check_kill_and_resume(tmp_path, random.Random(point))
