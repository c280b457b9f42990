"""The step log of one rank: every optimizer step, every long pause of Python and waits for cores, as records.

A process that is killed leaves all but those of its last 10 ms. The file is a ring, so that a long training
keeps its newest records. Standard library only.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from tracedoc.run.untrusted import read_bounded

MAGIC = b"TDSTEPS1"
HEADER = struct.Struct("<8sIIq")
"""Magic, rank, records in a full ring, and the nanoseconds since 1970 when the log began."""

RECORD = struct.Struct("<IIqq")
"""Number, kind, end in nanoseconds since 1970, length in nanoseconds."""

STEP = 1
"""Kind of a step: its number counts from 0 over all steps of the job; its length is that since the end of the
step before, 0 for the first that was logged."""

COLLECTION = 2
"""Kind of a pause: Python collected garbage; the number is the generation."""

WINDOW = 3
"""Kind of what a capture does, by its number; its length is 0."""

BEGINS, ENDS, WRITTEN = range(3)
"""Recording begins, ends, and the file of what was recorded is complete."""

CORE_WAIT = 4
"""How long the training thread was ready to run in a step and had no core; the number is that of the step.

Of steps that are written together it is known for all of them: the longest ones have it."""

STOPPED = 5
"""The process stood still for so long at least, as by SIGSTOP or in a suspended machine; it has no number."""

WRITTEN_WITHIN_NS = 10_000_000
"""So long after it was written a log is written again: a step of at least that at once, others together."""

CAPACITY = 65_536
"""A log never grows beyond this many records: 1.5 MiB, half of them steps where the kernel counts waits."""

MAX_STEP_LOG_BYTES = HEADER.size + CAPACITY * RECORD.size
MAX_RANK = 10**6
MAX_END_NS = 2**62
"""The year 2116."""
MAX_LENGTH_NS = 24 * 3600 * 10**9
"""No step or pause takes longer than a day; what sums up a full log of such stays within 64 bits."""


@dataclass(frozen=True, slots=True)
class StepLog:
    """What a rank logged. ``rank`` is the one that the process had when it began.

    ``words`` holds three numbers for each record, in the order of the file, which is a ring: kind and number
    (``kind << 32 | number``), end, length.
    """

    rank: int
    began_ns: int
    words: array[int]

    def of_kind(self, kind: int) -> list[tuple[int, int, int]]:
        """Return number, end and length of the records of one kind, in order of their ends."""
        records = zip(self.words[0::3], self.words[1::3], self.words[2::3], strict=True)
        found = [(word & 0xFFFFFFFF, end, length) for word, end, length in records if word >> 32 == kind]
        return sorted(found, key=lambda record: record[1])


def read_step_log(path: Path) -> StepLog | None:
    """Return the log in a file, ``None`` where the file is not one.

    Raises :class:`UnusableError` for a file that cannot be read, and for one larger than a log can be.
    """
    return parse_step_log(read_bounded(path, MAX_STEP_LOG_BYTES))


def parse_step_log(content: bytes) -> StepLog | None:
    """Return the log in the bytes of a file, ``None`` where they are not one.

    A record cut off by the end of the file is left out, and so is one with times that cannot be.
    """
    if len(content) < HEADER.size:
        return None
    magic, rank, _, began_ns = HEADER.unpack_from(content)
    if magic != MAGIC or rank > MAX_RANK:
        return None
    whole = (len(content) - HEADER.size) // RECORD.size * RECORD.size
    words = array("q", content[HEADER.size : HEADER.size + whole])
    if sys.byteorder == "big":
        words.byteswap()
    records = zip(words[0::3], words[1::3], words[2::3], strict=True)
    if all(_is_possible(end, length) for _, end, length in records):
        return StepLog(rank, began_ns, words)
    kept = array("q")
    for place in range(0, len(words), 3):
        if _is_possible(words[place + 1], words[place + 2]):
            kept.extend(words[place : place + 3])
    return StepLog(rank, began_ns, kept)


def _is_possible(end_ns: int, length_ns: int) -> bool:
    return 0 <= length_ns <= min(end_ns, MAX_LENGTH_NS) and end_ns < MAX_END_NS
