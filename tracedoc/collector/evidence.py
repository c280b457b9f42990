"""What the hook reads at six points of a rank's run, and keeps in the rank's part of the manifest.

Every function may fail: the hook guards each call, notes the failure in the rank's part and goes on. What
they return is merged key by key into ``rank-<r>.manifest.json``, so values must be JSON and keys unlike those
of :mod:`tracedoc.run.manifest`. They run in the user's process, on the thread that steps the optimizer:
standard library only, torch as ``sys.modules["torch"]``, no collective operation, and nothing between
windows that costs more than a few microseconds a step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracedoc.collector.delays import CollectionWatch, CoreWait, StackSamples, ThreadSchedule
from tracedoc.collector.devices import (
    COMMANDS,
    DeviceSampler,
    HostCommands,
    describe_device,
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
from tracedoc.collector.loaders import BatchWatch
from tracedoc.collector.nccl import read_nccl_log
from tracedoc.collector.probe import known, probe
from tracedoc.collector.steps import StepLogWriter

Facts = dict[str, object]


class _Watch:
    """What one rank keeps between the calls of the hook."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.folder = Path(str(config.get("folder", ".")))
        self.stem = str(config.get("stem", "rank-0"))
        self.thread = threading.get_ident()
        self.log: StepLogWriter | None = probe(
            StepLogWriter, self.folder / f"{self.stem}.steps", config.get("rank", 0)
        )
        self.collections = CollectionWatch(self.log.collection if self.log else _ignore)
        # One rank of each host asks for all.
        self.host = HostCommands(COMMANDS if config.get("local_rank", 0) == 0 else {})
        self.batches = BatchWatch()
        self.device: tuple[Any, Any] | None = None
        self.sampler: DeviceSampler | None = None
        self.counters: Counters = {}
        self.memory: Facts = {}
        self.armed = False
        self.core_wait: CoreWait | None = None
        self.schedule = ThreadSchedule()
        self.samples = StackSamples()


def _ignore(generation: int, end_ns: int, length_ns: int) -> None:
    """Take the place of a log that could not be opened."""


_watches: dict[int, _Watch] = {}
"""The watch of this process, by its id: a fork has none."""


def _watch() -> _Watch | None:
    return _watches.get(os.getpid())


def on_start(config: Mapping[str, object]) -> Facts:
    """What is known when a process turns out to be a rank: at its first optimizer step.

    ``config`` holds the fields of :class:`tracedoc.collector.options.Options`, and of this rank ``rank``,
    ``local_rank``, ``world_size``, ``restart``, ``folder`` (the run directory) and ``stem`` (the name that
    its files begin with, as ``rank-3``).
    """
    watch = _Watch(config)
    _watches[os.getpid()] = watch
    watch.collections.begin()
    watch.samples.begin()
    watch.host.begin()
    return known(
        environment=describe_environment(),
        infiniband=probe(link_rates),
        step_log=f"{watch.stem}.steps" if watch.log is not None else None,
    )


def on_first_step(live: object) -> Facts:
    """What the live objects show, right after the first step; ``live`` is what steps.

    That is a ``torch.optim.Optimizer`` or a ``DeepSpeedEngine``. Modules and loaders are found with ``gc``.
    """
    watch = _watch()
    if watch is None:
        return {}
    watch.batches.begin()
    watch.device = probe(open_device)
    return known(
        framework=describe(find_live()),
        device=probe(describe_device, *watch.device) if watch.device else None,
    )


def on_window_start() -> Facts:
    """Begin what is watched during the captured steps; called just before the profiler starts."""
    watch = _watch()
    if watch is None:
        return {}
    if watch.log is not None:
        watch.log.window(ends=False)
    watch.samples.skip()
    watch.memory = describe_memory()
    watch.counters = read_counters()
    watch.armed, watch.core_wait = True, None
    if watch.device is not None:
        watch.sampler = DeviceSampler(*watch.device)
        watch.sampler.begin()
    return {}


def on_window_end() -> Facts:
    """What was seen during the captured steps; called just after the profiler stopped.

    It may run on another thread than the one that trains, after a signal or in a job that hangs.
    """
    watch = _watch()
    if watch is None:
        return {}
    window = known(
        counters=difference(watch.counters, read_counters()),
        clocks=probe(watch.sampler.end) if watch.sampler is not None else None,
        training_thread=watch.core_wait.describe() if watch.core_wait is not None else None,
        memory_before=watch.memory,
    )
    watch.armed, watch.core_wait = False, None
    if watch.log is not None:
        watch.log.window(ends=True)
    watch.samples.skip()
    return {"window": window, **_so_far(watch)}


def on_source_step(*, ends: bool) -> Facts:
    """Note that the step with Python stacks begins or ends: its length is not that of the job's steps."""
    watch = _watch()
    if watch is not None:
        watch.samples.skip()
        if watch.log is not None:
            watch.log.window(ends=ends)
    return {}


def on_step(end_ns: int) -> None:
    """Note the end of an optimizer step, in nanoseconds of ``time.time_ns``; called after every one."""
    watch = _watch()
    if watch is None:
        return
    times = watch.schedule.scheduled_ns()
    watch.samples.step()
    if watch.log is not None:
        watch.log.step(end_ns, times[1] if times is not None else None)
    if watch.core_wait is not None:
        watch.core_wait.step(times)
    elif watch.armed:
        # Called right after the window began: the profiler is being made ready until the next step ends.
        watch.core_wait = CoreWait()


def on_exit() -> Facts:
    """What is known when the process ends in order; not called on a signal or a crash."""
    watch = _watch()
    if watch is None:
        return {}
    watch.collections.end()
    watch.samples.end()
    watch.schedule.close()
    if watch.log is not None:
        watch.log.close()
    return _so_far(watch)


def _so_far(watch: _Watch) -> Facts:
    # Another thread than the training's runs this only where the job hangs or ends: CUDA may not answer.
    training = threading.get_ident() == watch.thread
    return known(
        memory=describe_memory() if training else None,
        compile=probe(describe_compile, {}),
        collections=watch.collections.describe(),
        samples=watch.samples.describe(),
        batch=watch.batches.tensors,
        nccl=probe(read_nccl_log, os.environ, os.getpid()),
        host_tools=watch.host.answers(),
    )
