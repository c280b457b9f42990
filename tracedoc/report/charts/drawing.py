"""Lay out the picture of a step: a row of stretches for each rank on one clock, and the critical path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from tracedoc.diagnosis import Diagnosis
from tracedoc.report.charts.bars import waits_mostly_for
from tracedoc.report.charts.detail_tables import short_name
from tracedoc.report.charts.over_time import Ticks, TimeScale
from tracedoc.report.clock import CommonClock
from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView
from tracedoc.report.words import STATES, resource_name, states_of
from tracedoc.tables import PathStretch, Picture, PictureRow
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


MARKED_FINDINGS = 5
"""Findings that are marked in the picture, each at its longest place on a rank."""

VISIBLE = 1000
"""A gap shorter than the picture divided by this has about a pixel, and need not be spoken of."""

NARROW_ROWS = 16
"""With more ranks than this the rows are low, to fit on a screen."""

MOST_FIRST = 8
LEAST_OF_PATH = 0.1
"""Of many rows, those with this share of the critical path stand first, if they are no more than this."""

LEAST_WAIT = 0.05
"""A rank is said to wait for another where it waits for this share of the picture at least."""

_LEGEND = tuple(dict.fromkeys(("forward", "recompute", "backward", "optimizer", "compute", *STATES)))

States = Mapping[str, tuple[str, str]]
"""Colour and words of what ranks do."""


class Stretch(msgspec.Struct, frozen=True):
    """Everything of one kind that a rank does, as one SVG path in a box of 1000 by 10.

    ``name`` is its key in ``PictureRow.spans_ms``.
    """

    key: str
    name: str
    words: str
    title: str
    path: str


class Mark(msgspec.Struct, frozen=True):
    """Where a finding is seen on a rank: from ``left`` for ``width``, in percent of the picture."""

    number: int
    severity: str
    title: str
    left: float
    width: float


class DrawnRank(msgspec.Struct, frozen=True):
    """One row: its states, the communication beside them, the findings that it shows, and the critical path.

    ``stage`` is its stage of a pipeline, ``cause`` the cause that a finding sees on this rank and few others,
    ``waits_for`` the rank that it mostly waits for; empty and ``None`` where there is none.
    """

    rank: int
    stage: str
    cause: str
    waits_for: int | None
    text: str
    states: tuple[Stretch, ...]
    communication: str
    marks: tuple[Mark, ...]
    path: PathLine | None


class Drawing(msgspec.Struct, frozen=True):
    """The picture: ``legend`` has colours with words, ``path`` is in words, ``names`` a list in JSON."""

    caption: str
    rows: tuple[DrawnRank, ...]
    ticks: Ticks
    legend: tuple[tuple[str, str], ...]
    span_ms: float
    low: bool
    path: tuple[str, ...]
    names: str


def draw(diagnosis: Diagnosis, findings: Sequence[FindingView]) -> Drawing | None:
    """Return the picture to show; ``None`` where there is none, or where its times make no picture."""
    picture = diagnosis.detail.picture
    if picture is None or not picture.rows or not 0 < picture.span_ms < 1e12:
        return None
    clock = CommonClock(picture, diagnosis)
    stages = diagnosis.facts["stage"].values if "stage" in diagnosis.facts else {}
    waits_for = waits_mostly_for(diagnosis.detail.waits, picture.step, least_ms=LEAST_WAIT * picture.span_ms)
    causes = _causes(findings, len(diagnosis.run.ranks_seen))
    ordered = _with_named_first(picture, causes)
    states = states_of(diagnosis.run.device)
    lines = path_lines(picture.path, [row.rank for row in ordered], TimeScale(picture.span_ms))
    rows = tuple(
        DrawnRank(
            rank=row.rank,
            stage=f"stage\u00a0{stage}" if isinstance(stage := stages.get(str(row.rank)), int) else "",
            cause=causes.get(row.rank, ""),
            waits_for=waits_for.get(row.rank),
            text=_words(row, states),
            states=tuple(_states(row, picture, states)),
            communication=_path(row, "communication", picture),
            marks=tuple(_marks(row, picture, clock, findings[:MARKED_FINDINGS])),
            path=lines.get(row.rank),
        )
        for row in ordered
    )
    used = {name for row in picture.rows for name in row.spans_ms}
    legend = dict.fromkeys(states[name] for name in _LEGEND if name in used)
    return Drawing(
        caption=_caption(picture, named_first=ordered != picture.rows),
        rows=rows,
        ticks=TimeScale(picture.span_ms).ticks(),
        legend=tuple(legend),
        span_ms=picture.span_ms,
        low=len(rows) > NARROW_ROWS,
        path=path_words(picture.path),
        names=json.dumps([short_name(name) if "::" in name else one_line(name) for name in picture.names]),
    )


def _with_named_first(picture: Picture, causes: Mapping[int, str]) -> tuple[PictureRow, ...]:
    """Return the rows; of many, the few that findings or the critical path name stand first."""
    on_path: dict[int, float] = {}
    for one in picture.path:
        on_path[one.rank] = on_path.get(one.rank, 0.0) + one.end_ms - one.start_ms
    long = {rank for rank, ms in on_path.items() if ms >= LEAST_OF_PATH * picture.span_ms}
    named = {row.rank for row in picture.rows if causes.get(row.rank) or row.rank in long}
    if len(picture.rows) <= NARROW_ROWS or len(named) > MOST_FIRST:
        return picture.rows
    return tuple(sorted(picture.rows, key=lambda row: row.rank not in named))


def _caption(picture: Picture, *, named_first: bool) -> str:
    several = len(picture.rows) > 1
    words = [f"Step {picture.step}"]
    if several:
        words.append(
            "all ranks on one clock" if picture.aligned else "each rank from its own beginning: clocks differ"
        )
    if named_first:
        words.append("ranks that a finding names or the critical path stays on stand first")
    if any("communication" in row.spans_ms for row in picture.rows):
        words.append("the thin line below a rank is communication, hidden or not")
    if picture.path:
        words.append(
            "the outlined line is the critical path, what the step waited for: above a bar the host, on it"
            " compute, below it communication and copies"
        )
    if picture.closed_ms > picture.span_ms / VISIBLE:
        words.append(f"thinned: gaps below {format_ms(picture.closed_ms)} are not drawn")
    if picture.left_out:
        words.append(f"{picture.left_out} more ranks are not drawn")
    return "; ".join(words)


def _causes(findings: Sequence[FindingView], ranks: int) -> dict[int, str]:
    """Return the cause that is found on a rank and not on most: a title begins with it."""
    causes: dict[int, str] = {}
    for item in findings:
        if 0 < len(item.finding.ranks) <= ranks / 2:
            for rank in item.finding.ranks:
                causes.setdefault(rank, item.finding.title.partition(":")[0])
    return causes


def _states(row: PictureRow, picture: Picture, states: States) -> Iterator[Stretch]:
    for name, (key, words) in states.items():
        if name in row.spans_ms:
            title = f"rank {row.rank}: {words}, {format_ms(_total(row, name))}"
            yield Stretch(key, name, words, title, _path(row, name, picture))


def _words(row: PictureRow, states: States) -> str:
    """The five longest states of a rank in words, for those who do not see them."""
    times = [(words, _total(row, name)) for name, (_, words) in states.items() if name in row.spans_ms]
    largest = sorted(times, key=lambda one: -one[1])[:5]
    return f"rank {row.rank}: " + ", ".join(f"{words} {format_ms(ms)}" for words, ms in largest)


def _total(row: PictureRow, name: str) -> float:
    return sum(end - start for start, end in row.spans_ms.get(name, ()))


def _path(row: PictureRow, name: str, picture: Picture) -> str:
    return TimeScale(picture.span_ms).path(row.spans_ms.get(name, ()))


def _marks(
    row: PictureRow, picture: Picture, clock: CommonClock, findings: Sequence[FindingView]
) -> Iterator[Mark]:
    """Yield the longest place of each finding on this rank in the drawn step."""
    scale = TimeScale(picture.span_ms)
    for item in findings:
        places = [
            place
            for place in item.finding.evidence
            if place.rank == row.rank and place.step in (picture.step, None)
        ]
        longest = max(places, key=lambda place: place.length_ns, default=None)
        interval = clock.of_place(longest) if longest is not None else None
        if longest is None or interval is None:
            continue
        start, end = interval.start_ms, min(interval.end_ms, picture.span_ms)
        if 0 <= start < end:
            left, width = scale.percent(start), max(scale.percent(end - start), 0.2)
            title = f"{longest.what}. {item.finding.message}"
            yield Mark(item.number, item.finding.severity, title, round(left, 3), round(width, 3))
