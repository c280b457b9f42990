"""Count optimizer steps on one clock, time them, and write each into the rank's log."""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tracedoc.run.steplog import (
    CAPACITY,
    COLLECTION,
    CORE_WAIT,
    HEADER,
    MAGIC,
    RECORD,
    STEP,
    STOPPED,
    WINDOW,
    WRITTEN_WITHIN_NS,
)

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
        depth = _nesting.depth
        whole = depth == 0 and is_whole(args[0])
        _nesting.depth = depth + 1
        try:
            result = step(*args, **kwargs)
        finally:
            _nesting.depth = depth
        if whole:
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

_Record = tuple[int, int, int, int]
"""Number, kind, end and length, as in the file."""

Counted = Callable[[], int | None]
"""Tells how long the calling thread waited for cores so far, in ns; ``None`` where nobody counts it."""


class StepLogWriter:
    """Appends records to a ring file. A write that fails ends the log, never the job.

    A step is noted, and short ones are written together: a process that is killed loses those of its last
    10 ms, and for one that hangs another thread calls :meth:`write`. On a slow disk
    records gather in memory, so that writing costs the job no more than 1 %. Not a memory map: a full disk
    would then end the process with SIGBUS.
    """

    def __init__(self, path: Path, rank: int, waited_ns: Counted = lambda: None) -> None:
        """Create the file; raises :class:`OSError` where it cannot be.

        ``waited_ns`` is asked by the thread that steps, before it writes.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self._place = 0
        self._steps = 1  # the log begins when a process shows itself to be a rank, by its first step
        self._last_ns = 0
        self._waited_ns: Counted = waited_ns
        self._waited: int | None = None
        self._noted: deque[_Record] = deque(maxlen=CAPACITY)
        self._writing = threading.Lock()
        self._written_ns, self._pause_ns = 0, WRITTEN_WITHIN_NS
        self._began_ns = time.perf_counter_ns()
        self._spent_ns = 0
        self._owner = os.getpid()
        try:
            os.pwrite(self._file, HEADER.pack(MAGIC, max(rank, 0), CAPACITY, time.time_ns()), 0)
        except OSError:
            self._end()

    def step(self, end_ns: int) -> None:
        """Note the end of a step, in nanoseconds of ``time.time_ns``."""
        last_ns, self._last_ns = self._last_ns or end_ns, end_ns
        self._noted.append((self._steps, STEP, end_ns, end_ns - last_ns))
        self._steps += 1
        # Also when the clock was set back.
        if not 0 <= end_ns - self._written_ns < self._pause_ns:
            before, now = self._waited, self._waited_ns()
            self._waited = now
            self._write(end_ns, max(now - before, 0) if now is not None and before is not None else 0)

    def collection(self, generation: int, end_ns: int, length_ns: int) -> None:
        """Note a garbage collection that took long."""
        self._noted.append((generation, COLLECTION, end_ns, length_ns))

    def stop(self, end_ns: int, length_ns: int) -> None:
        """Note that the process stood still, from any thread."""
        self._noted.append((0, STOPPED, end_ns, length_ns))

    def window(self, what: int) -> None:
        """Write that the captured window begins or ends, or that its file was written."""
        now_ns = time.time_ns()
        self._noted.append((what, WINDOW, now_ns, 0))
        self._write(now_ns)

    def write(self) -> None:
        """Write what is noted, from any thread, unless it is too early: the step that runs may take long."""
        now_ns = time.time_ns()
        if self._noted and now_ns - self._written_ns >= self._pause_ns:
            self._write(now_ns)

    def close(self) -> None:
        """Write what is noted, and no more."""
        if self._file >= 0 and self._owner == os.getpid():
            self._write(time.time_ns())
            self._end()

    def _write(self, now_ns: int, waited_ns: int = 0) -> None:
        if self._file < 0 or self._owner != os.getpid() or not self._writing.acquire(blocking=False):
            return  # another thread is writing, or this one where it began to collect garbage
        try:
            before = time.perf_counter_ns()
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            self._append(with_waits(noted, waited_ns) if waited_ns else noted)
            after = time.perf_counter_ns()
            self._spent_ns += after - before
            rests_ns = self._began_ns + REST * (self._spent_ns - ALLOWANCE_NS) - after
            self._written_ns, self._pause_ns = now_ns, max(WRITTEN_WITHIN_NS, rests_ns)
        except OSError:
            self._end()
        finally:
            self._writing.release()

    def _append(self, records: Sequence[_Record]) -> None:
        packed = [RECORD.pack(number & 0xFFFFFFFF, *rest) for number, *rest in records]
        while packed:
            now, packed = packed[: CAPACITY - self._place], packed[CAPACITY - self._place :]
            os.pwrite(self._file, b"".join(now), HEADER.size + self._place * RECORD.size)
            self._place = (self._place + len(now)) % CAPACITY

    def _end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def with_waits(records: Sequence[_Record], waited_ns: int) -> list[_Record]:
    """Records with what each step waited for cores before it, of what all of them waited together.

    Steps are taken to be equally long without their waits, so that the longest ones waited.
    """
    lengths = sorted((record[3] for record in records if record[1] == STEP), reverse=True)
    together, usual = 0, 0
    for number, length in enumerate(lengths, 1):
        together += length
        usual = max((together - waited_ns) // number, 0)
        if number == len(lengths) or usual >= lengths[number]:
            break
    found: list[_Record] = []
    for record in records:
        number, kind, end_ns, length = record
        if kind == STEP and length > usual:
            found.append((number, CORE_WAIT, end_ns, length - usual))
        found.append(record)
    return found
