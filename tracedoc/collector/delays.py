"""Watch what holds the training thread up: that it waits for a free core, and Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tracedoc.collector.probe import Plain

_SCHEDULE = Path("/proc/thread-self/schedstat")
"""What the Linux scheduler counts for the calling thread: ns that it ran, and ns ready without a core."""


class ThreadSchedule:
    """What the scheduler counts for the thread that steps.

    Every step of a job pays for it, so the file stays open: to open and close it takes three times as long as
    to read it. It is that of one thread; another thread that steps opens its own.
    """

    def __init__(self) -> None:
        self._thread, self._file = 0, -1

    def scheduled_ns(self) -> tuple[int, int] | None:
        """The ns that the calling thread has run and waited for a core; ``None`` if nobody counts them."""
        if threading.get_ident() != self._thread:
            self._open()
        if self._file < 0:
            return None
        try:
            ran, waited, _ = os.pread(self._file, 64, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            # The thread may be gone, and a new one have its number.
            self._thread = 0
            return None

    def close(self) -> None:
        """Read no more."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_ident()
        with contextlib.suppress(OSError):
            self._file = os.open(_SCHEDULE, os.O_RDONLY)


class CoreWait:
    """Adds up the scheduler's times over the steps of a window."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def step(self, times: tuple[int, int] | None) -> None:
        """Note times of :class:`ThreadSchedule` at the end of a step; the first begins what counts."""
        if times is None:
            return
        self._last = times
        if self._first is None:
            self._first = times
        else:
            self._steps += 1

    def describe(self) -> dict[str, int] | None:
        """Return the sums over the steps that count, ``None`` where there are none."""
        if self._first is None or self._last is None or not self._steps:
            return None
        return {
            "steps": self._steps,
            "ran_us": (self._last[0] - self._first[0]) // 1000,
            "waited_us": (self._last[1] - self._first[1]) // 1000,
        }


LONG_PAUSE_NS = 1_000_000
"""A collection of at least this length is listed with its time; shorter ones are only summed up."""

OnPause = Callable[[int, int, int], None]
"""Called with generation, end and length of a long pause, in nanoseconds of ``time.time_ns``."""


class CollectionWatch:
    """Counts collections from :meth:`begin` to :meth:`end`, at some 1 us for each."""

    def __init__(self, on_pause: OnPause) -> None:
        self._on_pause = on_pause
        self._started_ns = 0
        self.collections = [0, 0, 0]
        self.total_ns = [0, 0, 0]
        self.longest_ns = [0, 0, 0]

    def begin(self) -> None:
        """Count every collection from now on."""
        gc.callbacks.append(self._watch)

    def end(self) -> None:
        """Stop counting."""
        if self._watch in gc.callbacks:
            gc.callbacks.remove(self._watch)

    def _watch(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
            return
        if not self._started_ns:
            return
        length = time.perf_counter_ns() - self._started_ns
        self._started_ns = 0
        generation = min(info["generation"], 2)
        self.collections[generation] += 1
        self.total_ns[generation] += length
        self.longest_ns[generation] = max(self.longest_ns[generation], length)
        if length >= LONG_PAUSE_NS:
            self._on_pause(generation, time.time_ns(), length)

    def describe(self) -> Plain:
        """Number and length of the collections so far, one entry for each generation."""
        return {
            "collections": list(self.collections),
            "total_ms": [ns / 1e6 for ns in self.total_ns],
            "longest_ms": [ns / 1e6 for ns in self.longest_ns],
            "enabled": gc.isenabled(),
            "threshold": list(gc.get_threshold()),
            "frozen": gc.get_freeze_count(),
        }
