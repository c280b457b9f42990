"""Write the drawn step, waits, plan and findings of all ranks as one trace that the Perfetto UI opens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from tracedoc.diagnosis import RankReport
from tracedoc.errors import InputError
from tracedoc.report.clock import LATEST_MS, CommonClock, begin_ms
from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View
from tracedoc.report.words import STATES, resource_name
from tracedoc.spans import Spans
from tracedoc.tables import Pairs, Picture, PictureRow
from tracedoc.units import format_ms, format_step_change

CATEGORY = "tracedoc"
"""By this category of every slice tracedoc knows such a file again, and does not take it for a trace."""

MOST_PLACES = 400
"""Places of one finding that are shown, the longest ones."""

MOST_FINDINGS = 20
"""Findings that are shown, from the first."""

MOST_STEPS = 40_000
"""Steps of all ranks that are shown, those nearest to the drawn one."""

PATH = "critical path"

_RUN = 1
"""The process of what is said of the run; that of rank N is N + 2. Perfetto keeps 0 for itself."""

_WAITS = ("wait", "pipeline", "unsplit", "transfer")

Event = dict[str, Any]
Slice = tuple[str, float, float, Event]
"""What it is called, when it begins and ends in milliseconds, and more about it."""


def render_perfetto(view: View) -> bytes:
    """Return the trace as JSON, in the format of Chrome's trace viewer, which the Perfetto UI reads too.

    Slices of one track never overlap unless one lies within the other, as the format asks. Times count from
    the first step, or from a place before it. Its size is bounded: the picture is thinned as that of the page
    is, and the constants above bound the rest; ``otherData.thinned`` says so.

    Raises :class:`InputError` without a step to draw.
    """
    picture = view.diagnosis.detail.picture
    if picture is None or not picture.rows or not 0 < picture.span_ms < LATEST_MS:
        raise InputError(
            "there is no step to show in Perfetto", "tracedoc diagnose says what the capture lacks"
        )
    zero = begin_ms(picture, view)
    events = _said_of_run(picture, zero, view)
    clock = CommonClock(picture, view.diagnosis)
    reports = {report.rank: report for report in view.diagnosis.ranks}
    path: list[Event] = []
    for row in picture.rows:
        tracks = _rank(row, picture, reports.get(row.rank), clock, view)
        path += tracks.add(PATH, _path(row, picture))
        events += tracks.events
    events += _arrows(path)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - 1000.0 * zero, 3)
    content = {
        # First, so that a look at the beginning of a file tells what it is.
        "tracedocView": "perfetto",
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": f"tracedoc {view.diagnosis.tool_version}",
            "answer": one_line(view.diagnosis.summary),
            "clock": "one for all ranks" if picture.aligned else "each rank counts from its own beginning",
            "thinned": (
                f"step {picture.step} as drawn on the page; of a finding its {MOST_PLACES} longest places, of"
                f" {MOST_STEPS} steps those nearest; {picture.left_out} ranks are not shown"
            ),
        },
        "traceEvents": events,
    }
    return msgspec.json.encode(content)


class _Tracks:
    """Gives the tracks of one process their numbers and names, in the order in which they are asked for."""

    def __init__(self, process: int, name: str) -> None:
        self._process = process
        self._threads = 0
        self.events: list[Event] = [
            self._meta("process_name", {"name": name}),
            self._meta("process_sort_index", {"sort_index": process}),
        ]

    def add(self, name: str, slices: Iterable[Slice]) -> list[Event]:
        """Add a track of slices, and return them as events; without any there is no track."""
        self._threads += 1
        thread = 1000 * self._process + self._threads
        found = [
            {
                "ph": "X",
                "cat": CATEGORY,
                "name": label,
                "pid": self._process,
                "tid": thread,
                "ts": 1000.0 * start,
                "dur": round(1000.0 * (end - start), 3),
                "args": args,
            }
            for label, start, end, args in slices
            if -LATEST_MS < start <= end < LATEST_MS
        ]
        if found:
            self.events.append(self._meta("thread_name", {"name": name}, thread))
            self.events.append(self._meta("thread_sort_index", {"sort_index": self._threads}, thread))
            self.events += found
        return found

    def _meta(self, name: str, args: Event, thread: int = 0) -> Event:
        return {"ph": "M", "name": name, "pid": self._process, "tid": thread, "args": args}


def _said_of_run(picture: Picture, begin: float, view: View) -> list[Event]:
    """Return the process of the run: the answer over everything; plan and findings over the drawn step."""
    diagnosis, span = view.diagnosis, picture.span_ms
    tracks = _Tracks(_RUN, "tracedoc")
    tracks.add("answer", [(one_line(diagnosis.summary), begin, span, {"run": view.run})])
    if diagnosis.plan:
        today = diagnosis.plan[0].replay_of_step_ms
        slices: list[Slice] = [(f"step now: {format_ms(today)}", 0.0, today, {})]
        for number, one in enumerate(diagnosis.plan, 1):
            # Each fix is on top of those before it, so each slice lies within the one before.
            name = (
                f"{number}. {one_line(one.title)}: {format_step_change(one.replay_of_step_ms, one.step_ms)}"
            )
            end = min(one.step_ms[1], slices[-1][2])
            slices.append((name, 0.0, end, {"fix": one.fix, "replays": one.change}))
        tracks.add("plan: the step after each fix", slices)
    tracks.add(
        "findings",
        [(_title(item), 0.0, span, _about(item)) for item in view.findings[:MOST_FINDINGS]],
    )
    return tracks.events


def _rank(
    row: PictureRow, picture: Picture, report: RankReport | None, clock: CommonClock, view: View
) -> _Tracks:
    tracks = _Tracks(row.rank + 2, f"rank {row.rank}")
    if report is not None:
        tracks.add("steps", _steps(report, picture, clock, MOST_STEPS // len(picture.rows)))
    tracks.add("budget", _budget(row))
    for name, keys in (("waits and transfers", _WAITS), ("communication", ("communication",))):
        slices: list[Slice] = [
            (STATES[key][1] if key in STATES else key, start, end, {})
            for key in keys
            for start, end in row.spans_ms.get(key, ())
        ]
        tracks.add(name, _apart(slices))
    for item in view.findings[:MOST_FINDINGS]:
        tracks.add(_title(item), _places(item, row, clock))
    return tracks


def _path(row: PictureRow, picture: Picture) -> Iterator[Slice]:
    """Yield the stretches of the critical path on a rank."""
    for one in picture.path:
        if one.rank == row.rank:
            what = f": {one_line(one.what)}" if one.what else ""
            yield f"{resource_name(one.resource)}{what}", one.start_ms, one.end_ms, {}


def _arrows(path: list[Event]) -> Iterator[Event]:
    """Yield one flow through the slices of the critical path, in order of time.

    A flow event is tied to the slice that is open on its track: so each stands in the middle of its slice.
    """
    ordered = sorted(path, key=lambda event: event["ts"])
    for place, event in enumerate(ordered if len(ordered) > 1 else ()):
        last = place == len(ordered) - 1
        yield {
            "ph": "s" if place == 0 else "f" if last else "t",
            "cat": CATEGORY,
            "name": PATH,
            "id": _RUN,
            "pid": event["pid"],
            "tid": event["tid"],
            "ts": event["ts"] + event["dur"] / 2,
            **({"bp": "e"} if last else {}),
        }


def _budget(row: PictureRow) -> Iterator[Slice]:
    """Yield what the rank does, each instant once: what is painted later on the page covers the rest."""
    taken = Spans.empty()
    for key in reversed(STATES):
        own = _spans(row.spans_ms.get(key, ())) - taken
        taken = taken | own
        for start, end in zip(own.starts.tolist(), own.ends.tolist(), strict=True):
            yield STATES[key][1], start / 1e6, end / 1e6, {}


def _spans(pairs: Pairs) -> Spans:
    times = np.array(pairs, dtype=np.float64).reshape(-1, 2).clip(-LATEST_MS, LATEST_MS)
    times = np.rint(times * 1e6).astype(np.int64)
    return Spans.of(times[:, 0], times[:, 1])


def _steps(report: RankReport, picture: Picture, clock: CommonClock, most: int) -> Iterator[Slice]:
    nearest = sorted(report.steps, key=lambda step: (abs(step.index - picture.step), step.index))[:most]
    for step in sorted(nearest, key=lambda step: step.start_ms):
        interval = clock.of_step(report.rank, step)
        if interval is not None:
            args = {
                "complete": step.complete,
                "compute_ms": step.compute_ms,
                "exposed_transfer_ms": step.exposed_transfer_ms,
                "exposed_wait_ms": step.exposed_wait_ms,
                "idle_ms": step.idle_ms,
            }
            yield f"step {step.index}", interval.start_ms, interval.end_ms, args


def _places(item: FindingView, row: PictureRow, clock: CommonClock) -> Iterator[Slice]:
    """Yield the places of a finding on a rank; the drawn step, if it names the rank and no place."""
    finding = item.finding
    if not finding.evidence and row.rank in finding.ranks:
        yield _title(item), row.start_ms, row.end_ms, {"finding": finding.id, "place": "the whole step"}
        return
    longest = sorted(finding.evidence, key=lambda place: place.length_ns, reverse=True)[:MOST_PLACES]
    mine = [place for place in longest if place.rank == row.rank]
    slices: list[Slice] = []
    for place in mine:
        interval = clock.of_place(place)
        if interval is not None:
            own = f"{place.start_ns} to {place.end_ns} ns since its first event"
            args = {"finding": finding.id, "explain": _command(item), "of its trace": own}
            slices.append((one_line(place.what), interval.start_ms, interval.end_ms, args))
    yield from _apart(slices)


def _apart(
    slices: Iterable[Slice],
) -> Iterator[Slice]:
    """Yield slices in order of time; one that begins within the one before begins where that ends."""
    reached = float("-inf")
    for name, start, end, args in sorted(slices, key=lambda one: one[1:3]):
        if end > reached:
            yield name, max(start, reached), end, args
            reached = end


def _title(item: FindingView) -> str:
    return f"{item.number}. {one_line(item.finding.title)}"


def _about(item: FindingView) -> Event:
    finding = item.finding
    about = {
        "finding": finding.id,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": one_line(finding.message),
        "explain": _command(item),
    }
    if item.gain:
        about["gain"] = item.gain
    if item.fixes:
        about["fix"] = one_line(item.fixes[0].title)
    return about


def _command(item: FindingView) -> str:
    return f"tracedoc explain {item.finding.rule_id}"
