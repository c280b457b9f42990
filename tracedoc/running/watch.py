"""Follow the step logs of a job: the usual step, slow ones, drift against the first hour, and single ranks.

A log is read from where the last look ended. Steps in which the collector records do not count.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tracedoc.run.manifest import replace_file
from tracedoc.run.steplog import (
    BEGINS,
    CAPACITY,
    COLLECTION,
    CORE_WAIT,
    HEADER,
    MAX_STEP_LOG_BYTES,
    RECORD,
    STEP,
    WINDOW,
    parse_step_log,
)
from tracedoc.run.untrusted import UnusableError, read_bounded
from tracedoc.units import format_count, format_ms, format_percent

RECENT = 16
"""Drift is told from the median of so many steps: once nine of them are slower, and not for less."""

FIRST_STEPS = 10
"""The first steps compile, allocate and fill caches: they are no measure."""

LEAST_BASE = 2 * RECENT
BASE_NS = 3_600_000_000_000
DRIFT = 0.05
"""Less above the first hour's median is noise."""

BEYOND = 1.25
"""Drift is so many times further above that median than any 16 steps of the first hour were."""

SLOW = 1.5
"""A slow step takes 1.5 times the median of those before it."""
SHARE = 0.05
"""Pauses and waits for cores are told from 5 % of a step on."""

_HELD = 2 * RECENT
_LAP_NS = 60_000_000_000
_READ_AT_ONCE = 1024
"""Records: a look at a full ring reads what is new, and little of what is old."""

Record = tuple[int, int, int, int]
"""Kind, number, end and length."""


class LogTail:
    """Reads what was added to a step log since the last look; the first look reads all of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place, self._last_ns = 0, 0
        self.began_ns = 0

    def read(self) -> list[Record]:
        """The new records, in order; none where the file cannot be read now."""
        try:
            return self._more() if self.began_ns else self._all()
        except (OSError, UnusableError):
            return []

    def _all(self) -> list[Record]:
        log = parse_step_log(read_bounded(self._path, MAX_STEP_LOG_BYTES))
        if log is None:
            return []
        self.began_ns = log.began_ns
        records = [
            (word >> 32, word & 0xFFFFFFFF, end, length)
            for word, end, length in zip(log.words[0::3], log.words[1::3], log.words[2::3], strict=True)
        ]
        newest = max(range(len(records)), key=lambda place: (records[place][2], place), default=-1)
        self._place = (newest + 1) % CAPACITY
        ordered = records[newest + 1 :] + records[: newest + 1]
        self._last_ns = ordered[-1][2] if ordered else 0
        return ordered

    def _more(self) -> list[Record]:
        found: list[Record] = []
        with self._path.open("rb") as file:
            while True:
                file.seek(HEADER.size + self._place * RECORD.size)
                data = file.read(min(CAPACITY - self._place, _READ_AT_ONCE) * RECORD.size)
                whole = len(data) // RECORD.size
                before = len(found)
                for number, kind, end, length in RECORD.iter_unpack(data[: whole * RECORD.size]):
                    # What comes next in the ring is a lap older; clocks are set back by less.
                    if end < self._last_ns - _LAP_NS or not end:
                        break
                    found.append((kind, number, end, length))
                    self._last_ns = max(self._last_ns, end)
                new = len(found) - before
                self._place = (self._place + new) % CAPACITY
                if not new or (self._place and new < _READ_AT_ONCE):
                    return found


@dataclass(slots=True)
class RankSteps:
    """The steps of one rank: lengths in ns of the last ones, of the first hour, and of slow ones."""

    began_ns: int = 0
    number: int = -1
    end_ns: int = 0
    count: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    pauses: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    waits: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    slow: int = 0
    last_slow: tuple[int, int] | None = None
    base_steps: tuple[int, int] = (0, 0)
    now_ns: float = 0.0
    """The median of the last steps; 0 before there are any."""
    drift: float = 0.0
    """How much longer the last steps are than the usual one, as a share of it; 0 for less than noise."""
    _base: list[int] = field(default_factory=list)
    _last_of_base: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    _slowest_of_base: float = 0.0
    _held: deque[tuple[int, int, int]] = field(default_factory=deque)
    _in_window: bool = False
    _skip: bool = False
    _pause: int = 0
    _wait: int = 0

    def add(self, records: Sequence[Record]) -> None:
        """Take new records."""
        for kind, number, end, length in records:
            if kind == WINDOW:
                self._in_window = number == BEGINS
                self._skip = True
            elif kind == COLLECTION:
                self._pause += length
            elif kind == CORE_WAIT:
                self._wait = length
            elif kind == STEP:
                self._step(number, end, length)

    def _step(self, number: int, end: int, length: int) -> None:
        self.number, self.end_ns, self.count = number, end, self.count + 1
        pause, wait, self._pause, self._wait = self._pause, self._wait, 0, 0
        if self._in_window or self._skip or not length:
            self._skip = False
            return
        if len(self.recent) == RECENT and length > SLOW * self.now_ns:
            self.slow += 1
            self.last_slow = (number, length)
        self.recent.append(length)
        self.pauses.append(pause)
        self.waits.append(wait)
        self.now_ns = median(self.recent)
        above, usual = self.now_ns - self.usual_ns, self.usual_ns
        least = max(DRIFT * usual, BEYOND * (self._slowest_of_base - usual))
        self.drift = above / usual if self.has_usual and len(self.recent) == RECENT and above > least else 0.0
        self._held.append((number, end, length))
        if len(self._held) > _HELD:
            first, then, one = self._held.popleft()
            if first > FIRST_STEPS and then < self.began_ns + BASE_NS and not self.drift:
                self._admit(first, one)

    def _admit(self, number: int, length: int) -> None:
        self.base_steps = (self.base_steps[0] if self._base else number, number)
        insort(self._base, length)
        self._last_of_base.append(length)
        if len(self._last_of_base) == RECENT:
            self._slowest_of_base = max(self._slowest_of_base, median(self._last_of_base))

    @property
    def has_usual(self) -> bool:
        """Whether there are steps enough to say what is usual."""
        return len(self._base) >= LEAST_BASE

    @property
    def usual_ns(self) -> float:
        """The median step of the first hour; 0 before there is one."""
        half = len(self._base) // 2
        return (self._base[~half] + self._base[half]) / 2 if self._base else 0.0

    @property
    def since_ns(self) -> int:
        """When the first of the last steps began that is as long as they are, by the clock of its host."""
        return self.end_ns - sum(list(self.recent)[self._before_drift :])

    @property
    def _before_drift(self) -> int:
        """How many of the last steps come before one that is nearer to their median than to the usual."""
        between = (self.usual_ns + self.now_ns) / 2
        return next((place for place, length in enumerate(self.recent) if length > between), 0)

    @property
    def drift_step(self) -> int:
        """The first of the last steps that is as long as they are."""
        return self.number - len(self.recent) + 1 + self._before_drift

    @property
    def share_of_pauses(self) -> float:
        """The share of garbage collections in the last steps."""
        return sum(self.pauses) / max(sum(self.recent), 1)

    @property
    def share_of_waits(self) -> float:
        """The share of waiting for a core in the last steps."""
        return sum(self.waits) / max(sum(self.recent), 1)


class JobWatch:
    """All ranks of a job, by the logs that their parts of the manifest name."""

    def __init__(self, logs: Mapping[int, Path]) -> None:
        self._tails = {rank: LogTail(path) for rank, path in logs.items()}
        self.ranks = {rank: RankSteps() for rank in logs}

    def look(self) -> None:
        """Read what is new."""
        for rank, tail in self._tails.items():
            records = tail.read()
            self.ranks[rank].began_ns = tail.began_ns
            self.ranks[rank].add(records)

    @property
    def slowest(self) -> RankSteps:
        """The rank whose last steps are longest against its first hour; all ranks of a job step together."""
        return max(self.ranks.values(), key=lambda one: (one.drift, one.now_ns))

    @property
    def words(self) -> str:
        """How the job goes, as one line."""
        one = self.slowest
        if not one.recent:
            return f"step {one.number}: none timed yet" if one.number >= 0 else "no step yet"
        text = f"step {one.number}: {format_ms(one.now_ns / 1e6)} (median of {len(one.recent)})"
        if one.has_usual:
            text += f", usual {format_ms(one.usual_ns / 1e6)} (steps {one.base_steps[0]}-{one.base_steps[1]})"
        if one.slow and one.last_slow is not None:
            number, length = one.last_slow
            are = "slow step" if one.slow == 1 else "slow steps"
            text += f"; {format_count(one.slow)} {are}, the last {number} with {format_ms(length / 1e6)}"
        return text

    @property
    def drift_words(self) -> str:
        """The drift as one line, "" where there is none."""
        one = self.slowest
        if not one.drift:
            return ""
        text = (
            f"slower since about step {one.drift_step}: {format_ms(one.now_ns / 1e6)} a step "
            f"instead of {format_ms(one.usual_ns / 1e6)}, {format_percent(one.drift)} more"
        )
        return "; ".join([text, *self.by_rank])

    @property
    def by_rank(self) -> list[str]:
        """What logs show of single ranks: pauses of Python, and waits for cores."""
        found = []
        for name, share in (("collects garbage", "share_of_pauses"), ("waits for a core", "share_of_waits")):
            shares = {rank: getattr(one, share) for rank, one in self.ranks.items()}
            rank = max(shares, key=lambda one: shares[one])
            if shares[rank] >= SHARE:
                found.append(f"rank {rank} {name} for {format_percent(shares[rank])} of its last steps")
        return found


_METRICS: tuple[tuple[str, str, str, Callable[[RankSteps], float]], ...] = (
    ("step_seconds", "gauge", "Median of the last steps.", lambda one: one.now_ns / 1e9),
    ("usual_step_seconds", "gauge", "Median step of the first hour.", lambda one: one.usual_ns / 1e9),
    ("drift_ratio", "gauge", "How much longer the last steps are than usual.", lambda one: one.drift),
    ("steps_total", "counter", "Steps that have ended.", lambda one: one.number + 1),
    (
        "slow_steps_total",
        "counter",
        "Steps of 1.5 times the median of those before and more.",
        lambda one: one.slow,
    ),
    ("last_step_timestamp_seconds", "gauge", "When the last step ended.", lambda one: one.end_ns / 1e9),
)


def write_metrics(job: JobWatch, run: str, path: Path) -> None:
    """Write what is known as a textfile of node-exporter, so that a reader sees the old one or the new one.

    Raises ``OSError`` where it cannot be written.
    """
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, kind, words, value in _METRICS:
        lines += [f"# HELP tracedoc_{name} {words}", f"# TYPE tracedoc_{name} {kind}"]
        for rank, one in job.ranks.items():
            lines.append(f'tracedoc_{name}{{run="{label}",rank="{rank}"}} {value(one):.14g}')
    replace_file(path, ("\n".join(lines) + "\n").encode())
