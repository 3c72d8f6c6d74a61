"""The sampler against a plain loop over epochs."""

from itertools import pairwise

import numpy as np
import pytest

from shardyard.data.order import EpochOrder, epoch_order
from shardyard.data.sampler import ElasticSampler, split_over_ranks
from shardyard.errors import UserError


def make(num_samples, global_batch, *, epochs=1.0, max_steps=-1, drop_last=False, shuffle=True, seed=7):
    return ElasticSampler(
        EpochOrder(num_samples, seed=seed, shuffle=shuffle),
        global_batch=global_batch,
        drop_last=drop_last,
        num_train_epochs=epochs,
        max_steps=max_steps,
    )


def walk(sampler, cursor=0, steps=None):
    batches = []
    for _ in range(sampler.total_steps if steps is None else steps):
        batches.append(sampler.global_batch_at(cursor))
        cursor = batches[-1].end
    return batches


def plain_batch_sizes(num_samples, global_batch, epochs, max_steps, drop_last):
    """(epoch, size) of each update, one sample at a time."""
    budget = None if max_steps > 0 else round(epochs * num_samples)
    sizes, epoch = [], 0
    while True:
        current = 0
        for _ in range(num_samples):
            if budget == 0:
                break
            current += 1
            budget = None if budget is None else budget - 1
            if current == global_batch:
                sizes.append((epoch, current))
                current = 0
        if current and not drop_last:
            sizes.append((epoch, current))
        epoch += 1
        if budget == 0:
            return sizes
        if budget is None and len(sizes) >= max_steps:
            return sizes[:max_steps]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("max_steps", [-1, 1, 5, 23])
@pytest.mark.parametrize("epochs", [0.3, 0.5, 1.0, 2.0, 2.5, 3.9])
def test_updates_and_samples_match_a_plain_loop(epochs, max_steps, drop_last):
    for num_samples in (1, 2, 3, 7, 8, 10, 16, 33):
        for global_batch in (1, 2, 3, 4, 8, 16):
            expected = (
                []
                if drop_last and num_samples < global_batch
                else plain_batch_sizes(num_samples, global_batch, epochs, max_steps, drop_last)
            )
            case = (num_samples, global_batch)
            if not expected:
                with pytest.raises(UserError):
                    make(*case, epochs=epochs, max_steps=max_steps, drop_last=drop_last)
                continue
            sampler = make(*case, epochs=epochs, max_steps=max_steps, drop_last=drop_last)
            assert sampler.total_steps == len(expected), case
            batches = walk(sampler)
            assert [(b.epoch, len(b.indices)) for b in batches] == expected, case
            ends = [sampler.ends_epoch(b.end) for b in batches[:-1]]
            assert ends == [a.epoch != b.epoch for a, b in pairwise(batches)], case
            assert sampler.updates_per_epoch == (
                num_samples // global_batch if drop_last else -(-num_samples // global_batch)
            )


def test_a_run_by_epochs_ends_after_its_last_batch():
    for drop_last in (False, True):
        sampler = make(10, 4, epochs=2.0, drop_last=drop_last)
        last = walk(sampler)[-1]
        with pytest.raises(IndexError):
            sampler.global_batch_at(last.end)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_each_sample_comes_once_an_epoch_over_all_ranks(world_size):
    num_samples, per_device, accumulation = 37, 2, 3
    sampler = make(num_samples, per_device * accumulation * world_size, epochs=3.0)
    seen = {0: [], 1: [], 2: []}
    for batch in walk(sampler):
        shares = [
            split_over_ranks(batch.units, dp_rank=rank, dp_size=world_size, per_device=per_device)
            for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1, "ranks hold different numbers of micro-batches"
        assert all(len(micro_batch) <= per_device for share in shares for micro_batch in share)
        ids = [index for share in shares for micro_batch in share for unit in micro_batch for index in unit]
        assert sorted(ids) == sorted(batch.indices)
        seen[batch.epoch] += ids
    assert all(sorted(ids) == list(range(num_samples)) for ids in seen.values())


def test_the_order_does_not_depend_on_the_global_batch():
    ids = [
        np.concatenate([b.indices for b in walk(make(29, global_batch, epochs=3.0))])
        for global_batch in (1, 3, 8, 29, 64)
    ]
    assert all(np.array_equal(ids[0], other) for other in ids[1:])


def test_epochs_differ_and_are_reproducible():
    orders = [epoch_order(100, seed, epoch) for seed in (0, 1, 42) for epoch in range(4)]
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert np.array_equal(epoch_order(100, 42, 3), orders[-1])
    assert orders[0].dtype == np.int64


def test_the_order_is_pinned_so_that_an_upgrade_cannot_move_a_run():
    words = np.random.Philox(np.random.SeedSequence([42, 1])).random_raw(8)
    by_hand = sorted(range(8), key=lambda index: int(words[index]))
    assert epoch_order(8, 42, 1).tolist() == by_hand == [7, 3, 4, 2, 5, 6, 0, 1]


def test_file_order_without_shuffling():
    ids = np.concatenate([b.indices for b in walk(make(5, 2, epochs=2.0, shuffle=False))])
    assert ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_resume_inside_a_later_epoch_repeats_the_unbroken_run():
    unbroken = walk(make(12, 2, epochs=3.0))
    for stop in range(len(unbroken)):
        fresh = make(12, 2, epochs=3.0)
        assert fresh.steps_from(unbroken[stop].start) == len(unbroken) - stop
        resumed = walk(fresh, unbroken[stop].start, len(unbroken) - stop)
        assert [b.indices.tolist() for b in resumed] == [b.indices.tolist() for b in unbroken[stop:]]
        assert [b.epoch for b in resumed] == [b.epoch for b in unbroken[stop:]]


@pytest.mark.parametrize("other_batch", [1, 3, 5, 8, 16])
def test_resume_at_another_global_batch_goes_on_with_the_next_unseen_sample(other_batch):
    before = make(21, 4, epochs=2.5)
    total = round(2.5 * 21)
    for stop in range(before.total_steps):
        first = walk(before, steps=stop)
        cursor = first[-1].end if first else 0
        after = make(21, other_batch, epochs=2.5)
        rest = walk(after, cursor, after.steps_from(cursor))
        ids = [index for batch in [*first, *rest] for index in batch.indices.tolist()]
        everything = np.concatenate([epoch_order(21, 7, epoch) for epoch in range(3)])[:total]
        assert ids == everything.tolist()
        assert after.last_step(cursor=cursor, step=stop) == stop + len(rest)


def test_max_steps_still_counts_the_whole_run_after_a_change_of_batch():
    before = make(10, 4, max_steps=9)
    cursor = walk(before, steps=5)[-1].end
    after = make(10, 8, max_steps=9)
    assert after.last_step(cursor=cursor, step=5) == 9
    assert after.steps_from(cursor, 5) == 4
    assert before.steps_from(cursor) == 4


def test_dropping_the_last_batch_passes_over_the_rest_of_the_epoch():
    batches = walk(make(10, 4, epochs=2.0, drop_last=True, shuffle=False))
    assert [(b.start, b.end) for b in batches] == [(0, 4), (4, 8), (10, 14), (14, 18)]
    assert [b.indices.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_rank_without_samples_gets_empty_micro_batches():
    batch = make(3, 8).global_batch_at(0)
    shares = [split_over_ranks(batch.units, dp_rank=rank, dp_size=4, per_device=2) for rank in range(4)]
    assert [len(share) for share in shares] == [1, 1, 1, 1]
    assert [len(share[0]) for share in shares] == [1, 1, 1, 0]


def test_too_few_samples_with_drop_last_names_rows_and_batch():
    with pytest.raises(UserError, match=r"dataloader_drop_last.*3 samples.*batch of 8"):
        make(3, 8, drop_last=True)


def test_a_run_without_an_update_is_refused():
    with pytest.raises(UserError, match="num_train_epochs"):
        make(10, 4, epochs=0.0)
    with pytest.raises(UserError, match="no sample"):
        make(0, 4)
