"""Where the places of findings lie on the clock that all ranks of a picture share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tracedoc.diagnosis import Diagnosis, Evidence, StepBudget
from tracedoc.report.view import View
from tracedoc.tables import Picture

LATEST_MS = 1e12
"""Times beyond this, thirty years, are no times of a job."""


class Interval(NamedTuple):
    """A stretch of time on the common clock, in milliseconds."""

    start_ms: float
    end_ms: float


class CommonClock:
    """Turns the times of each rank's own trace into those of the picture; ranks not drawn have none."""

    def __init__(self, picture: Picture, diagnosis: Diagnosis) -> None:
        self._offset_ms: dict[int, float] = {}
        rows = {row.rank: row for row in picture.rows}
        for report in diagnosis.ranks:
            row = rows.get(report.rank)
            own = next((step for step in report.steps if step.index == picture.step), None)
            if row is not None and own is not None:
                self._offset_ms[report.rank] = row.start_ms - own.start_ms

    def of_step(self, rank: int, step: StepBudget) -> Interval | None:
        """The interval of a rank's step; ``None`` for a rank that is not drawn."""
        return self._interval(rank, step.start_ms, step.start_ms + step.step_ms)

    def of_place(self, place: Evidence) -> Interval | None:
        """The interval of a place of a finding; ``None`` on a rank that is not drawn."""
        return self._interval(place.rank, place.start_ns / 1e6, place.end_ns / 1e6)

    def _interval(self, rank: int, start_ms: float, end_ms: float) -> Interval | None:
        offset = self._offset_ms.get(rank)
        if offset is None or not -LATEST_MS < offset + start_ms <= offset + end_ms < LATEST_MS:
            return None
        return Interval(offset + start_ms, offset + end_ms)


def begin_ms(picture: Picture, view: View) -> float:
    """The ms at which the picture, or a step or place before it, begins: Perfetto counts from there."""
    clock = CommonClock(picture, view.diagnosis)
    return min(0.0, *(one.start_ms for one in _intervals(clock, view)), 0.0)


def place_to_look(view: View) -> str:
    """The place where the first finding is seen best, as ``rank 3, 120.4 ms``; "" where nothing is drawn.

    It is the longest place of that finding, on a rank that it names if there is one, else where such a rank
    begins the drawn step. Milliseconds count from the beginning of what ``-o run.perfetto.json.gz`` shows.
    """
    picture = view.diagnosis.detail.picture
    if picture is None or not view.findings:
        return ""
    clock, finding = CommonClock(picture, view.diagnosis), view.findings[0].finding
    places = [(place, at) for place in finding.evidence if (at := clock.of_place(place)) is not None]
    if places:
        named = [(place, at) for place, at in places if place.rank in finding.ranks]
        place, at = max(named or places, key=lambda one: one[0].length_ns)
        rank, start_ms = place.rank, at.start_ms
    elif rows := [row for row in picture.rows if row.rank in finding.ranks]:
        rank, start_ms = rows[0].rank, rows[0].start_ms
    else:
        return ""
    return f"rank {rank}, {start_ms - begin_ms(picture, view):.1f} ms"


def _intervals(clock: CommonClock, view: View) -> Iterator[Interval]:
    for report in view.diagnosis.ranks:
        for step in report.steps:
            if (interval := clock.of_step(report.rank, step)) is not None:
                yield interval
    for item in view.findings:
        for place in item.finding.evidence:
            if (interval := clock.of_place(place)) is not None:
                yield interval
