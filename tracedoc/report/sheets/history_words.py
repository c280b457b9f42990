"""What the history of a folder says: one row a run, and what each fix was predicted to give and gave."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.comparison.history import History, HistoryRun
from tracedoc.report.sheets.comparison_words import fixed_words
from tracedoc.report.sheets.sheet import Bar, Box, Row, Sheet, Table
from tracedoc.units import format_ms, format_percent

_PARTS = {
    "compute": "compute",
    "transfer": "exposed transfer",
    "wait": "waiting for peers",
    "pipeline": "waiting in the pipeline",
    "unsplit": "communication (transfer or waiting)",
    "copy": "exposed copies",
    "input": "input",
    "idle": "other idle time",
}
_FULL = 1000.0


def history_sheet(found: History) -> Sheet:
    """Return what a history shows."""
    used = [key for key in _PARTS if any(run.parts_ms.get(key, 0.0) > 0 for run in found.runs)]
    lists = (
        ("Fixed: predicted and realised", tuple(_fixed(found))),
        ("Not compared", tuple(f"{name}: {reason}" for name, reason in found.unread)),
    )
    return Sheet(
        answer=_answer(found),
        bars=tuple(_bars(found)),
        bars_caption="Where each step goes; the dark line is the step that fixes were predicted to give",
        legend=tuple((key, _PARTS[key]) for key in used),
        tables=(_table(found),),
        lists=tuple((title, items) for title, items in lists if items),
    )


def _answer(found: History) -> str:
    known = [run for run in found.runs if run.step_ms is not None]
    count = f"{len(found.runs)} {'run' if len(found.runs) == 1 else 'runs'}"
    if not known:
        return f"{count}, none with a step to analyse."
    first, last = known[0], known[-1]
    assert first.step_ms is not None
    assert last.step_ms is not None
    times = f"{format_ms(first.step_ms)} -> {format_ms(last.step_ms)} a step"
    fixed = len({one.rule_id for run in found.runs for one in run.fixed})
    fixes = (
        f"; {fixed} kinds of findings were fixed" if fixed > 1 else "; one finding was fixed" if fixed else ""
    )
    changed = "" if first.gpus == last.gpus else f" from {first.gpus} to {last.gpus} GPUs"
    return f"{count}{changed}: {times}{fixes}."


def _table(found: History) -> Table:
    efficiency = any(run.efficiency is not None for run in found.runs)
    titles = ("Run", "GPUs", "step", "computing", *(("efficiency",) if efficiency else ()), "change")
    rows = tuple(_row(run, efficiency=efficiency) for run in found.runs)
    return Table((*titles, "verdict", "findings"), rows, len(titles) - 1)


def _row(run: HistoryRun, *, efficiency: bool) -> Row:
    share = format_percent(run.efficiency) if run.efficiency is not None else ""
    return (
        run.name,
        str(run.gpus),
        format_ms(run.step_ms) if run.step_ms is not None else "",
        format_percent(run.busy_frac) if run.busy_frac is not None else "",
        *((share,) if efficiency else ()),
        f"{100 * run.change_frac:+.3g} %" if run.change_frac is not None else "",
        run.verdict or run.problem,
        ", ".join(run.findings) or "none",
    )


def _fixed(found: History) -> Iterator[str]:
    for run in found.runs:
        for one in run.fixed:
            yield f"{run.name}: {fixed_words(one, run.realised_ms or 0.0)}"


def _bars(found: History) -> Iterator[Bar]:
    longest = max((run.step_ms for run in found.runs if run.step_ms is not None), default=0.0)
    if longest <= 0:
        return
    before: float | None = None
    for run in found.runs:
        if run.step_ms is None:
            continue
        boxes, x = [], 0.0
        for key, ms in run.parts_ms.items():
            width = _FULL * max(ms, 0.0) / longest
            if width > 0:
                boxes.append(Box(key, x, width, f"{_PARTS[key]} {format_ms(ms)}"))
            x += width
        gains = [one.predicted_ms for one in run.fixed if one.predicted_ms is not None]
        span = None
        if gains and before is not None:
            # Gains may cover the same time: of several the largest counts.
            low, high = (before - max(gain[place] for gain in gains) for place in (1, 0))
            span = (max(low, 0.0) * _FULL / longest, max(high, 0.0) * _FULL / longest)
        yield Bar(run.name, format_ms(run.step_ms), tuple(boxes), span)
        before = run.step_ms
