"""Which rows a stream gives, when: each once an epoch whatever the ranks, and the rest after any cursor."""

import random

import pytest
from data_stream.streams import batches, by_epoch, numbers_of, open_numbers, steps_of_ranks, write_rows

from shardyard.data.sampler import Sampler
from shardyard.data.stream.address import place
from shardyard.errors import UserError


def two_files(folder, first=23, second=14):
    """Numbers from 1 on in the first file, from 101 on in the second."""
    return [
        write_rows(folder / "a.jsonl", range(1, 1 + first)),
        write_rows(folder / "b.jsonl", range(101, 101 + second)),
    ]


ALL = sorted([*range(1, 24), *range(101, 115)])
MIXES = {
    "concat": ALL,
    # alternating, and b has ended after row 28
    "interleave_under": sorted([*range(1, 15), *range(101, 115)]),
    # a ends after row 45; b's first 8 rows have come again by then
    "interleave_over": sorted([*ALL, *range(101, 109)]),
}


def run_cell(folder, *, ranks, workers, packing, mix, epochs=3, **options):
    names = two_files(folder)
    return names, steps_of_ranks(
        folder, names, ranks=ranks, workers=workers, epochs=epochs,
        packing=packing, mix_strategy=mix, buffer_size=10, **{"global_batch": 8, **options},
    )  # fmt: skip


def check_epochs(steps, mix, epochs=3):
    for epoch in range(epochs):
        seen = sorted(n for step in steps if step[0] == epoch for n in step[3])
        assert seen == MIXES[mix]


CELLS = [
    (ranks, workers, packing, mix)
    for ranks in (1, 2, 4)
    for workers in (0, 2)
    for packing in (False, True)
    for mix in MIXES
]
QUICK = [
    (1, 0, False, "concat"),
    (1, 2, True, "concat"),
    (2, 0, True, "interleave_over"),
    (4, 0, False, "interleave_under"),
    (2, 2, False, "interleave_under"),
]


@pytest.mark.parametrize(("ranks", "workers", "packing", "mix"), QUICK)
def test_each_row_comes_once_an_epoch(tmp_path, ranks, workers, packing, mix):
    _, steps = run_cell(tmp_path, ranks=ranks, workers=workers, packing=packing, mix=mix)
    check_epochs(steps, mix)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "workers", "packing", "mix"), [c for c in CELLS if c not in QUICK])
def test_each_row_comes_once_an_epoch_in_all_cells(tmp_path, ranks, workers, packing, mix):
    _, steps = run_cell(tmp_path, ranks=ranks, workers=workers, packing=packing, mix=mix)
    check_epochs(steps, mix)


def go_on_elsewhere(folder, rng, packing, mix, hops):
    """Stop at random steps and go on with other ranks and workers, ``hops`` times; then read to the end."""
    names, unbroken = run_cell(folder, ranks=1, workers=0, packing=packing, mix=mix, run="unbroken")
    check_epochs(unbroken, mix)
    seen, cursor = [], 0
    for hop in range(hops + 1):
        ranks, workers = rng.choice([1, 2, 4]), rng.choice([0, 2])
        rest = steps_of_ranks(
            folder, names, ranks=ranks, workers=workers, epochs=3, cursor=cursor, step=len(seen),
            packing=packing, mix_strategy=mix, buffer_size=10, global_batch=8, run=f"hop{hop}",
        )  # fmt: skip
        kept = rest if hop == hops else rest[: rng.randrange(1, max(2, len(rest) - hops + hop))]
        seen += kept
        cursor = seen[-1][2]
    assert seen == unbroken


@pytest.mark.parametrize(("packing", "mix"), [(False, "concat"), (True, "interleave_over")])
def test_two_resumes_in_a_row_on_other_world_sizes_change_no_batch(tmp_path, packing, mix):
    go_on_elsewhere(tmp_path, random.Random(f"{packing}{mix}"), packing, mix, hops=2)


@pytest.mark.soak
@pytest.mark.parametrize("point", range(20))
def test_resumes_at_random_points_of_random_cells_change_no_batch(tmp_path, point):
    rng = random.Random(point)
    go_on_elsewhere(tmp_path, rng, rng.choice([False, True]), rng.choice(sorted(MIXES)), hops=2)


@pytest.mark.parametrize("packing", [False, True])
def test_every_cursor_with_another_global_batch_gives_the_rest(tmp_path, packing):
    names = two_files(tmp_path, 9, 5)
    stream = open_numbers(tmp_path, names, buffer_size=4, packing=packing, global_batch=3)
    unbroken = batches(stream, 2)
    for step, (batch, _) in enumerate(unbroken):
        other = open_numbers(
            tmp_path, names, leads=False, buffer_size=4, packing=packing, global_batch=2, run=f"other{step}"
        )
        rest = by_epoch(batches(other, 2, batch.end))
        left = by_epoch(unbroken[step + 1 :])
        assert rest == left
        other.close()
    stream.close()


@pytest.mark.parametrize("buffer_size", [1, 6, 7, 1000])
@pytest.mark.parametrize("global_batch", [1, 4, 7, 50])
def test_windows_and_batches_of_any_size(tmp_path, buffer_size, global_batch):
    name = write_rows(tmp_path / "a.jsonl", range(1, 13))
    stream = open_numbers(tmp_path, [name], buffer_size=buffer_size, global_batch=global_batch)
    found = batches(stream, 3)
    per_epoch = -(-12 // global_batch)
    assert [batch.epoch for batch, _ in found] == sorted([0, 1, 2] * per_epoch)
    assert [len(numbers) for _, numbers in found[:per_epoch]] == [
        min(global_batch, 12 - begin) for begin in range(0, 12, global_batch)
    ]
    ends = [stream.sampler.ends_epoch(batch.end) for batch, _ in found]
    assert ends == [step % per_epoch == per_epoch - 1 for step in range(3 * per_epoch)]
    assert all(sorted(numbers) == list(range(1, 13)) for numbers in by_epoch(found))
    stream.close()


def test_rows_are_shuffled_within_windows_and_anew_in_each_epoch(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 61))
    stream = open_numbers(tmp_path, [name], buffer_size=20)
    epochs = by_epoch(batches(stream, 3))
    assert len({tuple(numbers) for numbers in epochs}) == 3
    for numbers in epochs:
        windows = [numbers[begin : begin + 20] for begin in (0, 20, 40)]
        assert [sorted(window) for window in windows] == [list(range(b, b + 20)) for b in (1, 21, 41)]
        ranks = [[n - min(window) for n in window] for window in windows]
        assert ranks[0] != ranks[1] != ranks[2] != ranks[0]
        assert all(rank != sorted(rank) for rank in ranks)
    again = open_numbers(tmp_path, [name], buffer_size=20, run="again")
    assert by_epoch(batches(again, 3)) == epochs
    other = open_numbers(tmp_path, [name], buffer_size=20, run="other", training={"seed": 7})
    assert by_epoch(batches(other, 3)) != epochs
    for opened in (stream, again, other):
        opened.close()


def test_natural_order_without_shuffling(tmp_path):
    names = two_files(tmp_path, 5, 4)
    stream = open_numbers(
        tmp_path, names, buffer_size=3, training={"disable_shuffling": True}, mix_strategy="interleave_under"
    )
    # Equal shares take turns, the first entry first; the second ends with its row 104.
    assert by_epoch(batches(stream, 2)) == [[1, 101, 2, 102, 3, 103, 4, 104]] * 2
    assert not stream.sampler.shuffle
    stream.close()


def test_rows_that_become_two_samples_or_none(tmp_path):
    """Windows of 4: the second has no sample at all, others lose rows, one row gives two."""

    def reply(number):
        return "drop" if number in (2, 5, 6, 7, 8, 11, 14) else "twice" if number == 10 else "r"

    name = write_rows(tmp_path / "a.jsonl", range(1, 15), reply)
    stream = open_numbers(tmp_path, [name], buffer_size=4, global_batch=3)
    found = batches(stream, 2)
    expected = [1, 3, 4, 9, 10, 10, 12, 13]
    assert [sorted(numbers) for numbers in by_epoch(found)] == [expected, expected]
    # The first batch fills the first window: the next one begins behind the empty second window.
    assert place(found[0][0].end) == (0, 2, 0) == place(found[1][0].start)
    # Asked for the third epoch's first batch, it has looked into that one's first three windows.
    report = stream.store.report()
    assert (report.rows, report.samples, report.split) == (2 * 14 + 12, 2 * 8 + 3 + 4, 3)
    drop = report.dropped["asked to be dropped"]
    assert (drop.count, drop.first.rpartition("/")[2]) == (2 * 7 + 6, "a.jsonl:2")
    stream.close()


def test_an_epoch_without_any_sample_ends_the_run(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 10), lambda number: "drop")
    stream = open_numbers(tmp_path, [name], buffer_size=4)
    with pytest.raises(UserError, match=r"no sample in a whole pass(?s:.*)asked to be dropped +9 .*jsonl:1"):
        stream.sampler.global_batch_at(0)
    stream.close()


def test_a_window_of_only_dropped_rows_at_an_epochs_start_and_end(tmp_path):
    def reply(number):
        return "r" if 4 < number <= 8 else "drop"

    name = write_rows(tmp_path / "a.jsonl", range(1, 13), reply)
    stream = open_numbers(tmp_path, [name], buffer_size=4, global_batch=4)
    found = batches(stream, 3)
    assert [sorted(numbers) for _, numbers in found] == [[5, 6, 7, 8]] * 3
    assert [place(batch.start) for batch, _ in found] == [(epoch, 1, 0) for epoch in range(3)]
    assert all(stream.sampler.ends_epoch(batch.end) for batch, _ in found)
    stream.close()


def test_packs_hold_whole_samples_within_the_cutoff(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 41))
    stream = open_numbers(tmp_path, [name], buffer_size=16, packing=True, global_batch=2)
    sizes = []
    for batch, _ in batches(stream, 1):
        for number in range(len(batch.units)):
            pack = [stream.store[index] for index in batch.units[number]]
            sizes.append(sum(len(sample.input_ids) for sample in pack))
            assert {place(index)[1] for index in batch.units[number]} == {place(batch.units[number][0])[1]}
    # 16 rows of 1 to 4 tokens, four of each, hold 40 tokens: 5 full packs; the last 8 rows hold 20.
    assert sorted(sizes) == [4, *[8] * 12]
    stream.close()


def test_the_run_counts_steps_by_max_steps(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 8))
    stream = open_numbers(tmp_path, [name], global_batch=4, training={"max_steps": 11})
    sampler: Sampler = stream.sampler
    assert sampler.updates_per_epoch is None
    assert sampler.steps_from(0) == sampler.last_step(cursor=0, step=0) == 11
    middle = sampler.global_batch_at(0).end
    assert sampler.steps_from(middle, 4) == 7
    assert sampler.last_step(cursor=middle, step=13) == 13
    with pytest.raises(ValueError, match="does not know"):
        sampler.steps_from(middle)
    stream.close()


def test_a_cursor_of_other_data_is_refused(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 8))
    stream = open_numbers(tmp_path, [name], buffer_size=4)
    with pytest.raises(UserError, match="unit 5 of window 1 of epoch 0, which has 3"):
        stream.sampler.global_batch_at(2**24 + 5)
    stream.close()


def test_windows_behind_are_deleted_and_made_again_when_needed(tmp_path):
    name = write_rows(tmp_path / "a.jsonl", range(1, 401))
    stream = open_numbers(tmp_path, [name], buffer_size=2, global_batch=2)
    follower = open_numbers(tmp_path, [name], leads=False, buffer_size=2, global_batch=2)
    first = stream.sampler.global_batch_at(0)
    found = batches(stream, 1)
    kept = sorted(int(path.stem.partition("-w")[2]) for path in stream.folder.glob("e0-*.window"))
    assert kept == list(range(kept[0], 200)) and 60 <= len(kept) <= 70
    assert numbers_of(follower, first) == found[0][1]
    assert follower.folder == stream.folder
    follower.close()
    stream.close()
