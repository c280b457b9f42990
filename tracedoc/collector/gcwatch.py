"""Watch Python's garbage collector: how often it ran, how long, and when it held the process up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from tracedoc.collector.probe import Plain

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
        """Return what was seen so far, one entry for each generation."""
        return {
            "collections": list(self.collections),
            "total_ms": [ns / 1e6 for ns in self.total_ns],
            "longest_ms": [ns / 1e6 for ns in self.longest_ns],
            "enabled": gc.isenabled(),
            "threshold": list(gc.get_threshold()),
            "frozen": gc.get_freeze_count(),
        }
