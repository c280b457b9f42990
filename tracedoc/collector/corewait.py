"""Watch how long the training thread runs, and how long it waits for a free core."""

from __future__ import annotations

import os
from pathlib import Path

_SCHEDULE = Path("/proc/thread-self/schedstat")
"""What the Linux scheduler counts for the calling thread: ns that it ran, and ns ready without a core."""


def scheduled_ns() -> tuple[int, int] | None:
    """Return how many ns the calling thread has run, and waited for a core; ``None`` if that is not counted.

    Every step of a job pays for this: a bare descriptor takes a third of the time that a file object does.
    """
    try:
        file = os.open(_SCHEDULE, os.O_RDONLY)
        try:
            ran, waited, _ = os.read(file, 64).split()
        finally:
            os.close(file)
        return int(ran), int(waited)
    except (OSError, ValueError):
        return None


class CoreWait:
    """Adds up the scheduler's times over the steps of a window."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def step(self, times: tuple[int, int] | None) -> None:
        """Note :func:`scheduled_ns` at the end of a step; the first begins the first step that counts."""
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
