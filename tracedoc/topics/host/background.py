"""Facts of the run about threads of the script that run Python beside the one that trains."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.timeline.script_code import CodePlace
from tracedoc.topics.host.rank import late_launch_idle_ms, unexplained_idle_ms
from tracedoc.values import Unknown, Value

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


def _longest(run: RunView) -> CodePlace | Unknown | None:
    if not run.source_steps:
        return NO_STACKS
    places = [place for _, step in sorted(run.source_steps.items()) for place in step.background]
    return max(places, key=lambda one: one.time_ns, default=None)
