"""Facts of the run about what the script does in steps that are slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import msgspec

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.machine import SampledStep
from tracedoc.timeline.script_code import CodePlace, place_of_stack
from tracedoc.topics.step.run import JobSteps, job_steps
from tracedoc.topics.step.slow_steps import SlowSteps, slow_steps
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, once

OWN = 2.0
"""Of steps that are slow without an order a function is named that makes them longer by so many times what
others are in it: all that steps do takes long when their cores are used."""

NO_SAMPLES = Unknown("no stacks were sampled (`tracedoc collect`)")

NO_FUNCTION = Unknown("no function of long steps is known")


SAVING, LOADING, BESIDE, OTHER = "saving", "loading", "a thread beside", "other"
DOINGS = (SAVING, LOADING, BESIDE, OTHER)


class SlowCode(msgspec.Struct, frozen=True):
    """The function that takes half of what slow steps take longer, and the ranks that are in it.

    On ``longest``, the rank that is longest in it, that is ``ms`` in each step that was sampled. ``doing`` is
    one of :data:`DOINGS`.
    """

    place: CodePlace
    longest: RankJob
    ranks: tuple[int, ...]
    doing: str
    ms: float


class TakesLonger(msgspec.Struct, frozen=True):
    """What each function takes longer in the slow steps of a rank than in others: the ms of all of them.

    ``None`` stands for what the thread that trains does in every step; ``saved_ms`` is spent writing tensors.
    What takes less than ``least_ms`` may do so by chance.
    """

    steps: int
    total_ms: float
    by_place: Mapping[CodePlace | None, float]
    beside: Mapping[CodePlace | None, float]
    saved_ms: Mapping[CodePlace | None, float]
    least_ms: Mapping[CodePlace | None, float]


@once
def slow_code(run: RunView) -> SlowCode | None:
    """What slow steps do that others do not, ``None`` where no function takes half of that on any rank.

    Where the thread that trains does what it always does, the function that another thread runs for half
    of that time. Ranks are in it that are for half as long as the one that is longest: others wait for them.
    """
    longer = [
        (rank, _takes_longer(run, rank))
        for rank in (run.job.ranks if run.job is not None else ())
        if rank.samples.sampled
    ]
    found: list[SlowCode] = []
    for rank, one in longer:
        for by_place, of_threads in ((one.by_place, False), (one.beside, True)):
            place = max(filter(None, by_place), key=lambda each: by_place[each], default=None)
            if place is None or (not of_threads and by_place[place] < one.least_ms.get(place, 0.0)):
                continue
            if by_place[place] >= NAMED_SHARE * one.total_ms > 0:
                doing = BESIDE if of_threads else _doing(place, one)
                found.append(SlowCode(place, rank, (), doing, by_place[place] / one.steps))
                break
    if not found:
        return None
    most = max(found, key=lambda one: (one.doing != BESIDE, one.ms))
    involved = []
    for rank, one in longer:
        by_place = one.beside if most.doing == BESIDE else one.by_place
        if by_place.get(most.place, 0.0) >= NAMED_SHARE * most.ms * one.steps > 0:
            involved.append(rank.rank)
    return msgspec.structs.replace(most, ranks=tuple(involved))


def _doing(place: CodePlace, longer: TakesLonger) -> str:
    if place.loading:
        return LOADING
    return SAVING if longer.saved_ms.get(place, 0.0) >= NAMED_SHARE * longer.by_place[place] else OTHER


def _takes_longer(run: RunView, rank: RankJob) -> TakesLonger:
    """What a rank does longer in the slow steps of the log that were sampled than in usual ones."""
    loop = {frame.rpartition("@")[0] for frame in rank.samples.loop}
    slow, others, ordered = _slow_and_others(run, rank)
    whole = sum(one.whole for one in slow)
    by_place = _ms_by_place(slow, others, whole, loop)
    saved: dict[CodePlace | None, float] = defaultdict(float)
    for step in slow:
        for ms, frames in step.stacks:
            if any("torch/serialization.py" in one or "safetensors" in one for one in frames):
                saved[place_of_stack(frames, loop)] += ms
    beside = _ms_by_place(
        [replace(one, stacks=one.beside) for one in slow],
        [replace(one, stacks=one.beside) for one in others],
        whole,
        (),
    )
    usual = _ms_by_place(others, (), 0, loop) if not ordered else {}
    least = {place: OWN * ms * len(slow) / len(others) for place, ms in usual.items()}
    return TakesLonger(len(slow), sum(by_place.values()), by_place, beside, saved, least)


def _slow_and_others(run: RunView, rank: RankJob) -> tuple[list[SampledStep], list[SampledStep], bool]:
    """The sampled slow steps of a rank, whole usual ones, and whether the log has an order of slow ones."""
    found, logged = slow_steps(run), job_steps(run)
    # What a capture or the writing of its trace touched says nothing of the job.
    counted = set(logged.number.tolist()) if isinstance(logged, JobSteps) else None
    sampled = [one for one in rank.samples.sampled if counted is None or one.number in counted]
    pattern = found.pattern if isinstance(found, SlowSteps) else ""
    usual = [one for one in sampled if one.whole and not one.long]
    if isinstance(found, SlowSteps) and pattern == "from one step on":
        before = [one for one in usual if one.number < found.start]
        return [one for one in sampled if one.number >= found.start], before, True
    if isinstance(found, SlowSteps) and pattern == "regular":
        slow = [one for one in sampled if (one.number - found.start) % found.period < found.lasts]
        return [one for one in slow if one.long], usual, True
    return [one for one in sampled if one.long], usual, False


def _ms_by_place(
    slow: Sequence[SampledStep], others: Sequence[SampledStep], whole: int, loop: Container[str]
) -> dict[CodePlace | None, float]:
    """The ms of all slow steps in each place, without what ``whole`` usual steps are in it."""
    found: dict[CodePlace | None, float] = defaultdict(float)
    for steps, weight in ((slow, 1.0), (others, -whole / len(others) if others else 0.0)):
        for step in steps:
            for ms, frames in step.stacks:
                found[place_of_stack(frames, loop)] += weight * ms
    return found


@run_fact(unit="text")
def slow_steps_code(run: RunView) -> Value:
    """The function of the script that takes half of what slow steps take longer than others, or "none".

    Steps are sampled from 1.5 times the usual step on, some from their beginning on. Where only some ranks
    are in it, with them: the others wait. Where the thread that trains does what it always does, the function
    that another thread runs for half of that time: one thread of a process runs Python at a time.
    """
    if run.job is None or not any(one.samples.sampled for one in run.job.ranks):
        return NO_SAMPLES
    found = slow_code(run)
    if found is None:
        return "none"
    on = "on rank" if len(found.ranks) == 1 else "on ranks"
    ranks = "" if len(found.ranks) == len(run.job.ranks) else f" {on} {format_ranges(found.ranks)}"
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
    """What :func:`slow_steps_code` takes, spread over all steps, where the log shows no slow steps."""
    found, slow = slow_code(run), slow_steps(run)
    if found is None:
        return NO_FUNCTION
    if isinstance(slow, SlowSteps) and slow.pattern != "none":
        return Unknown("the log of all steps tells what slow ones cost")
    samples = found.longest.samples
    return found.ms * samples.long / max(samples.steps, 1)


@run_fact(unit="count")
def slow_steps_sampled(run: RunView) -> Value:
    """Steps that were sampled because they took far longer than usual (:func:`slow_steps_code`)."""
    found = slow_code(run)
    return found.longest.samples.long if found is not None else NO_FUNCTION


@run_fact(unit="count")
def slow_steps_counted(run: RunView) -> Value:
    """Steps among which those of :func:`slow_steps_sampled` are."""
    found = slow_code(run)
    return found.longest.samples.steps if found is not None else NO_FUNCTION


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
