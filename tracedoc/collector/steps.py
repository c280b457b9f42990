"""Count optimizer steps on one clock, time them, and write each into the rank's log."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracedoc.run.steplog import CAPACITY, COLLECTION, CORE_WAIT, HEADER, MAGIC, RECORD, STEP, WINDOW

SAMPLED_STEPS = 10
"""Steps timed without the profiler, before the captured ones and after them."""

_SILENCE_OF_THE_CLOCK = 50
"""Steps of one other object since the clock's last, after which it becomes the clock: jobs train in phases.

Not steps of others in all: an optimizer for each parameter makes hundreds of them an iteration.
"""


class _Nesting(threading.local):
    """How deep in step functions a thread is: an optimizer may step others inside its own step."""

    depth = 0


_nesting = _Nesting()


class Listener:
    """Who is called at each step; ``on_step`` can be exchanged once steps are being counted."""

    def __init__(self, on_step: Callable[[Any], None]) -> None:
        self.on_step = on_step


def count_outermost(
    step: Callable[..., Any],
    listener: Listener,
    is_whole: Callable[[Any], bool] = lambda stepped: True,
) -> Callable[..., Any]:
    """Return a step function that calls ``listener.on_step(self)`` after every outermost call that returned.

    ``is_whole(self)`` is asked before the call, whether it is a step or one of several accumulated.
    """

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        whole = _nesting.depth > 0 or is_whole(args[0])
        _nesting.depth += 1
        try:
            result = step(*args, **kwargs)
        finally:
            _nesting.depth -= 1
        if whole and _nesting.depth == 0:
            listener.on_step(args[0])
        return result

    return counted


class StepClock:
    """Decides whose steps are the job's: those of the object that steps first, for as long as it does.

    A GAN steps two optimizers, one of them perhaps several times an iteration; ``calls`` counts the steps
    of every class, so that a reader can regroup.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._chosen: weakref.ref[object] | None = None
        self._others: dict[int, int] = {}

    @property
    def name(self) -> str:
        """The class whose steps are counted, "" before the first."""
        chosen = self._chosen() if self._chosen is not None else None
        return type(chosen).__name__ if chosen is not None else ""

    def is_tick(self, stepped: object) -> bool:
        """Note that an object stepped; return whether its steps are the ones to count."""
        name = type(stepped).__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is stepped:
            if self._others:
                self._others.clear()
            return True
        if chosen is not None:
            since = self._others.get(id(stepped), 0) + 1
            self._others[id(stepped)] = since
            if since < _SILENCE_OF_THE_CLOCK:
                return False
        self._chosen = weakref.ref(stepped)
        self._others.clear()
        return True


class StepTimes:
    """Nanoseconds of steps: the last ones before the profiler, those under it, the first ones after."""

    def __init__(self) -> None:
        self.before: deque[int] = deque(maxlen=SAMPLED_STEPS)
        self.during: list[int] = []
        self.after: list[int] = []

    @property
    def enough(self) -> bool:
        """Whether all steps that are timed after the capture have been."""
        return len(self.after) >= SAMPLED_STEPS

    def medians(self) -> dict[str, object]:
        """Return the median of each in milliseconds and the number of steps it is of, where there are any."""
        kinds = {"before": self.before, "during": self.during, "after": self.after}
        return {
            kind: {"median_ms": round(statistics.median(times) / 1e6, 4), "steps": len(times)}
            for kind, times in kinds.items()
            if times
        }


ALLOWANCE_NS = 50_000_000
REST = 100
"""Writing may take this long in all and 1 / ``REST`` of the time; beyond, records wait in memory."""


class StepLogWriter:
    """Appends records to a ring file. A write that fails ends the log, never the job.

    On a slow disk records gather in memory, so that writing costs the job no more than 1 %; a single slow
    write is no slow disk, and a process that is killed leaves its last step all the same. Not a memory map: a
    full disk would then end the process with SIGBUS.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Create the file; raises :class:`OSError` where it cannot be."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self._places = itertools.count()
        self._steps = 1  # the log begins when a process shows itself to be a rank, by its first step
        self._last_ns = 0
        self._waited_ns: int | None = None
        self._waiting: list[tuple[bytes, int]] = []
        self._began_ns = time.perf_counter_ns()
        self._spent_ns = self._rests_until_ns = 0
        self._owner = os.getpid()
        self._write(HEADER.pack(MAGIC, max(rank, 0), CAPACITY, time.time_ns()), 0)

    def step(self, end_ns: int, waited_ns: int | None = None) -> None:
        """Note the end of a step; ``waited_ns`` is how long its thread waited for cores since it began.

        A step that waited for none has no record of that.
        """
        length = end_ns - self._last_ns if self._last_ns else 0
        if waited_ns is not None:
            if self._waited_ns is not None and waited_ns > self._waited_ns:
                self._append(CORE_WAIT, self._steps, end_ns, waited_ns - self._waited_ns)
            self._waited_ns = waited_ns
        self._last_ns = end_ns
        self._append(STEP, self._steps, end_ns, length)
        self._steps += 1

    def collection(self, generation: int, end_ns: int, length_ns: int) -> None:
        """Note a garbage collection that took long."""
        self._append(COLLECTION, generation, end_ns, length_ns)

    def window(self, what: int) -> None:
        """Note that the captured window begins or ends, or that its file was written."""
        self._append(WINDOW, what, time.time_ns(), 0)

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0 and self._owner == os.getpid():
            self._flush()
            self._end()

    def _append(self, kind: int, number: int, end_ns: int, length_ns: int) -> None:
        if self._file < 0 or self._owner != os.getpid():
            return
        place = next(self._places) % CAPACITY
        record = RECORD.pack(number & 0xFFFFFFFF, kind, end_ns, length_ns)
        self._write(record, HEADER.size + place * RECORD.size)

    def _write(self, data: bytes, offset: int) -> None:
        self._waiting.append((data, offset))
        if time.perf_counter_ns() >= self._rests_until_ns:
            self._flush()

    def _flush(self) -> None:
        before = time.perf_counter_ns()
        waiting, self._waiting = self._waiting, []
        try:
            for data, offset in waiting:
                os.pwrite(self._file, data, offset)
        except OSError:
            self._end()
            return
        self._spent_ns += time.perf_counter_ns() - before
        self._rests_until_ns = self._began_ns + REST * (self._spent_ns - ALLOWANCE_NS)

    def _end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
