"""What a series of runs on more and more GPUs says: the curve, its bend, and how it would go on."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.comparison.series import Beyond, Point, Series
from tracedoc.report.sheets.comparison_words import comparison_sheet
from tracedoc.report.sheets.sheet import Bar, Box, Row, Sheet, Table
from tracedoc.units import format_ms, format_percent, three_digits

_FULL = 1000.0


def series_sheet(found: Series) -> Sheet:
    """Return what a series shows; its last table is the waterfall from the first run to the last."""
    whole = comparison_sheet(found.whole)
    first, last = found.points[0].gpus, found.points[-1].gpus
    parts = [
        Table(
            one.titles,
            one.rows,
            one.numbers,
            f"From {first} to {last} GPUs: the ideal step and the measured one",
        )
        for one in whole.tables
    ]
    return Sheet(
        answer=_answer(found),
        notes=(
            f"{found.kind.capitalize()} scaling: {found.evidence}. GPU time is that of a sample, against the"
            " first run; GPU-h are hours of one GPU.",
        ),
        bars=tuple(_bars(found)),
        bars_caption="Efficiency: the ideal step over the measured one; predictions are pale",
        tables=(_curve(found), *_beyond_tables(found.beyond), *parts),
        lists=(*_reasons(found.beyond), *whole.lists),
    )


def _answer(found: Series) -> str:
    first, last = found.points[0], found.points[-1]
    text = (
        f"{format_percent(last.efficiency)} efficiency from {first.gpus} to {last.gpus} GPUs ({found.kind}"
        f" scaling): {three_digits(last.speed_up)} times as fast, ideally {last.gpus / first.gpus:.3g}."
    )
    if found.bend is None:
        return f"{text} The curve has no bend."
    place = next(i for i, one in enumerate(found.points) if one.gpus == found.bend)
    before, point = found.points[place - 1], found.points[place]
    lost = f"; most is lost to {point.lost_to} (+{format_ms(point.lost_ms)})" if point.lost_to else ""
    return (
        f"{text} The curve bends at {point.gpus} GPUs: the step from {before.gpus} is"
        f" {format_percent(point.step_efficiency)} efficient{lost}."
    )


def _curve(found: Series) -> Table:
    known = found.points[0].samples_per_s is not None
    titles = ("GPUs", "step", "speed-up", "efficiency", "of this step", "GPU time")
    extra = ("samples/s", "GPU-h per 1M") if known else ()
    rows = tuple((*_row(point), *(_rates(point) if known else ()), _lost(point)) for point in found.points)
    return Table((*titles, *extra, "most lost to"), rows, len(titles) + len(extra) - 1)


def _row(point: Point) -> Row:
    return (
        str(point.gpus),
        format_ms(point.step_ms),
        three_digits(point.speed_up),
        format_percent(point.efficiency),
        format_percent(point.step_efficiency),
        f"{three_digits(point.gpu_time_ratio)} x",
    )


def _rates(point: Point) -> Row:
    return three_digits(point.samples_per_s or 0.0), three_digits(point.gpu_hours or 0.0)


def _lost(point: Point) -> str:
    return f"{point.lost_to} (+{format_ms(point.lost_ms)})" if point.lost_to else ""


def _beyond_tables(beyond: tuple[Beyond, ...]) -> Iterator[Table]:
    if not beyond:
        return
    rows = []
    for one in beyond:
        if one.step_ms is not None and one.efficiency is not None:
            low, likely, high = map(format_ms, one.step_ms)
            step = f"about {likely} ({low} to {high})"
            share = (
                f"about {format_percent(one.efficiency[1])}"
                f" ({format_percent(one.efficiency[0])} to {format_percent(one.efficiency[2])})"
            )
        else:
            step = f"at least {format_ms(one.least_ms)}" if one.least_ms > 0 else "unknown"
            share = f"at most {format_percent(one.most_efficiency)}" if one.least_ms > 0 else "unknown"
        rows.append((str(one.gpus), step, share, one.confidence))
    yield Table(
        ("GPUs", "step", "efficiency", "confidence"),
        tuple(rows),
        2,
        "Carried on: predictions by replay and bounds, nothing measured",
    )


def _reasons(beyond: tuple[Beyond, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    words: dict[str, list[int]] = {}
    for one in beyond:
        for text in (
            f"not predicted, because {one.reason}" if one.reason else "",
            *(f"predicted if {text}" for text in one.assumptions),
        ):
            if text:
                words.setdefault(text, []).append(one.gpus)
    if words:
        yield (
            "What the predictions rest on",
            tuple(f"{' and '.join(map(str, counts))} GPUs: {text}" for text, counts in words.items()),
        )


def _bars(found: Series) -> Iterator[Bar]:
    most = max(1.0, *(point.efficiency for point in found.points))
    for point in found.points:
        box = Box("compute", 0.0, _FULL * point.efficiency / most)
        yield Bar(
            f"{point.gpus} {'GPU' if point.gpus == 1 else 'GPUs'}", format_percent(point.efficiency), (box,)
        )
    for one in found.beyond:
        if one.efficiency is not None:
            low, likely, high = (min(share / most, 1.0) * _FULL for share in one.efficiency)
            box = Box("predicted", 0.0, likely)
            value = f"about {format_percent(one.efficiency[1])}"
            yield Bar(f"{one.gpus} GPUs, predicted", value, (box,), (low, high))
