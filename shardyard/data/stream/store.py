"""The samples of a stream by number, and what has become of its rows so far."""

from __future__ import annotations

from shardyard.data.report import Report
from shardyard.data.stream.address import place
from shardyard.data.stream.cache import WindowCache
from shardyard.data.stream.window import Window
from shardyard.data.types import Sample


class Taken:
    """Adds up the windows that the run has entered, each once, in order."""

    def __init__(self, unit: str) -> None:
        self.report = Report(unit)
        self._last = (-1, -1)

    def enter(self, epoch: int, window: int, report: Report) -> bool:
        """Count a window; False if the run has been there before."""
        if (epoch, window) <= self._last:
            return False
        self._last = (epoch, window)
        self.report = Report.total([self.report, report])
        return True


class StreamStore:
    """``store[number]`` is a sample, its number an address of the stream (``address``).

    Sent to another process it reads the same windows, and makes one that is absent.
    """

    def __init__(self, cache: WindowCache, taken: Taken) -> None:
        self._cache = cache
        self._taken = taken

    def __getitem__(self, number: int) -> Sample:
        """Raises IndexError where the stream has no such sample."""
        window, sample = self._locate(number)
        return window.sample(sample)

    def doc_lens(self, number: int) -> tuple[int, ...]:
        """The documents of a sample, without reading its tokens."""
        window, sample = self._locate(number)
        return window.doc_lens(sample)

    def _locate(self, number: int) -> tuple[Window, int]:
        epoch, window, sample = place(number)
        found = self._cache.get(epoch, window)
        if found is None:
            raise IndexError(f"epoch {epoch} has no window {window}")
        return found, sample

    def window(self, number: int) -> Window | None:
        """A window of the first epoch, made now if it is absent; None past the epoch's end."""
        return self._cache.get(0, number)

    def report(self) -> Report:
        """What became of the rows of all windows that this process has taken batches from; a copy that a
        resumed run begins anew.
        """
        return Report.total([self._taken.report])
