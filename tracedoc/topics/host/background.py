"""Facts of the run about threads of the script that run Python beside the one that trains."""

from __future__ import annotations

from tracedoc.facts.catalog import manifest_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.timeline.script_code import CodePlace
from tracedoc.topics.host.rank import late_launch_idle_ms, unexplained_idle_ms
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value

BUSY_BESIDE = 0.1
"""Threads that run less only report or watch."""

NO_STACKS = Unknown("no step was recorded with Python stacks: capture with `tracedoc collect`")


@run_fact(unit="text")
def background_code(run: RunView) -> Value:
    """The function of the script that other threads run for longest beside the training thread, or "none".

    From the steps with Python stacks: while the training thread is in no operator, and no C code runs there.
    """
    place = _longest(run)
    return place if isinstance(place, Unknown) else str(place or "none")


@run_fact(unit="ms", needs=(late_launch_idle_ms, unexplained_idle_ms))
def background_code_ms(run: RunView) -> Value:
    """How long a step the training thread may wait for the interpreter that :func:`background_code` holds.

    As long as that runs while no operator does in a step with stacks, and at most as long as the device is
    idle for its host, on a CPU without an operator, in the analysed step of the rank where that is longest.
    """
    place = _longest(run)
    if isinstance(place, Unknown):
        return place
    quiet = [
        (unexplained_idle_ms if digest.is_cpu else late_launch_idle_ms).of(digest) for digest in run.digests
    ]
    known = [float(ms) for ms in quiet if isinstance(ms, float | int)]
    if not known:
        return Unknown("no rank's idle time is known")
    return min(place.time_ns / 1e6, max(known)) if place is not None else 0.0


@manifest_fact(unit="text")
def busy_threads(rank: RankJob) -> Value:
    """Python threads beside the training one that ran for a tenth of the captured steps or more, or "none".

    With the share of the time for which each had a core, by its name; the busiest three.
    """
    machine = rank.machine
    if machine.loader is None or not machine.loader.wall_us:
        return Unknown("the manifest has no times of threads")
    shares = {name: us / machine.loader.wall_us for name, us in machine.threads.items()}
    busy = sorted((name for name in shares if shares[name] >= BUSY_BESIDE), key=lambda name: -shares[name])
    return ", ".join(f"{name} ({format_percent(shares[name])})" for name in busy[:3]) or "none"


def _longest(run: RunView) -> CodePlace | Unknown | None:
    if not run.source_steps:
        return NO_STACKS
    places = [place for _, step in sorted(run.source_steps.items()) for place in step.background]
    return max(places, key=lambda one: one.time_ns, default=None)
