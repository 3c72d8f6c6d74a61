"""Work in a thread that ends with it, so that its helpers end as well.

OpenMP gives each thread that computes helpers of its own and keeps them while the thread lives. With more
helpers than cores they no longer wait actively: a thread that has loaded a model and lives on costs another
one, which generates from it, a quarter of its speed (measured on two cores).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shardyard.device.device import Device

_Result = TypeVar("_Result")


def in_passing_thread(device: Device, work: Callable[[], _Result]) -> _Result:
    """What ``work`` returns or raises; ``device`` is current in its thread too."""
    results: list[_Result] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            device.bind()
            results.append(work())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, name="shardyard-once", daemon=True)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return results[0]
