"""How global batches are cut into micro-batches: against a plain loop, brute force and known bounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardyard.config import TrainingConfig
from shardyard.data.cut import Cut, tell_of_long_units
from shardyard.data.order import Units
from shardyard.data.sampler import split_over_ranks

Plan = list[list[list[int]]]
UNITS = st.lists(
    st.lists(st.integers(1, 60) | st.integers(1, 900), min_size=1, max_size=3), min_size=1, max_size=40
)
RANKS = st.integers(1, 8)


def tokens_of(documents: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    return sum(sum(documents[unit]) for unit in part)


def cost_of(documents: Sequence[Sequence[int]], part: Sequence[int], even_at: int) -> int:
    return sum(n * even_at + n**2 for unit in part for n in documents[unit])


def flat(share: list[list[int]]) -> list[int]:
    return [unit for part in share for unit in part]


def plain(cut: Cut, documents: Sequence[Sequence[int]], ranks: int) -> Plan:
    """What the module says, in plain loops over all bins; for cuts by tokens."""
    assert cut.max_tokens is not None
    budget = cut.max_tokens

    def place(units: Sequence[int], weight, bins: int) -> list[list[int]]:
        parts: list[list[int]] = [[] for _ in range(bins)]
        for unit in sorted(units, key=lambda unit: (-weight([unit]), unit)):
            loads = [weight(part) for part in parts]
            parts[loads.index(min(loads))].append(unit)
        return parts

    def tokens(part: Sequence[int]) -> int:
        return tokens_of(documents, part)

    def cost(part: Sequence[int]) -> int:
        return cost_of(documents, part, cut.even_at)

    def best_fit(units: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = []
        for unit in sorted(units, key=lambda unit: (-tokens([unit]), unit)):
            rooms = [budget - tokens(part) - tokens([unit]) for part in bins]
            fitting = [(room, number) for number, room in enumerate(rooms) if room >= 0]
            bins[min(fitting)[1]].append(unit) if fitting else bins.append([unit])
        return bins

    shares = place(range(len(documents)), cost, ranks)
    needed = [best_fit(share) for share in shares]
    count = max(max(map(len, needed)), min(cut.at_least, max(map(len, shares))))
    plan = []
    for share, fewest in zip(shares, needed, strict=True):
        parts = place(share, tokens, count)
        if any(len(part) > 1 and tokens(part) > budget for part in parts):
            parts = fewest + [[] for _ in range(count - len(fewest))]
        plan.append(sorted(cost(part) for part in parts)[::-1])
    return plan


def check(cut: Cut, documents: list[list[int]], ranks: int) -> Plan:
    """What holds of every cut; the plan."""
    plan = cut.micro_batches(documents, ranks)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1, "ranks would wait for each other for ever"
    everything = sorted(unit for share in plan for unit in flat(share))
    assert everything == list(range(len(documents)))
    for share in plan:
        costs = [cost_of(documents, part, cut.even_at) for part in share]
        assert costs == sorted(costs, reverse=True)
    by_rank = [cost_of(documents, flat(share), cut.even_at) for share in plan]
    largest = max(cost_of(documents, [unit], cut.even_at) for unit in range(len(documents)))
    assert max(by_rank) <= sum(by_rank) / ranks + largest
    return plan


@settings(max_examples=40, deadline=None)
@given(
    documents=UNITS,
    ranks=RANKS,
    budget=st.integers(1, 1500),
    even_at=st.integers(1, 5000),
    pp=st.integers(1, 4),
)
@example(documents=[[900]], ranks=8, budget=10, even_at=1, pp=1)
@example(documents=[[5]] * 16, ranks=4, budget=10, even_at=1, pp=3)
def test_a_cut_by_tokens_is_that_of_plain_loops(
    documents: list[list[int]], ranks: int, budget: int, even_at: int, pp: int
) -> None:
    cut = Cut(8, max_tokens=budget, even_at=even_at, at_least=pp)
    plan = check(cut, documents, ranks)
    for part in (part for share in plan for part in share):
        assert len(part) < 2 or tokens_of(documents, part) <= budget
        assert part == sorted(part), "units of a micro-batch stand in training order"
    costs = [[cost_of(documents, part, even_at) for part in share] for share in plan]
    assert costs == plain(cut, documents, ranks)


@settings(max_examples=40, deadline=None)
@given(documents=UNITS, ranks=RANKS, rows=st.integers(1, 9), even_at=st.integers(1, 5000))
def test_grouping_by_length_keeps_the_numbers_of_rows(
    documents: list[list[int]], ranks: int, rows: int, even_at: int
) -> None:
    cut = Cut(rows, by_length=True, even_at=even_at)
    plan = check(cut, documents, ranks)
    of_rank = [sum(map(len, share)) for share in plan]
    assert max(of_rank) - min(of_rank) <= 1
    assert all(len(part) <= rows for share in plan for part in share)
    units = Units.singles(np.arange(len(documents)))
    in_order = split_over_ranks(units, dp_rank=0, dp_size=ranks, per_device=rows)
    assert len(plan[0]) == len(in_order), "as many micro-batches as without grouping"
    costs = [cost_of(documents, flat(share), even_at) for share in plan]
    every = [cost_of(documents, [unit], even_at) for unit in range(len(documents))]
    assert max(costs) - min(costs) <= max(every)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_close_to_the_best_that_there_is(ranks: int) -> None:
    """Graham 1969: at most 4/3 - 1/(3 R) of the smallest possible maximum, found by trying all."""
    rng = np.random.default_rng(5)
    for _ in range(12):
        documents = [[int(n)] for n in rng.lognormal(3, 1.2, 7).astype(int) + 1]
        plan = Cut(1, max_tokens=10**6, even_at=100).micro_batches(documents, ranks)
        ours = max(cost_of(documents, flat(share), 100) for share in plan)
        every = [cost_of(documents, [unit], 100) for unit in range(7)]
        best = min(
            max(sum(c for c, rank in zip(every, choice, strict=True) if rank == r) for r in range(ranks))
            for choice in product(range(ranks), repeat=7)
        )
        assert best <= ours <= (4 / 3 - 1 / (3 * ranks)) * best


def test_the_micro_batches_of_one_rank_are_nearly_as_few_as_there_can_be() -> None:
    """Dosa 2007 and Johnson 1974: best fit, falling, takes at most 11/9 OPT + 6/9; OPT by trying all."""
    rng = np.random.default_rng(6)
    for _ in range(12):
        documents = [[int(n)] for n in rng.integers(5, 61, 7)]
        count = len(Cut(1, max_tokens=100).micro_batches(documents, 1)[0])
        sizes = [document[0] for document in documents]
        best = next(bins for bins in range(1, 8) if _fits(sizes, bins, 100))
        assert best <= count <= (11 * best + 6) / 9


def _fits(sizes: list[int], bins: int, capacity: int) -> bool:
    """Whether any way of sorting ``sizes`` into the bins fits."""
    return any(
        max(sum(n for n, number in zip(sizes, choice, strict=True) if number == k) for k in range(bins))
        <= capacity
        for choice in product(range(bins), repeat=len(sizes))
    )


def test_a_batch_worked_out_by_hand() -> None:
    """Two ranks, at most 10 tokens, attention that costs next to nothing.

    Falling: 8 to rank 0; 5 and 4 to rank 1; 3 to rank 0, which then has 11 against 9; 2 to rank 1; 1 + 1 to
    rank 1, whose squares (25 + 16 + 4) are less than 64 + 9; 1 to rank 0. Each fits into two micro-batches:
    8 and 3 + 1; 5 + (1 + 1) and 4 + 2.
    """
    documents = [[3], [8], [2], [1, 1], [5], [4], [1]]
    cut = Cut(99, max_tokens=10, even_at=10**9)
    assert cut.micro_batches(documents, 2) == [[[1], [0, 6]], [[3, 4], [2, 5]]]


def test_attention_counts_for_long_documents() -> None:
    """One document of 100 tokens against ten of 10: with attention at 100 as dear as the rest, 20,000 against
    11,000; so the short ones go together and leave the long one alone.
    """
    documents = [[100], *[[10]] * 10]
    shares = Cut(1, max_tokens=1000, even_at=100).micro_batches(documents, 2)
    assert sorted(shares[0][0]) == [0] and sorted(shares[1][0]) == list(range(1, 11))
    linear = Cut(1, max_tokens=1000, even_at=10**9).micro_batches(documents, 2)
    assert sorted(linear[0][0]) == [0] and len(linear[1][0]) == 10
    packed = Cut(1, max_tokens=1000, even_at=100).micro_batches([[10] * 10, [100]], 2)
    assert packed == [[[1]], [[0]]], "a pack of short documents is cheaper than a long one"


def test_documents_of_their_own_forward_meet_others_alike() -> None:
    """Each rank's k-th forward is of the k-th longest documents."""
    documents = [[n] for n in (5, 50, 7, 40, 6, 60, 45, 8)]
    plan = Cut(2, by_length=True, alone=True).micro_batches(documents, 2)
    forwards = [[documents[unit][0] for part in share for unit in part] for share in plan]
    pairs = sorted(tuple(sorted(pair, reverse=True)) for pair in zip(*forwards, strict=True))
    assert pairs == [(6, 5), (8, 7), (45, 40), (60, 50)]
    assert all(len(part) == 2 for share in plan for part in share)
    by_tokens = Cut(2, max_tokens=64, alone=True).micro_batches(documents, 2)
    assert [[documents[unit][0] for part in share for unit in part] for share in by_tokens] == forwards
    assert all(len(part) == 1 for share in by_tokens for part in share)


def test_without_either_setting_units_keep_their_order() -> None:
    units = Units.singles(np.arange(11))

    def unread(_: object) -> Sequence[int]:
        raise AssertionError("lengths are not asked for")

    for rank in range(3):
        ours = Cut(2).share(units, unread, dp_rank=rank, dp_size=3)
        assert ours == split_over_ranks(units, dp_rank=rank, dp_size=3, per_device=2)


def test_the_settings_and_the_model_decide() -> None:
    training = TrainingConfig(
        output_dir="o", per_device_train_batch_size=3, max_tokens_per_micro_batch=77, group_by_length=True
    )
    cut = Cut.of(training, hidden_size=64, pp=2, alone=True)
    assert cut == Cut(3, max_tokens=77, by_length=True, even_at=768, at_least=2, alone=True)


def test_attention_costs_as_much_as_the_rest_at_twelve_hidden_sizes() -> None:
    """Against the operations of a layer, counted matrix by matrix."""
    hidden, n = 32, 12 * 32
    weights = [hidden * hidden] * 4 + [hidden * 4 * hidden] * 2
    linear = sum(2 * size * n for size in weights)
    pairs = n * n / 2
    attention = 2 * (2 * pairs * hidden)
    assert attention == linear
    cut = Cut.of(TrainingConfig(output_dir="o"), hidden_size=hidden)
    assert cut.even_at == n


def test_a_longer_unit_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardyard.data"):
        tell_of_long_units(900, None)
        tell_of_long_units(900, 900)
        assert not caplog.records
        tell_of_long_units(901, 900)
    (record,) = caplog.records
    assert "max_tokens_per_micro_batch: 900" in record.getMessage() and "901" in record.getMessage()
