"""What several runs say as sheets: a series on more and more GPUs, a history, and fixes that were tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from tracedoc.collector.trial.changes import CannotError, read_change
from tracedoc.comparison.compare import Extrapolation, History, HistoryRun, Point, Series
from tracedoc.diagnosis import BUDGET_PARTS
from tracedoc.ledger import CAUSE_WORDS
from tracedoc.predicted import NOT_MADE, Trials, Tried
from tracedoc.report.charts.bars import Box
from tracedoc.report.comparison_sheet import comparison_sheet, fixed_words, percent_change
from tracedoc.report.sheet import FULL, Row, Sheet, SheetBar, SheetTable
from tracedoc.report.view import tried_words
from tracedoc.units import format_bytes, format_ms, format_percent, three_digits

HISTORY_PARTS = {key: label for key, label, _ in BUDGET_PARTS if key != "idle"} | {
    "input": "input",
    "idle": "other idle time",
}
"""The parts of a step that a history draws, and their words."""


# -- a series: the curve, its bend, and how it would go on


def series_sheet(found: Series) -> Sheet:
    """What a series shows; its last table is the waterfall from the first run to the last."""
    whole = comparison_sheet(found.whole)
    first, last = found.points[0].gpus, found.points[-1].gpus
    caption = f"From {first} to {last} GPUs: the ideal step and the measured one"
    parts = [SheetTable(one.titles, one.rows, one.numbers, caption) for one in whole.tables]
    return Sheet(
        answer=_series_answer(found),
        notes=(
            f"{found.kind.capitalize()} scaling: {found.evidence}. GPU time is that of a sample, against the"
            " first run; GPU-h are hours of one GPU.",
        ),
        bars=tuple(_efficiency_bars(found)),
        bars_caption="Efficiency: the ideal step over the measured one; predictions are pale",
        tables=(_curve(found), *_beyond_tables(found.beyond), *parts),
        lists=(*_reasons(found.beyond), *whole.lists),
        title=whole.title,
        about=whole.about,
    )


def _series_answer(found: Series) -> str:
    first, last = found.points[0], found.points[-1]
    text = (
        f"{format_percent(last.efficiency)} efficiency from {first.gpus} to {last.gpus} GPUs ({found.kind}"
        f" scaling): {three_digits(last.speed_up)} times as fast, ideally {last.gpus / first.gpus:.3g}."
    )
    if found.bend is None:
        return f"{text} The curve has no bend."
    place = next(i for i, one in enumerate(found.points) if one.gpus == found.bend)
    before, point = found.points[place - 1], found.points[place]
    lost = f"; most is lost to {_lost(point)}" if point.lost_to else ""
    return (
        f"{text} The curve bends at {point.gpus} GPUs: the step from {before.gpus} is"
        f" {format_percent(point.step_efficiency)} efficient{lost}."
    )


def _curve(found: Series) -> SheetTable:
    known = found.points[0].samples_per_s is not None
    titles = ("GPUs", "step", "speed-up", "efficiency", "of this step", "GPU time")
    extra = ("samples/s", "GPU-h per 1M") if known else ()
    rows = tuple((*_point(point), *(_rates(point) if known else ()), _lost(point)) for point in found.points)
    return SheetTable((*titles, *extra, "most lost to"), rows, len(titles) + len(extra) - 1)


def _point(point: Point) -> Row:
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


def _beyond_tables(beyond: tuple[Extrapolation, ...]) -> Iterator[SheetTable]:
    if not beyond:
        return
    rows = []
    for one in beyond:
        if one.step_ms is not None and one.efficiency is not None:
            low, likely, high = map(format_ms, one.step_ms)
            step = f"about {likely} ({low} to {high})"
            low, likely, high = map(format_percent, one.efficiency)
            share = f"about {likely} ({low} to {high})"
        else:
            step = f"at least {format_ms(one.least_ms)}" if one.least_ms > 0 else "unknown"
            share = f"at most {format_percent(one.most_efficiency)}" if one.least_ms > 0 else "unknown"
        rows.append((str(one.gpus), step, share, one.confidence))
    caption = "Carried on: predictions by replay and bounds, nothing measured"
    yield SheetTable(("GPUs", "step", "efficiency", "confidence"), tuple(rows), 2, caption)


def _reasons(beyond: tuple[Extrapolation, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    words: dict[str, list[int]] = {}
    for one in beyond:
        said = [f"not predicted, because {one.reason}"] if one.reason else []
        for text in (*said, *(f"predicted if {text}" for text in one.assumptions)):
            words.setdefault(text, []).append(one.gpus)
    if words:
        lines = tuple(f"{' and '.join(map(str, counts))} GPUs: {text}" for text, counts in words.items())
        yield "What the predictions rest on", lines


def _efficiency_bars(found: Series) -> Iterator[SheetBar]:
    most = max(1.0, *(point.efficiency for point in found.points))
    for point in found.points:
        box = Box("compute", 0.0, FULL * point.efficiency / most)
        gpus = f"{point.gpus} {'GPU' if point.gpus == 1 else 'GPUs'}"
        yield SheetBar(gpus, format_percent(point.efficiency), (box,))
    for one in found.beyond:
        if one.efficiency is not None:
            low, likely, high = (min(share / most, 1.0) * FULL for share in one.efficiency)
            value = f"about {format_percent(one.efficiency[1])}"
            box = Box("predicted", 0.0, likely)
            yield SheetBar(f"{one.gpus} GPUs, predicted", value, (box,), (low, high))


# -- a history: one row a run, and what each fix was predicted to give and gave


def history_sheet(found: History) -> Sheet:
    """What a history shows."""
    used = [key for key in HISTORY_PARTS if any(run.parts_ms.get(key, 0.0) > 0 for run in found.runs)]
    lists = (
        ("Fixed: predicted and realised", tuple(_fixed(found))),
        ("Tried on the job", tuple(_tried(found))),
        ("Not compared", tuple(f"{name}: {reason}" for name, reason in found.unread)),
    )
    return Sheet(
        answer=_history_answer(found),
        bars=tuple(_step_bars(found)),
        bars_caption="Where each step goes; the dark line is the step that fixes were predicted to give",
        legend=tuple((key, HISTORY_PARTS[key]) for key in used),
        tables=(_runs(found),),
        lists=tuple((title, items) for title, items in lists if items),
        title=PurePath(found.folder).name,
    )


def _history_answer(found: History) -> str:
    known = [(run.gpus, run.step_ms) for run in found.runs if run.step_ms is not None]
    count = f"{len(found.runs)} {'run' if len(found.runs) == 1 else 'runs'}"
    jobs = len({run.job for run in found.runs})
    if jobs > 1:
        return f"{count} of {jobs} jobs that have nothing in common: each is compared with runs of its own."
    if not known:
        return f"{count}, none with a step to analyse."
    (gpus, step_ms), (last_gpus, last_ms) = known[0], known[-1]
    fixed = len({one.rule_id for run in found.runs for one in run.fixed})
    fixes = (
        f"; {fixed} kinds of findings were fixed" if fixed > 1 else "; one finding was fixed" if fixed else ""
    )
    changed = "" if gpus == last_gpus else f" from {gpus} to {last_gpus} GPUs"
    return f"{count}{changed}: {format_ms(step_ms)} -> {format_ms(last_ms)} a step{fixes}."


def _runs(found: History) -> SheetTable:
    efficiency = any(run.efficiency is not None for run in found.runs)
    titles = ("Run", "GPUs", "step", "computing", *(("efficiency",) if efficiency else ()), "change")
    rows = [_run(run, efficiency=efficiency) for run in found.runs]
    if len({run.job for run in found.runs}) > 1:
        titles = ("Run", "job", *titles[1:])
        rows = [(row[0], str(run.job), *row[1:]) for row, run in zip(rows, found.runs, strict=True)]
    return SheetTable((*titles, "verdict", "costs most", "findings"), tuple(rows), len(titles) - 1)


def _run(run: HistoryRun, *, efficiency: bool) -> Row:
    share = format_percent(run.efficiency) if run.efficiency is not None else ""
    return (
        run.name,
        str(run.gpus),
        format_ms(run.step_ms) if run.step_ms is not None else "",
        format_percent(run.busy_frac) if run.busy_frac is not None else "",
        *((share,) if efficiency else ()),
        percent_change(run.change_frac) if run.change_frac is not None else "",
        run.verdict or run.problem,
        f"{CAUSE_WORDS.get(run.cause, run.cause)} {format_ms(run.cause_ms)}"
        if run.cause_ms is not None
        else "",
        ", ".join(run.findings) or "none",
    )


def _fixed(found: History) -> Iterator[str]:
    for run in found.runs:
        for one in run.fixed:
            yield f"{run.name}: {fixed_words(one, run.realised_ms or 0.0)}"


def _tried(found: History) -> Iterator[str]:
    for run in found.runs:
        for one in run.tried:
            yield f"{run.name}: {one.title}: {tried_words(one)}"


def _step_bars(found: History) -> Iterator[SheetBar]:
    longest = max((run.step_ms for run in found.runs if run.step_ms is not None), default=0.0)
    if longest <= 0:
        return
    before: float | None = None
    for run in found.runs:
        if run.step_ms is None:
            continue
        boxes, x = [], 0.0
        for key, ms in run.parts_ms.items():
            width = FULL * max(ms, 0.0) / longest
            if width > 0:
                boxes.append(Box(key, x, width, f"{HISTORY_PARTS[key]} {format_ms(ms)}"))
            x += width
        gains = [one.predicted_ms for one in run.fixed if one.predicted_ms is not None]
        span = None
        if gains and before is not None:
            # Gains may cover the same time: of several the largest counts.
            low, high = (before - max(gain[place] for gain in gains) for place in (1, 0))
            span = (max(low, 0.0) * FULL / longest, max(high, 0.0) * FULL / longest)
        yield SheetBar(run.name, format_ms(run.step_ms), tuple(boxes), span)
        before = run.step_ms


def trial_sheet(found: Trials) -> Sheet:
    """All that was tried in one go."""
    taken = [one for one in found.tried if one.recommended]
    lists = (
        ("Take over", tuple(f"{one.title}: {one.change}" for one in taken)),
        ("Start it as", tuple(_launch_line(found, taken))),
        ("Why", tuple(f"{one.title}: {one.why}" for one in found.tried if one.why)),
        ("The same training?", tuple(f"{one.title}: {one.training}" for one in found.tried if one.training)),
        ("Not tried", tuple(f"{fix}: {title}: {reason}" for fix, title, reason in found.left_out)),
    )
    return Sheet(
        answer=_answer(found, taken),
        notes=tuple(_notes(found)),
        bars=tuple(_bars(found)),
        bars_caption="The step as it is and with each fix; the dark line is what was predicted",
        tables=(
            SheetTable(
                ("Fix", "predicted", "realised", "95 % interval", "step", "memory", "verdict"),
                tuple(map(_row, found.tried)),
                5,
            ),
        ),
        lists=tuple((title, items) for title, items in lists if items),
    )


def _answer(found: Trials, taken: list[Tried]) -> str:
    best = max(taken, key=lambda one: one.gain_ms[1] if one.gain_ms else 0.0, default=None)
    count = f"{len(found.tried)} {'fix' if len(found.tried) == 1 else 'fixes'} tried"
    if best is None or best.before_ms is None or best.after_ms is None:
        return f"{count}: none makes the step shorter."
    steps = f"{format_ms(best.before_ms)} -> {format_ms(best.after_ms)} a step"
    return f"{best.title}: {steps} ({best.verdict}). {count}, {len(taken)} to take over."


def _notes(found: Trials) -> Iterator[str]:
    yield f"Each run of the job had {found.steps} timed steps, in turns with the job as it is."
    if found.ended:
        yield f"Not all is decided: {found.ended}."


def _row(one: Tried) -> Row:
    predicted = realised = interval = step = memory = ""
    if one.predicted_ms is not None:
        low, high = map(format_ms, one.predicted_ms)
        predicted = f"up to {high}" if one.predicted_ms[0] <= 0 else f"{low} to {high}"
        predicted = predicted if one.predicted_ms[1] > 0 else "nothing"
    if one.gain_ms is not None and one.before_ms is not None and one.after_ms is not None:
        low, realised, high = map(format_ms, one.gain_ms)
        interval = f"{low} to {high}"
        step = f"{three_digits(one.before_ms)} -> {three_digits(one.after_ms)} ms"
    if None not in one.memory_bytes:
        memory = " -> ".join(format_bytes(size) for size in one.memory_bytes if size is not None)
    changed = "" if one.same_training else "; changes the training"
    return one.title, predicted, realised, interval, step, memory, f"{one.verdict}{changed}"


def _launch_line(found: Trials, taken: list[Tried]) -> Iterator[str]:
    """The command with the variables and arguments of the fixes that are worth it; nothing without one."""
    before: list[str] = []
    behind: list[str] = []
    for one in taken:
        try:
            change = read_change(one.change)
        except CannotError:  # several in one
            continue
        before += [f"-u {name}" for name in change.unset]
        before += [f"{name}={value}" for name, value in change.environ.items()]
        behind += change.arguments
    if before or behind:
        lead = ["env"] if any(word.startswith("-u") for word in before) else []
        yield " ".join([*lead, *before, found.command, *behind])


def _bars(found: Trials) -> Iterator[SheetBar]:
    longest = max((max(one.before_ms or 0.0, one.after_ms or 0.0) for one in found.tried), default=0.0)
    first = next((one for one in found.tried if one.before_ms), None)
    if not longest or first is None or first.before_ms is None:
        return
    yield SheetBar(
        "as it is",
        format_ms(first.before_ms),
        (Box("idle", 0.0, FULL * first.before_ms / longest),),
    )
    for one in found.tried:
        if one.after_ms is None or one.before_ms is None or one.verdict == NOT_MADE:
            continue
        span = None
        if one.predicted_ms is not None:
            low, high = (max(one.before_ms - gain, 0.0) for gain in reversed(one.predicted_ms))
            span = (FULL * low / longest, FULL * high / longest)
        box = Box("compute", 0.0, FULL * one.after_ms / longest)
        yield SheetBar(one.title, format_ms(one.after_ms), (box,), span)
