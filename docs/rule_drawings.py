"""Draw the step of a rule's case as an SVG: a row for each lane, in the colours of the reports."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tracedoc.testing.cases import Case
from tracedoc.testing.document import OPERATIONS
from tracedoc.testing.lane_words import COMPUTE, Drawing, Segment, read_lanes

WIDTH, LABEL, ROW, GAP = 760, 150, 22, 6
COLOURS = {"compute": "#3a7d44", "communication": "#c8553d", "host": "#5b7fa6", "other": "#8d99ae"}
_HOST = ("loader", "sync", "malloc", "free", "host", "backward")


def drawing(case: Case) -> str:
    """Return the SVG of a case's step; of several ranks those that are drawn differently."""
    drawn = read_lanes(case.lanes, Drawing(steps=case.steps))
    ranks = sorted({0, *(rank for rank in drawn.by_rank if rank < case.ranks)})[:4]
    rows = [(rank, name, parts) for rank in ranks for name, parts in _lanes(drawn, rank) if parts]
    ends = [one.end_ms for _, _, parts in rows for one in parts]
    length = max([drawn.step_ms or 0.0, *ends], default=1.0)
    height = len(rows) * (ROW + GAP) + 34
    body = "\n".join(_rows(rows, length, several=len(ranks) > 1))
    scale = "\n".join(_scale(length, height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">\n<title>{escape(case.name)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{scale}\n{body}\n</svg>\n'
    )


def _lanes(drawn: Drawing, rank: int) -> Iterator[tuple[str, list[Segment]]]:
    own = drawn.by_rank.get(rank, {})
    for name in dict.fromkeys([*drawn.common, *own]):
        parts = own.get(name, drawn.common.get(name, []))
        yield name, [one for one in parts if not one.ranks or rank in one.ranks]


def _rows(rows: list[tuple[int, str, list[Segment]]], length: float, *, several: bool) -> Iterator[str]:
    for number, (rank, name, parts) in enumerate(rows):
        top = 6 + number * (ROW + GAP)
        label = f"rank {rank}: {name}" if several else name
        yield f'<text x="{LABEL - 8}" y="{top + 15}" text-anchor="end" fill="#222222">{escape(label)}</text>'
        for one in parts:
            for start, end in one.parts():
                left, width = _x(start, length), max(_x(end, length) - _x(start, length) - 0.6, 0.8)
                yield (
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
                    f'fill="{COLOURS[_kind(name)]}"/>'
                )
            words = _words(one)
            room = _x(one.end_ms, length) - _x(one.start_ms, length)
            if words and room > 7 * len(words):
                middle = (_x(one.start_ms, length) + _x(one.end_ms, length)) / 2
                yield (
                    f'<text x="{middle:.1f}" y="{top + 15}" text-anchor="middle" fill="#ffffff">'
                    f"{escape(words)}</text>"
                )


def _scale(length: float, height: int) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        x = _x(length * tenth / 10, length)
        yield f'<line x1="{x:.1f}" y1="2" x2="{x:.1f}" y2="{height - 22}" stroke="#dddddd"/>'
        yield (
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#555555">'
            f"{length * tenth / 10:g} ms</text>"
        )


def _x(ms: float, length: float) -> float:
    return LABEL + (WIDTH - LABEL - 30) * ms / length


def _kind(name: str) -> str:
    if name in COMPUTE:
        return "compute"
    if name in OPERATIONS:
        return "communication"
    return "host" if name in _HOST else "other"


def _words(one: Segment) -> str:
    if one.name or one.op:
        return (one.name or one.op).rsplit("::", 1)[-1]
    if one.nbytes is None or one.count > 1:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if one.nbytes >= size:
            return f"{one.nbytes / size:g} {unit}"
    return f"{one.nbytes} B"
