"""Name the function of the script behind host time, from a rank's own trace or the step with stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.source_step import BesideTraining, Started
from tracedoc.run.job import Job
from tracedoc.timeline.script_code import CodePlace, place_of_frame, place_of_stack
from tracedoc.trace.distinct import median
from tracedoc.values import Unknown, Value, once

NAMED_SHARE = 0.5
"""A function is named for a length of time of which it takes at least this share."""

OPERATOR_NS = 10_000
"""An operator takes so long on a CPU, whatever it computes: on few numbers it takes no less."""


def code_place(run: RunView, rank: int, least_ms: float, *, loading: bool) -> CodePlace | None:
    """The place where the host of ``rank`` spends most time outside operators, ``None`` where none is known.

    ``least_ms`` is the length that is to be explained. ``loading`` asks for the data loader: all run one
    script, so that what the step with stacks of the first rank shows of it holds for ranks without stacks.
    """
    seen = seen_places(run, rank)
    if loading and not any(one.file for one in seen):
        seen = next((step.code for _, step in sorted(run.source_steps.items())), seen)
    return longest_place(seen, least_ms, loading=loading)


def common_place(run: RunView) -> CodePlace | None:
    """The place where the host is longest outside operators on every rank whose step with stacks was read.

    Its time is that of the rank that is there for the shortest time: what only one of them does is its own.
    """
    steps = [step.code for _, step in sorted(run.source_steps.items())]
    if not steps:
        return None
    first, rest = steps[0], steps[1:]
    shortest = (min((one.time_ns, *(time_in(one, first, other) for other in rest))) for one in first)
    return longest_place(lasting(first, shortest), 0.0, loading=False)


def seen_places(run: RunView, rank: int) -> Sequence[CodePlace]:
    """Return the places of a rank: of its trace if that has stacks, else of its step with stacks.

    Where there are neither, those of the ranges in its trace that ``record_function`` names.
    """
    digest = run.digest(rank)
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    with_lines = [one for one in of_trace if one.file]
    of_step = run.source_steps[rank].code if rank in run.source_steps else ()
    return with_lines or of_step or of_trace


@once
def beside_training(run: RunView) -> BesideTraining | None:
    """The function that calls operators beside training for longest on every rank with stacks, if one does.

    On the rank where it takes least: what only one of them does makes it late. A backward pass needs a loss:
    of that only calls count, which one operator on a whole batch saves.
    """
    steps = [step.beside for _, step in sorted(run.source_steps.items())]
    least = [
        _in_calls(one) if one.needed else one
        for first in (steps[0] if steps else ())
        if len(same := [one for step in steps for one in step if is_defined_as(one.place, first.place)])
        == len(steps)
        for one in [min(same, key=lambda one: one.place.time_ns)]
    ]
    return max(least, key=lambda one: one.place.time_ns, default=None)


def _in_calls(beside: BesideTraining) -> BesideTraining:
    """What of a function's operators takes its time whatever they compute."""
    whole = max(beside.place.time_ns, 1)
    share = min(beside.operators * OPERATOR_NS / whole, 1.0)
    return BesideTraining(
        msgspec.structs.replace(beside.place, time_ns=round(share * whole)),
        share * beside.forward_frac,
        share * beside.backward_frac,
        beside.operators,
        needed=True,
    )


def is_defined_as(one: CodePlace, other: CodePlace) -> bool:
    """Whether two places are one function, of which one file may have several of one name, as of hooks."""
    return same_code(one, other) and one.line == other.line


def may_feed_model(job: Job, place: CodePlace | None) -> Value:
    """Whether the loop calls a function before the model; unknown where no sampled stack shows both.

    Where the function calls a model itself, as one that evaluates, those of its stacks are its own.
    """
    stacks = [
        (frames, rank.samples.loop)
        for rank in job.ranks
        for step in rank.samples.sampled
        for _, frames in step.stacks
    ]
    own, models = [], []
    for frames, loop in stacks:
        found = place_of_stack(frames, loop)
        within = any(_runs(one, place) for one in frames if one.rpartition("@")[0] not in loop)
        if within or (found and place and same_code(found, place)):
            own.append(frames)
        elif _in_model(frames):
            models.append(frames)
    if not own or not models:
        return Unknown("no sampled stack shows both the function and the model")
    return _comes_before(own[0], models[0])


def _runs(frame: str, place: CodePlace | None) -> bool:
    """Whether a sampled frame runs the function of a place."""
    found = place_of_frame(frame.rpartition("@")[0])
    return found is not None and place is not None and same_code(found, place)


def _in_model(frames: Sequence[str]) -> bool:
    return any(one.startswith("torch/nn/modules/module.py(") for one in frames)


def same_code(one: CodePlace, other: CodePlace) -> bool:
    """Whether two places are one function, or one call at the top level, whose line is not compared."""
    return all(getattr(one, name) == getattr(other, name) for name in ("file", "function", "call"))


def _comes_before(frames: Sequence[str], model: Sequence[str]) -> bool:
    """Whether the outermost line in which two stacks differ comes first in the first of them."""
    for own, its in zip(reversed(frames), reversed(model), strict=False):
        (name, _, line), (other, _, of_model) = own.rpartition("@"), its.rpartition("@")
        if name != other:
            return True
        if line != of_model:
            return int(line or 0) < int(of_model or 0)
    return False


def has_stacks(run: RunView, rank: int) -> bool:
    """Whether the places of a rank are functions of the script, not named ranges."""
    return any(one.file for one in seen_places(run, rank))


def place_alone(
    run: RunView, rank: int, peers: Iterable[int], least_ms: float, *, loading: bool
) -> tuple[CodePlace | None, bool]:
    """The place where a rank is longer than some peers at the median, by half of ``least_ms`` or more.

    Its time is what it is longer there. Also whether any peer could be compared: where only this rank
    recorded stacks, its time counts whole.
    """
    places, by_stacks = seen_places(run, rank), has_stacks(run, rank)
    others = [seen_places(run, peer) for peer in peers if has_stacks(run, peer) == by_stacks]
    if others:
        usual = (int(median([time_in(one, places, other) for other in others])) for one in places)
        places = lasting(places, (one.time_ns - ns for one, ns in zip(places, usual, strict=True)))
    return longest_place(places, least_ms, loading=loading), bool(others)


def more_work_place(run: RunView, rank: int, peers: Iterable[int]) -> Started | None:
    """The function that starts half or more of the operators that a rank starts beyond its median peer.

    With how many more these are. From steps with stacks; ``None`` where they do not show both the rank and a
    peer.
    """
    steps = run.source_steps
    mine = steps[rank].work if rank in steps else ()
    others = [_operators(steps[peer].work) for peer in peers if peer in steps and steps[peer].work]
    if not mine or not others:
        return None
    own, places = _operators(mine), {_name(one.place): one.place for one in mine}
    more = {name: count - float(median([of[name] for of in others])) for name, count in own.items()}
    first = max(more, key=lambda name: more[name])
    beyond = sum(count for count in more.values() if count > 0)
    if more[first] <= 0 or more[first] < NAMED_SHARE * beyond:
        return None
    return Started(places[first], int(more[first]))


def most_work_place(run: RunView, ranks: Iterable[tuple[int, Sequence[int]]]) -> CodePlace | None:
    """The function that most operators are of which some of ``ranks`` start beyond the peers behind each."""
    found = [one for rank, peers in ranks if (one := more_work_place(run, rank, peers)) is not None]
    first = max(found, key=lambda one: one.operators, default=None)
    others = sum(one.operators for one in found if first is None or _name(one.place) != _name(first.place))
    return first.place if first is not None and first.operators > others else None


def _operators(work: Sequence[Started]) -> Counter[tuple[str, str, str]]:
    """The operators that functions start, by file, name and what they call."""
    found: Counter[tuple[str, str, str]] = Counter()
    for one in work:
        found[_name(one.place)] += one.operators
    return found


def _name(place: CodePlace) -> tuple[str, str, str]:
    return place.file, place.function, place.call


def lasting(places: Iterable[CodePlace], times_ns: Iterable[int]) -> list[CodePlace]:
    """Return the places with other times."""
    return [msgspec.structs.replace(one, time_ns=ns) for one, ns in zip(places, times_ns, strict=True)]


def time_in(place: CodePlace, own: Sequence[CodePlace], peer: Sequence[CodePlace]) -> int:
    """Return the time of a place of one rank on another, 0 where that is not there.

    A function that ran since before the step has the line at which it was then, another one on each rank: it
    is the same by its name, unless both ranks know that line for one of their own.
    """
    mine = {(one.file, one.line, one.function) for one in own}
    found = 0
    for one in peer:
        if any(
            getattr(one, name) != getattr(place, name) for name in ("file", "function", "loading", "call")
        ):
            continue
        if one.line == place.line:
            return one.time_ns
        if (one.file, one.line, one.function) not in mine:
            found = max(found, one.time_ns)
    return found


def longest_place(places: Iterable[CodePlace], least_ms: float, *, loading: bool) -> CodePlace | None:
    """The place of most time, ``None`` where it takes less than half of ``least_ms``."""
    candidates = [one for one in places if one.loading == loading]
    first = max(candidates, key=lambda one: one.time_ns, default=None)
    if first is None or first.time_ns <= 0 or first.time_ns / 1e6 < NAMED_SHARE * least_ms:
        return None
    return first
