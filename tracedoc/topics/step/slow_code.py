"""Facts of the run about what the script does in steps far longer than usual, and in collections."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView, once
from tracedoc.run.job import RankJob
from tracedoc.timeline.script_code import CodePlace, place_of_stack
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value

NAMED_SHARE = 0.5
"""A function is named that takes this share of a rank's long steps."""

NO_SAMPLES = Unknown("no step was far longer than usual where stacks are sampled (`tracedoc collect`)")

NO_FUNCTION = Unknown("no function of long steps is known")


SAVING, LOADING, BESIDE, OTHER = "saving", "loading", "a thread beside", "other"
DOINGS = (SAVING, LOADING, BESIDE, OTHER)


class SlowCode(msgspec.Struct, frozen=True):
    """The function in which long steps spend half of their time or more, and the ranks where they do.

    Of ``steps`` that the rank longest in it made ``long`` were, and were in it for ``ms`` together. ``doing``
    is one of :data:`DOINGS`.
    """

    place: CodePlace
    ranks: tuple[int, ...]
    doing: str
    ms: float
    long: int
    steps: int


@once
def slow_code(run: RunView) -> SlowCode | None:
    """What long steps do that others do not, ``None`` where no function takes half of them on any rank.

    Ranks that wait for another one show no function of their own.
    """
    found: dict[CodePlace, list[SlowCode]] = {}
    for rank in run.job.ranks if run.job is not None else ():
        own = _of_training(rank) or _of_threads(rank)
        if own is not None:
            found.setdefault(own.place, []).append(own)
    if not found:
        return None
    alike = max(found.values(), key=len)
    ranks = tuple(one.ranks[0] for one in alike)
    return msgspec.structs.replace(max(alike, key=lambda one: one.ms), ranks=ranks)


def _of_training(rank: RankJob) -> SlowCode | None:
    """What the thread that trains does in a rank's long steps for half of their time."""
    by_place: dict[CodePlace, float] = defaultdict(float)
    saved: dict[CodePlace, float] = defaultdict(float)
    loop = {frame.rpartition("@")[0] for frame in rank.samples.loop}
    for ms, frames in rank.samples.stacks:
        place = place_of_stack(frames, loop)
        if place is not None:
            by_place[place] += ms
            writes = any("torch/serialization.py" in one or "safetensors" in one for one in frames)
            saved[place] += ms * writes
    found = _longest(rank, by_place)
    if found is None:
        return None
    saves = saved[found.place] >= NAMED_SHARE * found.ms
    return msgspec.structs.replace(
        found, doing=LOADING if found.place.loading else SAVING if saves else OTHER
    )


def _of_threads(rank: RankJob) -> SlowCode | None:
    """What another thread runs for half of a rank's long steps, while training does what it always does."""
    by_place: dict[CodePlace, float] = defaultdict(float)
    for ms, frames in rank.samples.beside:
        if (place := place_of_stack(frames, ())) is not None:
            by_place[place] += ms
    return _longest(rank, by_place)


def _longest(rank: RankJob, by_place: dict[CodePlace, float]) -> SlowCode | None:
    place = max(by_place, key=lambda one: by_place[one], default=None)
    if place is None or by_place[place] < NAMED_SHARE * sum(ms for ms, _ in rank.samples.stacks):
        return None
    samples = rank.samples
    return SlowCode(place, (rank.rank,), BESIDE, by_place[place], samples.long, samples.steps)


@run_fact(unit="text")
def slow_steps_code(run: RunView) -> Value:
    """The function of the script in which steps far longer than usual spend half of their time, or "none".

    Sampled while they run, from 1.5 times the usual step on. Where only some ranks are in it, with them: the
    others wait. Where the thread that trains does what it always does, the function that another thread runs
    for half of that time: one thread of a process runs Python at a time.
    """
    if run.job is None or not any(one.samples.stacks for one in run.job.ranks):
        return NO_SAMPLES
    found = slow_code(run)
    if found is None:
        return "none"
    ranks = "" if len(found.ranks) == len(run.job.ranks) else f" on rank {format_ranges(found.ranks)}"
    beside = " in a thread beside training" if found.doing == BESIDE else ""
    return f"{found.place}{beside}{ranks}"


@run_fact(unit="text", values=DOINGS)
def slow_steps_doing(run: RunView) -> Value:
    """What :func:`slow_steps_code` does there.

    It is "saving" a checkpoint, "loading": waiting for workers of the data loader, "a thread beside" the one
    that trains, or "other".
    """
    found = slow_code(run)
    return found.doing if found is not None else NO_FUNCTION


@run_fact(unit="ms")
def slow_steps_code_ms(run: RunView) -> Value:
    """What :func:`slow_steps_code` takes, spread over all steps of the rank where it takes most."""
    found = slow_code(run)
    return found.ms / found.steps if found is not None and found.steps else NO_FUNCTION


@run_fact(unit="count")
def slow_steps_sampled(run: RunView) -> Value:
    """Steps that were sampled because they took far longer than usual (:func:`slow_steps_code`)."""
    found = slow_code(run)
    return found.long if found is not None else NO_FUNCTION


@run_fact(unit="count")
def slow_steps_counted(run: RunView) -> Value:
    """Steps among which those of :func:`slow_steps_sampled` are."""
    found = slow_code(run)
    return found.steps if found is not None else NO_FUNCTION


# -- garbage collection


@run_fact(unit="text")
def gc_code(run: RunView) -> Value:
    """The function of the script in which half of the time of long garbage collections passes, or "none".

    A collection runs wherever so many objects were made since the last one, or where it is called.
    """
    by_place: dict[CodePlace, float] = defaultdict(float)
    for rank in run.job.ranks if run.job is not None else ():
        loop = {frame.rpartition("@")[0] for frame in rank.samples.loop}
        for ms, frames in rank.collecting:
            if (place := place_of_stack(frames, loop)) is not None:
                by_place[place] += ms
    if not by_place:
        return Unknown("no stacks of long collections are known (`tracedoc collect`)")
    first = max(by_place, key=lambda one: by_place[one])
    return str(first) if by_place[first] >= NAMED_SHARE * sum(by_place.values()) else "none"


@run_fact(unit="bool")
def gc_called(run: RunView) -> Value:
    """Whether functions that call ``gc.collect`` themselves have half of the time of long collections."""
    ranks = run.job.ranks if run.job is not None else ()
    total = sum(ms for rank in ranks for ms, _ in rank.collecting)
    return sum(rank.collect_calls_ms for rank in ranks) >= NAMED_SHARE * total > 0
