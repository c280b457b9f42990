"""Watch how long the training thread runs in the captured steps, and how long it waits for a free core."""

from __future__ import annotations

from pathlib import Path

_SCHEDULE = Path("/proc/thread-self/schedstat")
"""What the Linux scheduler counts for the calling thread: ns that it ran, and ns ready without a core."""


class CoreWait:
    """Reads the scheduler's times at the end of every step of a window; where there are none it is silent."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def step(self) -> None:
        """Note the end of a step; the first one that is noted begins the first that counts."""
        try:
            ran, waited, _ = _SCHEDULE.read_text().split()
            self._last = int(ran), int(waited)
        except (OSError, ValueError):
            return
        if self._first is None:
            self._first = self._last
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
