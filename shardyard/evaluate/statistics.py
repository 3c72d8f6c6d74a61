"""Scores with their errors, and whether two differ: small closed forms, without numpy or scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error s / sqrt(n), s with n - 1; no error of a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def ratio_and_error(pairs: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """sum(x) / sum(w) and its standard error by linearisation: the mean of x - r w, whose own mean is 0.

    Of no weight at all (texts without a word) the ratio is NaN.

    Cochran, Sampling Techniques (3rd ed.), 2.11: the ratio estimator.
    """
    weight = math.fsum(w for _, w in pairs)
    if weight == 0:
        return math.nan, None
    ratio = math.fsum(x for x, _ in pairs) / weight
    if len(pairs) < 2:
        return ratio, None
    squares = math.fsum((x - ratio * w) ** 2 for x, w in pairs)
    count = len(pairs)
    return ratio, math.sqrt(squares * count / (count - 1)) / weight


def exp(value: float) -> float:
    """e to the value; infinite beyond what a float holds."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided exact p value of McNemar's test: of the samples that only one of two got right, either may
    with probability 1/2 (McNemar 1947; the binomial test of the discordant pairs).
    """
    count = first_only + second_only
    tail = sum(math.comb(count, k) for k in range(min(first_only, second_only) + 1))
    return min(1.0, 2 * tail / 2**count)


def student_p(t: float, degrees: int) -> float:
    """Two-sided p value of Student's t: I_x(degrees / 2, 1 / 2) at x = degrees / (degrees + t^2).

    Abramowitz & Stegun 26.7.1 and 26.5.27.
    """
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), regularised, by its continued fraction (Abramowitz & Stegun 26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges fast
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    factor = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    fraction = 1.0
    for n in range(200, 0, -1):  # from its far end, where it is as good as 1
        m = n // 2
        if n % 2:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1.0 + step / fraction
    return factor / (a * fraction)
