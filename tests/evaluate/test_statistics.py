"""Formulas against closed forms, counting, and published table values."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from shardyard.evaluate.statistics import mcnemar, mean_and_error, ratio_and_error, student_p


def test_error_of_a_mean() -> None:
    values = [1.0, 0.0, 1.0, 1.0, 0.0, 0.25]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert error == pytest.approx(statistics.stdev(values) / math.sqrt(6))
    assert mean_and_error([0.5]) == (0.5, None)


def test_error_of_a_ratio_is_that_of_a_mean_where_weights_are_equal() -> None:
    values = [-3.0, -1.5, -2.0, -8.0]
    ratio, error = ratio_and_error([(value, 2.0) for value in values])
    mean, of_mean = mean_and_error([value / 2 for value in values])
    assert (ratio, error) == (pytest.approx(mean), pytest.approx(of_mean))


def test_error_of_a_ratio_by_hand() -> None:
    # r = -9 / 6 = -1.5; residuals -2 + 1.5 = -0.5, -4 + 4.5 = 0.5, -3 + 3 = 0; sqrt(0.5 * 3 / 2) / 6
    ratio, error = ratio_and_error([(-2, 1), (-4, 3), (-3, 2)])
    assert ratio == -1.5
    assert error == pytest.approx(math.sqrt(0.75) / 6)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (5, 0), (2, 7), (6, 6), (1, 9)])
def test_mcnemar_counts_the_coins(first: int, second: int) -> None:
    count = first + second
    extreme = abs(first - second)
    hits = sum(abs(2 * sum(coins) - count) >= extreme for coins in itertools.product((0, 1), repeat=count))
    assert mcnemar(first, second) == pytest.approx(hits / 2**count)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 12.0, -1.0])
def test_student_in_closed_form(t: float) -> None:
    one = 1 - 2 / math.pi * math.atan(abs(t))  # Cauchy
    two = 1 - abs(t) / math.sqrt(2 + t * t)
    assert student_p(t, 1) == pytest.approx(one, abs=1e-12)
    assert student_p(t, 2) == pytest.approx(two, abs=1e-12)


@pytest.mark.parametrize(
    ("degrees", "t"), [(5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (4, 2.776), (60, 2.000)]
)
def test_student_at_the_table_of_five_per_cent(degrees: int, t: float) -> None:
    assert student_p(t, degrees) == pytest.approx(0.05, abs=2e-4)


def test_student_of_many_degrees_is_the_normal() -> None:
    assert student_p(1.3, 10_000_000) == pytest.approx(math.erfc(1.3 / math.sqrt(2)), abs=1e-6)
    assert student_p(math.inf, 3) == 0.0
