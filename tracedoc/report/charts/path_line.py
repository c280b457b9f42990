"""Lay out the critical path as a line through the rows of a picture, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from tracedoc.report.charts.over_time import TimeScale
from tracedoc.report.words import resource_name
from tracedoc.tables import PathStretch
from tracedoc.units import format_ms

HOST, DEVICE, BESIDE = 0.9, 5.2, 9.4
"""How far down in its row the line runs, in a box of 10: above the bar, on it, or on the thin line below."""

LEVELS = {"compute": DEVICE, "communication": BESIDE, "copy": BESIDE}
"""Where the resources run; all others are the host's."""

FAR = 999
"""Lines to other rows leave the box, however high it is; a row shows no more than its own part of them."""

LEAST_GAP = 0.5
"""Gaps between two stretches are drawn from this share of the picture on, in thousandths."""

MOST_LEGS = 16
"""Stays on one rank that are told in words, the longest ones."""


class PathLine(msgspec.Struct, frozen=True):
    """What one row shows of the path: lines where work was measured, and where the path only waits."""

    work: str
    gaps: str


def path_lines(path: Sequence[PathStretch], ranks: Sequence[int], scale: TimeScale) -> dict[int, PathLine]:
    """Return the line through each row by rank; ``ranks`` are the rows from top to bottom."""
    places = {rank: place for place, rank in enumerate(ranks)}
    drawn = [one for one in path if one.rank in places and 0 <= one.start_ms <= one.end_ms <= scale.span_ms]
    work: dict[int, list[str]] = {rank: [] for rank in ranks}
    gaps: dict[int, list[str]] = {rank: [] for rank in ranks}
    for one in drawn:
        work[one.rank].append(_across(scale, one.start_ms, one.end_ms, level_of(one)))
    for one, after in pairwise(drawn):
        at = scale.thousandths(after.start_ms)
        if at - scale.thousandths(one.end_ms) > LEAST_GAP:
            gaps[one.rank].append(_across(scale, one.end_ms, after.start_ms, level_of(one)))
        for rank, top, bottom in _down(places, ranks, one, after):
            work[rank].append(f"M{at:.2f} {top}V{bottom}")
    return {rank: PathLine("".join(work[rank]), "".join(gaps[rank])) for rank in ranks if work[rank]}


def level_of(one: PathStretch) -> float:
    """The height of a stretch below the top of its row, of 10."""
    return LEVELS.get(one.resource, HOST)


def _across(scale: TimeScale, start_ms: float, end_ms: float, level: float) -> str:
    return f"M{scale.thousandths(start_ms):.2f} {level}H{scale.thousandths(end_ms):.2f}"


def _down(
    places: dict[int, int], ranks: Sequence[int], one: PathStretch, after: PathStretch
) -> Iterator[tuple[int, float, float]]:
    """Yield the line from one stretch to the next: the rank, and from where to where in its row."""
    if one.rank == after.rank:
        if level_of(one) != level_of(after):
            yield one.rank, level_of(one), level_of(after)
        return
    down = places[one.rank] < places[after.rank]
    yield one.rank, level_of(one), FAR if down else -FAR
    low, high = sorted((places[one.rank], places[after.rank]))
    for rank in ranks[low + 1 : high]:
        yield rank, -FAR, FAR
    yield after.rank, -FAR if down else FAR, level_of(after)


def path_words(path: Sequence[PathStretch]) -> tuple[str, ...]:
    """Return the path from rank to rank in words, in order of time."""
    legs: list[list[PathStretch]] = []
    for one in path:
        if legs and legs[-1][-1].rank == one.rank:
            legs[-1].append(one)
        else:
            legs.append([one])
    longest = sorted(legs, key=lambda leg: leg[0].start_ms - leg[-1].end_ms)[:MOST_LEGS]
    words = [_leg_words(leg) for leg in sorted(longest, key=lambda leg: leg[0].start_ms)]
    if len(legs) > len(words):
        words.append(f"{len(legs) - len(words)} shorter stays on a rank are not listed")
    return tuple(words)


def _leg_words(leg: Sequence[PathStretch]) -> str:
    """Return ``20 ms to 60 ms: rank 3, compute 35 ms (mostly the backward pass), communication 5 ms``."""
    total: dict[str, dict[str, float]] = {}
    for one in leg:
        kinds = total.setdefault(one.resource, {})
        kinds[one.what] = kinds.get(one.what, 0.0) + one.end_ms - one.start_ms
    said = []
    for resource, kinds in sorted(total.items(), key=lambda item: -sum(item[1].values())):
        what = max(kinds, key=kinds.__getitem__)
        mostly = f" (mostly {what})" if what else ""
        said.append(f"{resource_name(resource)} {format_ms(sum(kinds.values()))}{mostly}")
    begin, end = format_ms(leg[0].start_ms), format_ms(leg[-1].end_ms)
    return f"{begin} to {end}: rank {leg[0].rank}, {', '.join(said)}"
