"""What the hook reads at six points of a rank's run, and keeps in the rank's part of the manifest.

Every function may fail: the hook guards each call, notes the failure in the rank's part and goes on. What
they return is merged key by key into ``rank-<r>.manifest.json``, so values must be JSON and keys unlike those
of :mod:`tracedoc.run.manifest`. They run in the user's process, on the thread that steps the optimizer:
standard library only, torch as ``sys.modules["torch"]``, no collective operation, and nothing between
windows that costs more than a few microseconds a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracedoc.collector.devices import (
    COMMANDS,
    DeviceSampler,
    HostCommands,
    describe_device,
    describe_pcie,
    open_device,
)
from tracedoc.collector.environment import (
    Counters,
    describe_environment,
    describe_memory,
    difference,
    link_rates,
    read_counters,
)
from tracedoc.collector.frameworks import describe, describe_compile, find_live
from tracedoc.collector.live import remove_dumps, write_dumps
from tracedoc.collector.loading import LoaderWatch
from tracedoc.collector.nccl import read_nccl_log
from tracedoc.collector.probe import Plain, known, probe
from tracedoc.collector.samples import StackSamples, StackTimes, ThreadTimes, in_words, stack_of
from tracedoc.collector.steps import StepLogWriter
from tracedoc.run.steplog import BEGINS, ENDS, WRITTEN

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
        self._stacks = StackTimes()

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
            self._stacks.add(stack_of(sys._getframe(1)), length)

    def describe(self) -> Plain:
        """Number and length of the collections so far, one entry for each generation.

        Of long ones also where the thread was, and for how long in functions that call ``gc.collect``.
        """
        stacks = self._stacks.most()
        return {
            "stacks": in_words(stacks),
            "asked_ms": sum(ns for stack, ns in stacks if "collect" in stack[0][0].co_names) / 1e6,
            "collections": list(self.collections),
            "total_ms": [ns / 1e6 for ns in self.total_ns],
            "longest_ms": [ns / 1e6 for ns in self.longest_ns],
            "enabled": gc.isenabled(),
            "threshold": list(gc.get_threshold()),
            "frozen": gc.get_freeze_count(),
        }


Facts = dict[str, object]


def _ignore(*record: int) -> None:
    """Take the place of a log that could not be opened."""


class Evidence:
    """What one rank reads at the points of its run, and keeps between them.

    ``config`` holds the fields of :class:`tracedoc.collector.options.Options`, and of this rank ``rank``,
    ``local_rank``, ``world_size``, ``restart``, ``folder`` (the run directory) and ``stem`` (the name that
    its files begin with, as ``rank-3``).
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self.folder = Path(str(config.get("folder", ".")))
        self.stem = str(config.get("stem", "rank-0"))
        self.thread = threading.get_ident()
        self.schedule = ThreadSchedule()
        self.log: StepLogWriter | None = probe(
            StepLogWriter, self.folder / f"{self.stem}.steps", config.get("rank", 0), self._waited_ns
        )
        self.collections = CollectionWatch(self.log.collection if self.log else _ignore)
        # One rank of each host asks for all.
        self.host = HostCommands(COMMANDS if config.get("local_rank", 0) == 0 else {})
        self.loader = LoaderWatch()
        self.device: tuple[Any, Any] | None = None
        self.sampler: DeviceSampler | None = None
        self.counters: Counters = {}
        self.memory: Facts = {}
        self.armed = False
        self.core_wait: CoreWait | None = None
        log = (self.log.write, self.log.stop) if self.log else (_ignore, _ignore)
        self.samples = StackSamples(self._stuck, *log)
        self.threads = ThreadTimes()

    def step(self, now_ns: int) -> None:
        """Note the end of a step, in nanoseconds of ``time.perf_counter_ns``."""
        self.samples.step(now_ns)
        if self.log is not None:
            self.log.step(time.time_ns())
        if self.armed:
            self._captured_step()

    def _captured_step(self) -> None:
        if self.core_wait is not None:
            self.core_wait.step(self.schedule.scheduled_ns())
        else:
            # Called right after the window began: the profiler is being made ready until the next step ends.
            self.core_wait = CoreWait()

    def _waited_ns(self) -> int | None:
        times = self.schedule.scheduled_ns()
        return times[1] if times is not None else None

    def _stuck(self, stack: list[str] | None) -> None:
        if stack is None:
            remove_dumps(self.folder, self.stem)
        else:
            write_dumps(self.folder, self.stem, stack)

    def on_start(self) -> Facts:
        """What is known when a process turns out to be a rank: at its first optimizer step."""
        self.collections.begin()
        self.samples.begin()
        self.host.begin()
        return known(
            environment=describe_environment(),
            infiniband=probe(link_rates),
            step_log=f"{self.stem}.steps" if self.log is not None else None,
        )

    def on_first_step(self, live: object) -> Facts:
        """What the live objects show, right after the first step; ``live`` is an optimizer or an engine.

        Modules and loaders are found with ``gc``.
        """
        # Of a loader that works in another way nothing is known; the rest is.
        probe(self.loader.begin)
        self.device = probe(open_device)
        return known(
            framework=describe(find_live()),
            device=probe(describe_device, *self.device) if self.device else None,
        )

    def on_window_start(self) -> Facts:
        """Begin what is watched during the captured steps; called just before the profiler starts."""
        if self.log is not None:
            self.log.window(BEGINS)
        self.samples.skip(captured=True)
        self.memory = describe_memory()
        self.counters = read_counters()
        self.loader.open()
        self.threads.open()
        self.armed, self.core_wait = True, None
        if self.device is not None:
            self.sampler = DeviceSampler(*self.device)
            self.sampler.begin()
        return {}

    def on_window_end(self) -> Facts:
        """What was seen during the captured steps; called just after the profiler stopped.

        It may run on another thread than the one that trains, after a signal or in a job that hangs.
        """
        window = known(
            counters=difference(self.counters, read_counters()),
            clocks=probe(self.sampler.end) if self.sampler is not None else None,
            training_thread=self.core_wait.describe() if self.core_wait is not None else None,
            memory_before=self.memory,
            loader=probe(self.loader.close),
            threads=probe(self.threads.close),
            pcie=probe(describe_pcie, *self.device) if self.device else None,
        )
        self.armed, self.core_wait = False, None
        if self.log is not None:
            self.log.window(ENDS)
        self.samples.skip()
        return {"window": window, **self._so_far()}

    def on_source_step(self, ends: bool) -> Facts:
        """Note that the step with Python stacks begins or ends: its length is not that of the job's steps."""
        self.samples.skip()
        if self.log is not None:
            self.log.window(ENDS if ends else BEGINS)
        return {}

    def on_written(self) -> Facts:
        """Note that what was recorded is in its file: from the next step on nothing runs beside the job."""
        if self.log is not None:
            self.log.window(WRITTEN)
        return {}

    def on_exit(self) -> Facts:
        """What is known when the process ends in order; not called on a signal or a crash."""
        self.collections.end()
        self.samples.end()
        self.loader.end()
        self.schedule.close()
        if self.log is not None:
            self.log.close()
        return self._so_far()

    def _so_far(self) -> Facts:
        # Another thread than the training's runs this only where the job hangs or ends: CUDA may not answer.
        training = threading.get_ident() == self.thread
        return known(
            memory=describe_memory() if training else None,
            compile=probe(describe_compile, {}),
            collections=self.collections.describe(),
            samples=self.samples.describe(),
            interpreter=self.samples.waits.describe(),
            batch=self.loader.tensors,
            loader=self.loader.so_far(),
            nccl=probe(read_nccl_log, os.environ, os.getpid()),
            host_tools=self.host.answers(),
        )
