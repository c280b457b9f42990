"""Sample what the worker processes of a data loader do, each in a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from tracedoc.collector.probe import Plain, probe
from tracedoc.collector.samples import KEPT_FRAMES, KEPT_STACKS, OWN_THREADS, Stack, StackTimes, in_words

FIRST_S = 0.02
PAUSE_GROWS = 1.01
"""From one sample to the next it takes this much longer: some hundred in an hour, and enough in a second."""

FIRST_WRITTEN = 8
"""After so many samples they are written, and whenever there are twice as many."""

UNBIASED_S = 0.01
SWITCH_S = 0.0001
"""Before a sample threads switch so much sooner, for a part of that time: the interpreter is else given away
only where Python code has run for 5 ms, or in calls that release it, which all samples would show."""

LONGEST_WRITE_S = 1.0
"""A worker that ends waits at most so long for what its sampler is just writing."""

DISK = "D"
"""The state of a thread that cannot be interrupted: it waits for a disk, or a file system on the network."""

_FETCH = "fetch"
"""The function that a worker's loop calls for a batch; in all others it waits, or hands the batch on."""


def watch_loop(module: Any) -> None:
    """Sample every worker that will begin; ``module`` is torch's with the loop of a worker."""
    loop = module._worker_loop

    @functools.wraps(loop)
    def sampled(*given: Any, **named: Any) -> None:
        samples = probe(WorkerSamples, loop.__code__)
        try:
            loop(*given, **named)
        finally:
            if samples is not None:
                probe(samples.end)

    module._worker_loop = sampled


class WorkerSamples:
    """The stacks of the calling thread while it makes batches; begins at once."""

    def __init__(self, loop: CodeType) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._state = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._stacks = StackTimes()
        self._seen_ns = self._made_ns = self._disk_ns = 0
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._watch, name=f"{OWN_THREADS}worker", daemon=True)
        self._sampler.start()

    def end(self) -> None:
        """Sample no more, and leave nothing."""
        self._ended.set()
        self._sampler.join(LONGEST_WRITE_S)  # or it would write after what is written was removed
        forget_workers([os.getpid()])

    def _watch(self) -> None:
        pause_s, taken, write_at = FIRST_S, 0, FIRST_WRITTEN
        last = time.perf_counter_ns()
        while not self._ended.wait(pause_s):
            state, stack = self._sample()
            now = time.perf_counter_ns()
            self._stacks.add(stack, now - last)
            self._seen_ns += now - last
            self._made_ns += (now - last) if stack else 0
            self._disk_ns += (now - last) if stack and state == DISK else 0
            last, pause_s, taken = now, pause_s * PAUSE_GROWS, taken + 1
            if taken == write_at:
                write_at *= 2
                probe(self._write)

    def _sample(self) -> tuple[str, Stack]:
        """The state of the thread, as Linux names it, and its work, at some time in the next 10 ms."""
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, usual))
        try:
            # When a thread gave the interpreter away is not by chance; so much later is.
            time.sleep(UNBIASED_S * (time.perf_counter_ns() % 1009) / 1009)
            state = probe(state_of, self._state) or ""
            return state, work_of(sys._current_frames().get(self._thread), self._loop)
        finally:
            sys.setswitchinterval(usual)

    def _write(self) -> None:
        found = {
            "stacks": in_words(self._stacks.most()),
            "seen_ms": self._seen_ns / 1e6,
            "made_ms": self._made_ns / 1e6,
            "disk_ms": self._disk_ns / 1e6,
        }
        path, words = _path(os.getpid()), json.dumps(found)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(f"{path}.new", flags, 0o600), "w", encoding="utf-8") as file:
            file.write(words)
        os.replace(f"{path}.new", path)


def work_of(frame: FrameType | None, loop: CodeType) -> Stack:
    """The frames of a worker that makes a batch, from the innermost outwards to its loop; else none."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code is not loop:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    makes = frame is not None and bool(found) and found[-1][0].co_name == _FETCH
    return tuple(found[:KEPT_FRAMES]) if makes else ()


def state_of(path: str) -> str:
    """The letter of a thread's state, by its ``stat`` under ``/proc``."""
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]


def read_workers(pids: Iterable[int]) -> Plain:
    """What workers of this host did so far: their ``stacks``, those with most ms together first.

    In ``made_ms`` they made batches, and in ``disk_ms`` of these they waited for a disk, or a file system on
    the network; ``made_frac`` is the share of its time for which the busiest one made some.
    """
    stacks: dict[tuple[str, ...], float] = defaultdict(float)
    made_ms = disk_ms = 0.0
    made_frac: float | None = None
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(_path(pid), encoding="utf-8") as file:
                found = json.load(file)
            of_one_ms = float(found["made_ms"])
            made_ms, disk_ms = made_ms + of_one_ms, disk_ms + float(found["disk_ms"])
            made_frac = max(made_frac or 0.0, of_one_ms / float(found["seen_ms"]))
            for one in found["stacks"]:
                stacks[tuple(one["frames"])] += float(one["ms"])
    most = sorted(stacks, key=lambda frames: -stacks[frames])[:KEPT_STACKS]
    return {
        "stacks": [{"ms": stacks[frames], "frames": list(frames)} for frames in most],
        "made_ms": made_ms,
        "disk_ms": disk_ms,
        "made_frac": made_frac,
    }


def forget_workers(pids: Iterable[int]) -> None:
    """Remove what workers have written."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.unlink(_path(pid))


def _path(pid: int) -> str:
    return os.path.join(tempfile.gettempdir(), f".tracedoc-worker.{os.getuid()}.{pid}")
