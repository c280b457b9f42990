"""Name the function of the script behind host time, from a rank's own trace or the step with stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.stragglers import NOTICED, Straggler, stragglers
from tracedoc.timeline.script_code import CodePlace

ENOUGH = 0.5
"""A function is named for a length of time of which it takes at least this share."""

IN_CODE = ("input", "python", "gc", "unknown")
"""What makes a rank late in functions of the script: their time lies outside operators."""


def code_place(run: RunView, rank: int, least_ms: float, *, loading: bool) -> CodePlace | None:
    """Return where the host of ``rank`` spends most time outside operators, ``None`` where nothing tells.

    ``least_ms`` is the length that is to be explained. ``loading`` asks for the data loader: all run one
    script, so that what the step with stacks of the first rank shows of it holds for ranks without stacks.
    """
    seen = seen_places(run, rank)
    if loading and not any(one.file for one in seen):
        seen = next((step.code for _, step in sorted(run.source_steps.items())), seen)
    return _first(seen, least_ms, loading=loading)


class LatePlace(msgspec.Struct, frozen=True):
    """The function that makes a rank late; ``more_ns`` is how much longer it takes there than on the others.

    ``more_ns`` is ``None`` where no other rank has a place to compare with.
    """

    place: CodePlace
    more_ns: int | None


def late_place(run: RunView, late: Straggler) -> LatePlace | None:
    """Return the function that makes a rank late, ``None`` where its own stacks show none.

    What it takes longer there than on the median of the ranks that are not late is half or more of what the
    rank is longer at its cause. Where only this rank recorded stacks, its time counts whole.
    """
    if late.cause not in IN_CODE:
        return None
    places, by_stacks = seen_places(run, late.rank), has_stacks(run, late.rank)
    not_peers = {late.rank, *(one.rank for one in _noticed(run))}
    peers = [
        seen_places(run, digest.rank)
        for digest in run.digests
        if digest.rank not in not_peers and has_stacks(run, digest.rank) == by_stacks
    ]
    if peers:
        usual = (int(np.median([_time_in(one, places, peer) for peer in peers])) for one in places)
        places = _lasting(places, (one.time_ns - ns for one, ns in zip(places, usual, strict=True)))
    least_ms = float(np.median(late.cause_ns)) / 1e6
    found = _first(places, least_ms, loading=late.cause == "input")
    return LatePlace(found, found.time_ns if peers else None) if found is not None else None


def common_place(run: RunView) -> CodePlace | None:
    """Return where the host is longest outside operators on every rank whose step with stacks was read.

    Its time is that of the rank that is there for the shortest time: what only one of them does is its own.
    """
    steps = [step.code for _, step in sorted(run.source_steps.items())]
    if not steps:
        return None
    first, rest = steps[0], steps[1:]
    shortest = (min((one.time_ns, *(_time_in(one, first, other) for other in rest))) for one in first)
    return _first(_lasting(first, shortest), 0.0, loading=False)


def seen_places(run: RunView, rank: int) -> Sequence[CodePlace]:
    """Return the places of a rank: of its trace if that has stacks, else of its step with stacks.

    Where there are neither, those of the ranges in its trace that ``record_function`` names.
    """
    digest = run.digest(rank)
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    with_lines = [one for one in of_trace if one.file]
    of_step = run.source_steps[rank].code if rank in run.source_steps else ()
    return with_lines or of_step or of_trace


def has_stacks(run: RunView, rank: int) -> bool:
    """Return whether the places of a rank are functions of the script, not named ranges."""
    return any(one.file for one in seen_places(run, rank))


def ranks_to_read(run: RunView, recorded: Sequence[int]) -> list[int]:
    """Return of the ranks that recorded a step with stacks those that tell something: few of many.

    ``recorded`` are in order. The first one stands for what all do, late ones for themselves, and beside
    them one is needed that is not late.
    """
    if len(recorded) < 2:
        return list(recorded)
    late = {one.rank for one in _noticed(run) if one.cause in IN_CODE} & set(recorded)
    on_time = [rank for rank in recorded if rank not in late]
    return sorted({recorded[0], *late, *on_time[:1]})


def _noticed(run: RunView) -> list[Straggler]:
    representative = run.representative_digest
    step = representative.judged_step if representative is not None else None
    least_ns = NOTICED * step.budget.window_ns if step is not None else 0.0
    return [one for one in stragglers(run) if np.median(one.gain_ns) > least_ns]


def _lasting(places: Iterable[CodePlace], times_ns: Iterable[int]) -> list[CodePlace]:
    """Return the places with other times."""
    return [msgspec.structs.replace(one, time_ns=ns) for one, ns in zip(places, times_ns, strict=True)]


def _time_in(place: CodePlace, own: Sequence[CodePlace], peer: Sequence[CodePlace]) -> int:
    """Return the time of a place of one rank on another, 0 where that is not there.

    A function that ran since before the step has the line at which it was then, another one on each rank: it
    is the same by its name, unless both ranks know that line for one of their own.
    """
    mine = {(one.file, one.line, one.function) for one in own}
    found = 0
    for one in peer:
        if (one.file, one.function, one.loading) != (place.file, place.function, place.loading):
            continue
        if one.line == place.line:
            return one.time_ns
        if (one.file, one.line, one.function) not in mine:
            found = max(found, one.time_ns)
    return found


def _first(places: Iterable[CodePlace], least_ms: float, *, loading: bool) -> CodePlace | None:
    candidates = [one for one in places if one.loading == loading]
    first = max(candidates, key=lambda one: one.time_ns, default=None)
    if first is None or first.time_ns <= 0 or first.time_ns / 1e6 < ENOUGH * least_ms:
        return None
    return first
