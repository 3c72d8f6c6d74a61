"""A place in a stream as one integer: what the run's cursor and the numbers of its samples are.

``epoch * 2**44 + window * 2**24 + number``: number counts the units of a window (a cursor), or its samples (a
sample's number). Addresses ascend in training order but not without gaps: differences count nothing.
"""

from __future__ import annotations

from shardyard.errors import UserError

_NUMBER_BITS = 24
_WINDOW_BITS = 20
_EPOCH_BITS = 63 - _WINDOW_BITS - _NUMBER_BITS

MAX_NUMBERS = 2**_NUMBER_BITS
"""Samples that a window can hold."""

MAX_WINDOWS = 2**_WINDOW_BITS
"""Windows that an epoch can hold."""


def address(epoch: int, window: int, number: int) -> int:
    """The integer for a place.

    Raises:
        UserError: an epoch of more windows than an address can tell apart.
    """
    if window >= MAX_WINDOWS:
        raise UserError(
            f"data.buffer_size: the data makes more than {MAX_WINDOWS} windows of that many rows, and a "
            f"position cannot count further; raise it"
        )
    if not (0 <= epoch < 2**_EPOCH_BITS and window >= 0 and 0 <= number < MAX_NUMBERS):
        raise ValueError(f"no address for number {number} of window {window} of epoch {epoch}")
    return (epoch << _WINDOW_BITS | window) << _NUMBER_BITS | number


def place(address: int) -> tuple[int, int, int]:
    """(epoch, window, number) of an address."""
    if not 0 <= address < 2**63:
        raise ValueError(f"{address} is no address of a stream")
    return (
        address >> (_NUMBER_BITS + _WINDOW_BITS),
        address >> _NUMBER_BITS & (MAX_WINDOWS - 1),
        address & (MAX_NUMBERS - 1),
    )
