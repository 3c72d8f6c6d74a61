"""The order of an epoch's rows over several entries, and addresses."""

import itertools
import random
from fractions import Fraction

import pytest

from shardyard.data.stream.address import MAX_NUMBERS, MAX_WINDOWS, address, place
from shardyard.data.stream.mixture import Mixture, Source, pattern
from shardyard.errors import UserError


def make_sources(sizes, opened=None):
    """Source k holds the rows (k, 0), (k, 1), ...; ``opened`` collects (k, skip)."""

    def source(number, size):
        def rows(skip):
            if opened is not None:
                opened.append((number, skip))
            return iter([(number, row) for row in range(skip, size)])

        return Source(f"set {number}", rows, lambda: size)

    return [source(number, size) for number, size in enumerate(sizes)]


def rows_of(sizes, strategy, shares=None, start=0):
    found = list(Mixture(make_sources(sizes), strategy, shares).rows(start))
    assert all(number == row[0] for number, row in found)
    return [row for _, row in found]


def test_concat_is_one_entry_after_the_other_from_any_row_on():
    expected = [(k, row) for k, size in enumerate([3, 1, 4]) for row in range(size)]
    for start in range(10):
        assert rows_of([3, 1, 4], "concat", start=start) == expected[start:]


def test_shares_hold_in_every_stretch_and_the_pattern_repeats():
    picks = pattern([0.7, 0.3]).tolist()
    assert len(picks) == 10
    endless = list(itertools.islice(itertools.cycle(picks), 40))
    for end in range(1, 41):
        assert abs(endless[:end].count(0) - 0.7 * end) < 1


@pytest.mark.parametrize(
    ("shares", "weights"),
    [([1.0, 1.0, 1.0], [1, 1, 1]), ([0.25, 0.75], [1, 3]), ([1 / 3, 2 / 3], [1, 2]), ([2, 3, 5], [2, 3, 5])],
)
def test_small_whole_shares_are_exact(shares, weights):
    picks = pattern(shares).tolist()
    assert [picks.count(number) for number in range(len(weights))] == weights


def test_any_shares_are_met_within_a_row_of_65536():
    rng = random.Random(0)
    for _ in range(2):
        shares = [rng.random() for _ in range(5)] + [1e-9]
        picks = pattern(shares).tolist()
        assert abs(len(picks) - 2**16) <= 6
        for number, share in enumerate(shares):
            wanted = max(1, share / sum(shares) * 2**16)
            assert abs(picks.count(number) - wanted) <= 0.5 + 1e-9


@pytest.mark.parametrize("strategy", ["interleave_under", "interleave_over"])
@pytest.mark.parametrize("shares", [None, [0.7, 0.2, 0.1], [0.05, 0.9, 0.05]])
@pytest.mark.parametrize("sizes", [[5, 5, 5], [1, 9, 3], [7, 2, 11]])
def test_interleaving_against_a_plain_loop_from_every_row_on(strategy, shares, sizes):
    exact = [Fraction(share).limit_denominator(100) for share in shares or [1 / 3] * 3]
    taken, expected = [0, 0, 0], []
    stop = any if strategy == "interleave_under" else all
    while not stop(n >= size for n, size in zip(taken, sizes, strict=True)):
        lag = [share * (len(expected) + 1) - n for share, n in zip(exact, taken, strict=True)]
        number = lag.index(max(lag))
        expected.append((number, taken[number] % sizes[number]))
        taken[number] += 1
    for start in range(len(expected) + 1):
        assert rows_of(sizes, strategy, shares, start) == expected[start:]


def test_one_entry_is_read_to_its_end_by_any_strategy():
    for strategy in ("concat", "interleave_under", "interleave_over"):
        assert rows_of([4], strategy, start=1) == [(0, 1), (0, 2), (0, 3)]


def test_skipped_rows_are_skipped_by_their_source():
    opened = []
    next(Mixture(make_sources([100, 100], opened), "interleave_under").rows(60))
    assert opened == [(0, 30), (1, 30)]


def test_an_empty_entry_cannot_be_mixed():
    with pytest.raises(UserError, match="set 1: no rows"):
        rows_of([3, 0], "interleave_over")


def test_addresses_give_the_place_back_and_ascend_in_training_order():
    places = [
        (0, 0, 0),
        (0, 0, MAX_NUMBERS - 1),
        (0, 1, 0),
        (0, MAX_WINDOWS - 1, 5),
        (1, 0, 0),
        (2**18, 3, 4),
    ]
    addresses = [address(*at) for at in places]
    assert [place(value) for value in addresses] == places
    assert addresses == sorted(addresses) and addresses[2] == 2**24 and addresses[4] == 2**44
    assert addresses[-1] < 2**63


def test_places_that_no_address_holds():
    with pytest.raises(UserError, match=r"data\.buffer_size: .*raise it"):
        address(0, MAX_WINDOWS, 0)
    for at in [(2**19, 0, 0), (0, 0, MAX_NUMBERS), (-1, 0, 0)]:
        with pytest.raises(ValueError, match="no address"):
            address(*at)
    with pytest.raises(ValueError, match="no address"):
        place(-1)
