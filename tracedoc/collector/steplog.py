"""Write the step log of a rank: one small write for each optimizer step, whatever ends the process."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from tracedoc.run.steplog import CAPACITY, COLLECTION, HEADER, MAGIC, RECORD, STEP

SLOW_WRITE_NS = 5_000_000
"""A disk on which writes take this long, three times, is not written to again."""


class StepLogWriter:
    """Appends records to a ring file. A write that fails or drags ends the log, never the job.

    Not a memory map: a full disk would then end the process with SIGBUS.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Create the file; raises :class:`OSError` where it cannot be."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self._places = itertools.count()
        self._steps = 0
        self._last_ns = 0
        self._slow_writes = 0
        self._owner = os.getpid()
        self._write(HEADER.pack(MAGIC, max(rank, 0), CAPACITY, time.time_ns()), 0)

    def step(self, end_ns: int) -> None:
        """Note the end of a step."""
        length = end_ns - self._last_ns if self._last_ns else 0
        self._last_ns = end_ns
        self._append(STEP, self._steps, end_ns, length)
        self._steps += 1

    def collection(self, generation: int, end_ns: int, length_ns: int) -> None:
        """Note a garbage collection that took long."""
        self._append(COLLECTION, generation, end_ns, length_ns)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, -1
        if file >= 0 and self._owner == os.getpid():
            os.close(file)

    def _append(self, kind: int, number: int, end_ns: int, length_ns: int) -> None:
        if self._file < 0 or self._owner != os.getpid():
            return
        place = next(self._places) % CAPACITY
        self._write(
            RECORD.pack(kind, number & 0xFFFFFFFF, end_ns, length_ns), HEADER.size + place * RECORD.size
        )

    def _write(self, data: bytes, offset: int) -> None:
        before = time.perf_counter_ns()
        try:
            os.pwrite(self._file, data, offset)
        except OSError:
            self.close()
            return
        if time.perf_counter_ns() - before > SLOW_WRITE_NS:
            self._slow_writes += 1
            if self._slow_writes == 3:
                self.close()
