"""Orders and packs against plain loops: what an epoch holds, in which shares, never more than fits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.data.order import EpochOrder, MixedOrder, PackedOrder, epoch_order
from shardyard.data.packing import best_fit
from shardyard.data.sampler import ElasticSampler


def epoch_of(order, epoch):
    return order.units(epoch, 0, order.size(epoch)).indices.tolist()


def plain_best_fit(lengths, capacity):
    """The same rule in words: longest first, into the fullest pack with room, else a new pack."""
    packs = []
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rooms = [capacity - sum(lengths[i] for i in pack) for pack in packs]
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[position]]
        if fitting:
            packs[min(fitting, key=lambda number: (rooms[number], number))].append(position)
        else:
            packs.append([position])
    return sorted(sorted(pack) for pack in packs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 40))
def test_best_fit_is_the_plain_rule(lengths, capacity):
    packs = [pack.tolist() for pack in best_fit(np.array(lengths, int), capacity)]
    assert packs == plain_best_fit(lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)


def test_best_fit_fills_what_can_be_filled():
    assert [pack.tolist() for pack in best_fit([6, 3, 4, 7, 5, 5], 10)] == [[0, 2], [1, 3], [4, 5]]
    assert best_fit([], 10) == []
    with pytest.raises(ValueError, match="11 tokens"):
        best_fit([11], 10)


def test_some_samples_only():
    chosen = np.array([9, 4, 7])
    order = EpochOrder(chosen, seed=5, shuffle=True)
    assert [sorted(epoch_of(order, epoch)) for epoch in range(3)] == [[4, 7, 9]] * 3
    assert epoch_of(order, 1) == chosen[epoch_order(3, 5, 1)].tolist()
    assert epoch_of(EpochOrder(chosen, seed=5, shuffle=False), 1) == [9, 4, 7]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("counts", [(6, 2), (3, 3), (20, 1), (1, 9)])
def test_a_mixture_holds_its_shares_in_every_stretch(counts, shuffle):
    data_sets = [np.arange(0, 5), np.arange(100, 107)]
    order = MixedOrder(data_sets, counts, seed=1, shuffle=shuffle)
    for epoch in range(3):
        of_first = [index < 100 for index in epoch_of(order, epoch)]
        assert len(of_first) == sum(counts)
        for end in range(1, len(of_first) + 1):
            wanted = end * counts[0] / sum(counts)
            assert abs(sum(of_first[:end]) - wanted) <= 1, (epoch, end)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_of_a_mixture_comes_whole_before_it_comes_again(shuffle):
    data_sets = [np.arange(0, 5), np.arange(100, 107)]
    order = MixedOrder(data_sets, (3, 10), seed=1, shuffle=shuffle)
    drawn = [index for epoch in range(20) for index in epoch_of(order, epoch)]
    for samples in data_sets:
        of_it = [index for index in drawn if index in samples]
        passes = [of_it[begin : begin + len(samples)] for begin in range(0, len(of_it), len(samples))]
        whole = [turn for turn in passes if len(turn) == len(samples)]
        assert len(whole) > 5
        assert all(sorted(turn) == samples.tolist() for turn in whole)
        assert (len({tuple(turn) for turn in whole}) > 1) == shuffle


def packed(num_samples=50, seed=3, shuffle=True, window=20, capacity=16):
    lengths = np.random.default_rng(0).integers(1, capacity + 1, num_samples)
    inner = EpochOrder(num_samples, seed=seed, shuffle=shuffle)
    return PackedOrder(inner, lengths, capacity=capacity, window=window), inner, lengths


def test_packs_hold_each_sample_once_an_epoch_and_stay_within_the_window():
    order, inner, lengths = packed()
    for epoch in range(3):
        units = order.units(epoch, 0, order.size(epoch))
        packs = [units[number] for number in range(len(units))]
        assert sorted(i for pack in packs for i in pack) == list(range(50))
        assert all(lengths[list(pack)].sum() <= 16 for pack in packs)
        samples = epoch_of(inner, epoch)
        window_of = {index: place // 20 for place, index in enumerate(samples)}
        assert all(len({window_of[i] for i in pack}) == 1 for pack in packs)
        assert all(window_of[a[0]] <= window_of[b[0]] for a, b in pairwise(packs)), (
            "windows come one after another"
        )


def test_a_pack_is_a_function_of_seed_epoch_and_number():
    order, _, _ = packed()
    by_part = [order.units(1, number, number + 1)[0] for number in range(order.size(1))]
    fresh, _, _ = packed()
    assert by_part == [fresh.units(1, 0, fresh.size(1))[number] for number in range(fresh.size(1))]
    assert by_part != [order.units(0, 0, order.size(0))[number] for number in range(order.size(0))]


@pytest.mark.parametrize("global_batch", [1, 3, 4, 7])
@pytest.mark.parametrize("epochs", [1.0, 2.5, 3.0])
def test_a_run_over_packs_covers_its_epochs_though_they_differ_in_size(global_batch, epochs):
    order, _, _ = packed(num_samples=61)
    sizes = [order.size(epoch) for epoch in range(4)]
    assert len(set(sizes)) > 1, "the case is too tame"
    whole = int(epochs)
    covered = [*sizes[:whole], round((epochs - whole) * sizes[whole])]
    sampler = ElasticSampler(
        order, global_batch=global_batch, drop_last=False, num_train_epochs=epochs, max_steps=-1
    )
    assert sampler.total_steps == sum(-(-size // global_batch) for size in covered)
    batches, cursor = [], 0
    for _ in range(sampler.total_steps):
        batches.append(sampler.global_batch_at(cursor))
        cursor = batches[-1].end
    assert [sum(len(b.units) for b in batches if b.epoch == e) for e in range(whole)] == sizes[:whole]
    for epoch in range(whole):
        ids = [i for b in batches if b.epoch == epoch for i in b.indices.tolist()]
        assert sorted(ids) == list(range(61))
    for stop in range(0, len(batches), 3):
        fresh = ElasticSampler(
            packed(num_samples=61)[0], global_batch=global_batch, drop_last=False, num_train_epochs=epochs,
            max_steps=-1,
        )  # fmt: skip
        assert fresh.steps_from(batches[stop].start) == len(batches) - stop
        again = fresh.global_batch_at(batches[stop].start)
        assert again.indices.tolist() == batches[stop].indices.tolist()
