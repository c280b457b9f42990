"""What came of fixes that were tried, as a sheet: the answer, a table, the change to paste."""

from __future__ import annotations

from collections.abc import Iterator

from tracedoc.collector.trial.changes import CannotError, read_change
from tracedoc.predicted import NOT_MADE, Trials, Tried
from tracedoc.report.charts.bars import Box
from tracedoc.report.sheet import FULL, Row, Sheet, SheetBar, SheetTable
from tracedoc.units import format_bytes, format_ms, three_digits


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
