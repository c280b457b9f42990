"""Facts of the run about what the script does in steps that are slow."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.code_places import NAMED_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.machine import SampledStep
from tracedoc.timeline.script_code import STOPPED, CodePlace, place_of_stack
from tracedoc.topics.step.run import JobSteps, is_outlier, job_steps, stopped_steps
from tracedoc.topics.step.slow_steps import SlowSteps, slow_steps
from tracedoc.trace.distinct import distinct, median
from tracedoc.units import format_ranges
from tracedoc.values import Unknown, Value, needed, once

OWN = 2.0
"""Of steps that are slow without an order a function is named that makes them longer by so many times what
others are in it: all that steps do takes long when their cores are used."""

NO_SAMPLES = Unknown("no stacks were sampled (`tracedoc collect`)")

NO_FUNCTION = Unknown("no function of long steps is known")


SAVING, LOADING, BESIDE, OTHER, STILL = "saving", "loading", "a thread beside", "other", "stopped"
DOINGS = (SAVING, LOADING, BESIDE, OTHER, STILL)


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
    """What each function takes longer in so many slow ``steps`` of a rank than in others: ms of all of them.

    ``None`` stands for what the thread that trains does in every step; ``total_ms`` is what those steps take
    longer, and what takes less than ``least_ms`` may do so by chance.
    """

    steps: int
    total_ms: float
    by_place: Mapping[CodePlace | None, float]
    least_ms: Mapping[CodePlace | None, float]

    @property
    def main_place(self) -> CodePlace | None:
        """The function that takes half of what slow steps take longer, and not by chance."""
        place = max(filter(None, self.by_place), key=lambda one: self.by_place[one], default=None)
        ms = self.by_place.get(place, 0.0)
        explains = ms >= NAMED_SHARE * self.total_ms > 0 and ms >= self.least_ms.get(place, 0.0)
        return place if explains else None


@once
def slow_code(run: RunView) -> SlowCode | None:
    """What slow steps do that others do not, ``None`` where no function takes half of that on any rank.

    Where the thread that trains does what it always does, the function that another thread runs for half
    of that time. Ranks are in it that are for half as long as the one that is longest: others wait for them.
    """
    if (still := _stopped(run)) is not None:
        return still
    found: list[SlowCode] = []
    longer: dict[bool, list[tuple[RankJob, TakesLonger]]] = {False: [], True: []}
    for rank in run.job.ranks:
        if not rank.samples.sampled:
            continue
        slow, others, ordered = _slow_and_others(run, rank)
        named = False
        for beside in (False, True):
            one = _takes_longer(rank, slow, others, ordered=ordered, beside=beside)
            longer[beside].append((rank, one))
            place = one.main_place
            if place is not None and not named:
                named = True
                doing = BESIDE if beside else _doing(place, rank, slow, one)
                found.append(SlowCode(place, rank, (), doing, one.by_place[place] / one.steps))
    if not found:
        return None
    most = max(found, key=lambda one: (one.doing != BESIDE, one.ms))
    involved = [
        rank.rank
        for rank, one in longer[most.doing == BESIDE]
        if one.by_place.get(most.place, 0.0) >= NAMED_SHARE * most.ms * one.steps > 0
    ]
    return msgspec.structs.replace(most, ranks=tuple(involved))


def _stopped(run: RunView) -> SlowCode | None:
    """The ranks that the system stopped in slow steps, where these take half of what all slow ones do."""
    steps, stopped = job_steps(run), stopped_steps(run)
    if isinstance(steps, Unknown) or not stopped:
        return None
    places = distinct(np.concatenate(list(stopped.values())))
    excess = steps.excess_ns
    if excess[places].sum() < NAMED_SHARE * excess[is_outlier(steps)].sum():
        return None
    most = max(stopped, key=lambda rank: stopped[rank].size)
    (longest,) = (one for one in run.job.ranks if one.rank == most)
    place = CodePlace("", 0, STOPPED, loading=False, time_ns=0)
    return SlowCode(place, longest, tuple(sorted(stopped)), STILL, float(excess[places].mean()) / 1e6)


def _doing(place: CodePlace, rank: RankJob, slow: Sequence[SampledStep], longer: TakesLonger) -> str:
    if place.loading:
        return LOADING
    loop = rank.samples.loop
    saved = sum(
        ms
        for step in slow
        for ms, frames in step.stacks
        if any("torch/serialization.py" in one or "safetensors" in one for one in frames)
        and place_of_stack(frames, loop) == place
    )
    return SAVING if saved >= NAMED_SHARE * longer.by_place[place] else OTHER


def _takes_longer(
    rank: RankJob, slow: Sequence[SampledStep], others: Sequence[SampledStep], *, ordered: bool, beside: bool
) -> TakesLonger:
    """What a rank, or threads ``beside`` the one that trains, do longer in ``slow`` steps than in ``others``.

    Of a step that was sampled only from when it took longer than usual, all that the thread that trains does
    is more than usual, and what other threads did before is unknown: they are judged by whole steps, if any.
    """
    whole = [one for one in slow if one.whole]
    judged = whole if beside and whole else slow
    longer = sum(_ms_by_place(judged, others, len(whole), rank.samples.loop).values())
    if beside:
        judged, others = [[replace(one, stacks=one.beside) for one in of] for of in (judged, others)]
    loop = () if beside else rank.samples.loop
    usual = _ms_by_place(others, (), 0, loop) if not ordered else {}
    least = {place: OWN * ms * len(judged) / len(others) for place, ms in usual.items()}
    return TakesLonger(len(judged), longer, _ms_by_place(judged, others, len(whole), loop), least)


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
    found = slow_code(run)
    if found is None and not any(one.samples.sampled for one in run.job.ranks):
        return NO_SAMPLES
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
    that trains, "stopped": the process stood still, as by SIGSTOP or in a suspended machine, or "other".
    """
    found = slow_code(run)
    return found.doing if found is not None else NO_FUNCTION


@run_fact(unit="ms")
def slow_steps_cost_ms(run: RunView) -> Value:
    """Time a step that slow steps cost, as the mean over all logged steps.

    Where the log shows none (:func:`slow_steps_pattern`), what :func:`slow_steps_code` takes of those that
    were sampled. A thread beside training costs more than it runs for, and also steps that are not far longer
    than usual: what the mean step takes longer than the median one of those in which it runs for less than
    half as long.
    """
    slow = needed(slow_steps(run))
    if slow.pattern != "none":
        return slow.cost_ns / 1e6
    if (found := slow_code(run)) is None:
        return 0.0
    without = _steps_without(run, found) if found.doing == BESIDE else []
    if without:
        mean_ms = float(needed(job_steps(run)).length_ns.mean()) / 1e6
        return max(mean_ms - float(median(without)), 0.0)
    samples = found.longest.samples
    return found.ms * samples.long / max(samples.steps, 1)


def _steps_without(run: RunView, found: SlowCode) -> list[float]:
    """Lengths in ms of the steps that were sampled whole while a thread hardly ran."""
    lengths = []
    for one in itertools.chain(*_slow_and_others(run, found.longest)[:2]):
        ran = sum(ms for ms, frames in one.beside if place_of_stack(frames, ()) == found.place)
        if one.whole and ran < NAMED_SHARE * found.ms:
            lengths.append(sum(ms for ms, _ in one.stacks))
    return lengths


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
    for rank in run.job.ranks:
        for ms, frames in rank.collecting:
            if (place := place_of_stack(frames, rank.samples.loop)) is not None:
                by_place[place] += ms
    if not by_place:
        return Unknown("no stacks of long collections are known (`tracedoc collect`)")
    first = max(by_place, key=lambda one: by_place[one])
    return str(first) if by_place[first] >= NAMED_SHARE * sum(by_place.values()) else "none"


@run_fact(unit="bool")
def gc_called(run: RunView) -> Value:
    """Whether functions that call ``gc.collect`` themselves have half of the time of long collections."""
    ranks = run.job.ranks
    total = sum(ms for rank in ranks for ms, _ in rank.collecting)
    return sum(rank.collect_calls_ms for rank in ranks) >= NAMED_SHARE * total > 0
