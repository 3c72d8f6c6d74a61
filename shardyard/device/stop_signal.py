"""Being asked to stop: SIGTERM and SIGUSR1, as schedulers and launchers send them before they kill.

While a `StopSignal` is in force the signals only leave word; the run looks for it at the end of each step,
saves and leaves with `EXIT_SAVED` (errors). Before and after, a signal ends the process as usual: there is
nothing to lose.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAVED_FILE = "SHARDYARD_SAVED_FILE"
"""Set by ``shardyard train``: the file in which a rank leaves the step that it saved before it stopped."""

_asked: signal.Signals | None = None


class StopSignal:
    """Catches the signals inside its block; outside the main thread, or not ``enabled``, it does nothing."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: Mapping[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        global _asked
        _asked = None
        if self.enabled:
            self._before = {number: signal.signal(number, _take_note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @property
    def asked(self) -> signal.Signals | None:
        return stop_asked() if self.enabled else None


def _take_note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = signal.Signals(number)


def stop_asked() -> signal.Signals | None:
    """The signal that has asked this process to stop since the last `StopSignal` began."""
    return _asked


def note_saved(step: int) -> None:
    """Tell the launcher, if it is ours, that the run has saved ``step`` and stops."""
    if path := os.environ.get(SAVED_FILE):
        Path(path).write_text(str(step))
