"""What the hook asks at six points of a rank's life, and keeps in the rank's part of the manifest.

Every function may fail: the hook guards each call, notes the failure in the rank's part and goes on. What
they return is merged key by key into ``rank-<r>.manifest.json``, so values must be JSON and keys unlike those
of :mod:`tracedoc.run.manifest`. They run in the user's process, on the thread that steps the optimizer:
standard library only, torch as ``sys.modules["torch"]``, no collective operation, and nothing between
windows that costs more than a few microseconds a step.
"""

from __future__ import annotations

from collections.abc import Mapping

Facts = dict[str, object]


def on_start(config: Mapping[str, object]) -> Facts:
    """Return what is known when a process turns out to be a rank: at its first optimizer step.

    ``config`` holds the fields of :class:`tracedoc.collector.options.Options`, and of this rank ``rank``,
    ``local_rank``, ``world_size``, ``restart``, ``folder`` (the run directory) and ``stem`` (the name that
    its files begin with, as ``rank-3``).
    """
    return {}


def on_first_step(live: object) -> Facts:
    """Return what the live objects tell, right after the first step; ``live`` is what steps.

    That is a ``torch.optim.Optimizer`` or a ``DeepSpeedEngine``. Modules and loaders are found with ``gc``.
    """
    return {}


def on_window_start() -> Facts:
    """Begin what is watched during the captured steps; called just before the profiler starts."""
    return {}


def on_window_end() -> Facts:
    """Return what was seen during the captured steps; called just after the profiler stopped.

    It may run on another thread than the one that trains, after a signal or in a job that hangs.
    """
    return {}


def on_step(end_ns: int) -> None:
    """Note the end of an optimizer step, in nanoseconds of ``time.time_ns``; called after every one."""


def on_exit() -> Facts:
    """Return what is known when the process ends in order; not called on a signal or a crash."""
    return {}
