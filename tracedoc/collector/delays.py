"""Watch what holds the training thread up: no free core, the garbage collector, and what long steps do."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import CodeType, FrameType

from tracedoc.collector.probe import Plain

_SCHEDULE = Path("/proc/thread-self/schedstat")
"""What the Linux scheduler counts for the calling thread: ns that it ran, and ns ready without a core."""


class ThreadSchedule:
    """What the scheduler counts for the thread that steps.

    Every step of a job pays for it, so the file stays open: to open and close it takes three times as long as
    to read it. It is that of one thread; another thread that steps opens its own.
    """

    def __init__(self) -> None:
        self._thread, self._file = 0, -1

    def scheduled_ns(self) -> tuple[int, int] | None:
        """The ns that the calling thread has run and waited for a core; ``None`` if nobody counts them."""
        if threading.get_ident() != self._thread:
            self._open()
        if self._file < 0:
            return None
        try:
            ran, waited, _ = os.pread(self._file, 64, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            # The thread may be gone, and a new one have its number.
            self._thread = 0
            return None

    def close(self) -> None:
        """Read no more."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_ident()
        with contextlib.suppress(OSError):
            self._file = os.open(_SCHEDULE, os.O_RDONLY)


class CoreWait:
    """Adds up the scheduler's times over the steps of a window."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def step(self, times: tuple[int, int] | None) -> None:
        """Note times of :class:`ThreadSchedule` at the end of a step; the first begins what counts."""
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
        """Number and length of the collections so far, one entry for each generation."""
        return {
            "collections": list(self.collections),
            "total_ms": [ns / 1e6 for ns in self.total_ns],
            "longest_ms": [ns / 1e6 for ns in self.longest_ns],
            "enabled": gc.isenabled(),
            "threshold": list(gc.get_threshold()),
            "frozen": gc.get_freeze_count(),
        }


LONG = 1.5
LEAST_NS = 20_000_000
"""A step is sampled from when it takes 1.5 times the usual one, and so much longer than that."""

STEPS_FOR_USUAL = 4
"""Of so many steps the median is the usual one."""

KEPT_STACKS = 32
KEPT_FRAMES = 60
GROWS = 1.25
"""From one sample of a step to the next it takes this much longer, so that a long one has few."""

_OURS = os.path.dirname(__file__)

Stack = tuple[tuple[CodeType, int], ...]


class StackSamples:
    """The stacks of one thread in long steps, each with the time for which it stands."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lengths: deque[int] = deque(maxlen=9)
        self._began_ns, self._steps, self._slow = 0, 0, 0
        self._ended = threading.Event()
        self._stacks: Counter[Stack] = Counter()
        self._loop: Stack = ()

    def begin(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="tracedoc-samples", daemon=True).start()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def step(self) -> None:
        """Note that a step ended; the functions that now call the optimizer run in every step."""
        now = time.perf_counter_ns()
        if self._began_ns:
            self._lengths.append(now - self._began_ns)
        elif not self._loop:
            self._loop = _stack(sys._getframe(), ours=True)
        self._began_ns, self._steps = now, self._steps + 1

    def skip(self) -> None:
        """Leave the step that runs now out: the collector itself makes it long."""
        self._began_ns = 0

    def describe(self) -> Plain | None:
        """The stacks of ``long`` of ``steps``, most time first, and the functions around every step.

        ``None`` where no step was long.
        """
        stacks = self._stacks.copy().most_common(KEPT_STACKS)
        if not stacks:
            return None
        return {
            "steps": self._steps,
            "long": self._slow,
            "loop": _words(self._loop),
            "stacks": [{"ms": ns / 1e6, "frames": _words(stack)} for stack, ns in stacks],
        }

    def _watch(self) -> None:
        due_ns = LEAST_NS
        while not self._ended.wait(due_ns / 1e9):
            began, number, lengths = self._began_ns, self._steps, list(self._lengths)
            if not began or len(lengths) < STEPS_FOR_USUAL:
                due_ns = LEAST_NS
                continue
            usual = int(median(lengths))
            due_ns = began + max(int(LONG * usual), usual + LEAST_NS) - time.perf_counter_ns()
            if due_ns <= 0:
                self._sample(number, max(usual // 2, LEAST_NS // 4))
                due_ns = LEAST_NS

    def _sample(self, number: int, pause_ns: int) -> None:
        """Take samples until the step ends; each stands for the time since the one before."""
        last = time.perf_counter_ns() - pause_ns
        self._slow += 1
        while self._steps == number and self._began_ns and not self._ended.wait(pause_ns / 1e9):
            frame = sys._current_frames().get(self._thread)
            now = time.perf_counter_ns()
            stack = _stack(frame)
            del frame
            if stack and self._steps == number:
                self._stacks[stack] += now - last
            last, pause_ns = now, int(pause_ns * GROWS)
            if len(self._stacks) > 8 * KEPT_STACKS:
                self._stacks = Counter(dict(self._stacks.most_common(KEPT_STACKS)))


def _stack(frame: FrameType | None, *, ours: bool = False) -> Stack:
    """The frames from the innermost outwards without the collector's.

    Nothing where the collector itself is at work, unless ``ours`` is asked for; all optimizers run in its
    ``counted``.
    """
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < KEPT_FRAMES:
        if not frame.f_code.co_filename.startswith(_OURS):
            found.append((frame.f_code, frame.f_lineno))
        elif not ours and frame.f_code.co_name != "counted":
            return ()
        frame = frame.f_back
    return tuple(found)


def _words(stack: Stack) -> list[str]:
    """Frames as the profiler writes them, ``train.py(12): main``, with the line that runs behind them."""
    roots = sorted((root.rstrip("/") + "/" for root in sys.path if root), key=len, reverse=True)
    found = []
    for code, line in stack:
        file = code.co_filename
        root = next((root for root in roots if file.startswith(root)), "")
        found.append(f"{file[len(root) :]}({code.co_firstlineno}): {code.co_name}@{line}")
    return found
