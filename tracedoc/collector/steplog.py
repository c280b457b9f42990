"""Write the step log of a rank: one small write for each optimizer step, whatever ends the process."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from tracedoc.run.steplog import CAPACITY, COLLECTION, CORE_WAIT, HEADER, MAGIC, RECORD, STEP, WINDOW

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

    def window(self, *, ends: bool) -> None:
        """Note that the captured window begins or ends."""
        self._append(WINDOW, int(ends), time.time_ns(), 0)

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
