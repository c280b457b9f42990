"""The step log of one rank: the end of every optimizer step and every long pause of Python, as records.

The hook writes a record at a time, without buffering: a process that is killed leaves all but the last. The
file is a ring, so that a long training keeps its newest records. Standard library only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"TDSTEPS1"
HEADER = struct.Struct("<8sIIq")
"""Magic, rank, records in a full ring, and the nanoseconds since 1970 when the log began."""

RECORD = struct.Struct("<IIqq")
"""Kind, number, end in nanoseconds since 1970, length in nanoseconds."""

STEP = 1
"""Kind of a step: its number counts from 0; its length is that since the step before, 0 for the first."""

COLLECTION = 2
"""Kind of a pause: Python collected garbage; the number is the generation."""

CAPACITY = 65_536
"""A log never grows beyond this many records: 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One optimizer step: its number from 0, its end since 1970, and the time since the step before."""

    index: int
    end_ns: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A garbage collection that took long, by generation."""

    generation: int
    end_ns: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class StepLog:
    """What a rank logged, in order of time. ``rank`` is the one that the process had when it began."""

    rank: int
    began_ns: int
    steps: tuple[LoggedStep, ...]
    pauses: tuple[Pause, ...]


def read_step_log(path: Path) -> StepLog | None:
    """Return the log in a file, ``None`` where there is none or the file is not one.

    A record cut off by the end of the file is left out.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return parse_step_log(content)


def parse_step_log(content: bytes) -> StepLog | None:
    """Return the log in the bytes of a file, ``None`` where they are not one."""
    if len(content) < HEADER.size:
        return None
    magic, rank, _, began_ns = HEADER.unpack_from(content)
    if magic != MAGIC:
        return None
    whole = (len(content) - HEADER.size) // RECORD.size * RECORD.size
    steps, pauses = [], []
    for kind, number, end_ns, length_ns in RECORD.iter_unpack(content[HEADER.size : HEADER.size + whole]):
        if kind == STEP:
            steps.append(LoggedStep(number, end_ns, length_ns))
        elif kind == COLLECTION:
            pauses.append(Pause(number, end_ns, length_ns))
    steps.sort(key=lambda step: step.index)
    pauses.sort(key=lambda pause: pause.end_ns)
    return StepLog(rank, began_ns, tuple(steps), tuple(pauses))
