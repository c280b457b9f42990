"""Write a diagnosis for a terminal or a pipe: the answer first, the next command last."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from io import StringIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracedoc.diagnosis import Fix, Verdict
from tracedoc.errors import failure
from tracedoc.judge.fixes import framework_name
from tracedoc.report.charts.detail_tables import Table as Cells
from tracedoc.report.charts.detail_tables import collective_table, kernel_table, phase_table, unit_table
from tracedoc.report.step_parts import IDEAL, IN_TURN, TODAY, Segment
from tracedoc.report.texts import one_line
from tracedoc.report.view import (
    FindingView,
    View,
    budget_words,
    holds_text,
    instances_text,
    side_text,
)
from tracedoc.report.words import FINDINGS_NOTE, predicted_words, resource_name
from tracedoc.units import format_ms, format_percent, format_step_change

SHOWN_UNITS = 6
"""The page has the table of all units; the terminal shows the worst."""

UNIT_COLUMNS = ("Unit", "Pass", "Size", "Gather", "Transfer", "Compute to hide behind", "Stall")
COLLECTIVE_COLUMNS = (
    "Operation", "Ranks", "Calls", "Median size", "Time", "Exposed", "Wait", "Transfer", "Bus bandwidth"
)  # fmt: skip
"""Those of the page's columns that a terminal has room for."""

WATERFALL_WIDTH = 20

_STYLES = {"critical": "bold red", "warning": "bold yellow", "note": "bold blue"}
_GLYPHS = {
    "compute": "█",
    "transfer": "▓",
    "wait": "▒",
    "pipeline": "▒",
    "unsplit": "▓",
    "copy": "░",
    "idle": "·",
}
_COLOURS = {
    "compute": "green",
    "transfer": "red",
    "wait": "magenta",
    "pipeline": "magenta",
    "unsplit": "red",
    "copy": "yellow",
    "idle": "bright_black",
}
_ENDS = {TODAY: "bold", IDEAL: "green"}
_ASCII = str.maketrans({"█": "#", "▓": "=", "▒": "~", "░": ":", "·": ".", "–": "-", "─": "-"})


def render_text(
    view: View,
    *,
    next_command: str,
    run: str = "RUN",
    verdicts: bool = False,
    top: int = 0,
    width: int = 0,
    color: bool = False,
) -> str:
    """Return the report as text; without ``color`` it holds no escape sequence.

    ``width`` 0 means a pipe: the answer then stays on one line, so that ``head -1`` is the whole answer.
    ``verdicts`` adds what every rule said, with its comparisons, ``top`` so many kernels and collectives.
    ``run`` is how commands name the run.
    """
    console = text_console(width, color=color)
    console.print(Text(one_line(view.diagnosis.summary), "bold"), soft_wrap=not width)
    for line in filter(None, (view.run, view.throughput, view.diagnosis.run.command)):
        console.print(Text(one_line(line), "dim"), soft_wrap=not width)
    for name, show in SECTIONS.items():
        if name != ("what rules said" if verdicts else "verdicts"):
            _safely(console, name, partial(show, run=run) if show is _findings else show, view)
        if top and name == "the split of the step":
            _safely(console, "phases, kernels and collectives", partial(_top, most=top), view)
    return printed_text(console, next_command)


def render_rule(view: View, name: str, *, run: str, width: int = 0) -> str:
    """What a rule, or those that tell a cause, say of a run: findings with all fitting fixes, or why not.

    ``run`` is how the next command names the run.
    """
    console = text_console(width, color=False)
    console.print(Text(one_line(view.run), "dim"), soft_wrap=not width)
    ledger = view.diagnosis.ledger
    causes = [one for one in (ledger.causes if ledger is not None else ()) if one.id == name]
    names = {name, *(rule_id for one in causes for rule_id in one.told_by)}
    mine = [one for one in view.findings if one.finding.rule_id in names]
    for finding in mine:
        console.print()
        _finding(console, finding, run, whole=True)
    if not mine:
        console.print()
        verdicts = [one for one in view.diagnosis.verdicts if one.rule_id == name]
        for verdict in verdicts:
            _verdict(console, verdict)
        if not verdicts:
            ms = sum(one.share_ms for one in causes)
            console.print(Text(f"{name} costs {format_ms(ms)} of the step."))
    return printed_text(console, f"tracedoc {'whatif' if mine else 'diagnose'} {run}")


def _safely(console: Console, name: str, show: Callable[..., None], part: View | FindingView) -> None:
    try:
        show(console, part)
    except Exception as error:
        console.print(Text(f"The part with {name} could not be shown: {failure(name, error)}"))


def to_ascii(text: str) -> str:
    """Return the text for a terminal without block characters; what is left over becomes ``?``."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def bar_cells(parts: tuple[Segment, ...], width: int) -> tuple[int, ...]:
    """The cells of ``width`` that each part takes: largest remainders, at least one each."""
    if not parts:
        return ()
    total = sum(part.share for part in parts)
    exact = [part.share / total * width for part in parts]
    cells = [max(1, int(value)) for value in exact]
    while sum(cells) < width:
        cells[max(range(len(cells)), key=lambda i: exact[i] - cells[i])] += 1
    while sum(cells) > width and max(cells) > 1:
        cells[max(range(len(cells)), key=lambda i: (cells[i] > 1, cells[i] - exact[i]))] -= 1
    return tuple(cells)


def _waterfall(console: Console, view: View) -> None:
    """Show what each cause costs, from today's step to the ideal one."""
    fall = view.waterfall
    if fall is None:
        return
    if not fall.lines:
        console.print()
        console.print(Text(f"What costs the step is not known: {one_line(fall.reason)}.", "dim"))
        return
    heading(console, "What costs the step", fall.of)
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(width=WATERFALL_WIDTH)
    for _ in range(2):
        rows.add_column(justify="right", no_wrap=True)
    rows.add_column(overflow="fold")
    for line in fall.lines:
        cells = max(1, round(line.share * WATERFALL_WIDTH))
        start = min(int(line.start * WATERFALL_WIDTH), WATERFALL_WIDTH - cells)
        style = _STYLES.get(line.key, _ENDS.get(line.key, ""))
        glyph = "█" if line.key in _ENDS else "▓"
        bar = Text(" " * start).append(glyph * cells, style)
        number = (f"  finding {line.number}", style) if line.number else ""
        note = (f" ({one_line(line.note)})" if line.note else "", "dim")
        rows.add_row(bar, format_ms(line.ms), line.percent, Text.assemble(line.words, note, number))
    console.print(rows)
    console.print(Text(IN_TURN, "dim"))


def _budget(console: Console, view: View) -> None:
    if not view.segments:
        return
    heading(console, "Where the step goes", view.where)
    bar = Text()
    for part, count in zip(view.segments, bar_cells(view.segments, min(console.width, 80)), strict=True):
        bar.append(_GLYPHS[part.key] * count, _COLOURS[part.key])
    console.print(bar)
    rows = _aligned(numbers=2)
    rows.add_column(style="dim")
    for part in view.segments:
        label = Text.assemble((_GLYPHS[part.key], _COLOURS[part.key]), " ", part.label)
        rows.add_row(label, format_ms(part.ms), format_percent(part.share), Text(one_line(part.note)))
    console.print(rows)
    if view.overlap:
        console.print(Text(view.overlap, "dim"))


def _aligned(*, numbers: int, gap: int = 2) -> Table:
    """A table of a column of names and so many of numbers."""
    rows = Table.grid(padding=(0, gap))
    rows.add_column(no_wrap=True)
    for _ in range(numbers):
        rows.add_column(justify="right", no_wrap=True)
    return rows


def _cells(console: Console, title: str, table: Cells, beside: str) -> None:
    """A table of the page as text, with a title and words beside it."""
    heading(console, title, beside)
    rows = Table.grid(padding=(0, 2))
    for position, number in enumerate(table.numbers):
        rows.add_column(justify="right" if number else "left", no_wrap=position > 0, overflow="fold")
    rows.add_row(*(Text(name.lower(), "dim") for name in table.titles))
    for row in table.rows:
        rows.add_row(*map(Text, row))
    console.print(rows)


def _plan(console: Console, view: View) -> None:
    """Show the fixes in the order in which they pay."""
    plan = view.diagnosis.plan
    if len(plan) + len(view.unplanned) < 2:
        return
    heading(console, "Plan", "the step with each fix and those before it")
    rows = Table.grid(padding=(0, 2))
    for number, one in enumerate(plan, 1):
        change = format_step_change(one.replay_of_step_ms, one.step_ms)
        limit = f"then mostly {resource_name(one.then_limited_by)}" if one.then_limited_by else ""
        rows.add_row(str(number), Text(change, "green"), Text(one_line(one.title)), Text(limit, "dim"))
    console.print(rows)
    for words in view.unplanned:
        bullet(console, Text(one_line(words), "dim"))


def _budgets(console: Console, view: View) -> None:
    """Show the performance budgets that the project set itself."""
    if not view.diagnosis.budgets:
        return
    heading(console, "Budgets")
    for check in view.diagnosis.budgets:
        words, style = budget_words(check), "green" if check.outcome == "met" else "bold red"
        bullet(console, Text(one_line(words), style))


def _findings(console: Console, view: View, *, run: str) -> None:
    if view.findings:
        heading(console, "Findings", FINDINGS_NOTE)
    for finding in view.findings:
        if finding.number > 1:
            console.print()
        _safely(console, finding.finding.rule_id, partial(_finding, run=run), finding)


def _finding(console: Console, view: FindingView, run: str, *, whole: bool = False) -> None:
    """Show a finding with its first fix, or ``whole`` with its reasoning and every fix that fits."""
    finding = view.finding
    style = _STYLES.get(finding.severity, "bold")
    console.print(
        Text.assemble(
            (f"{view.number}  ", "bold"),
            (finding.severity, style),
            (f"  {one_line(finding.title)}", "bold"),
            (f"  [{finding.rule_id}]", "dim"),
        )
    )
    _hanging(console, 3, "", Text(one_line(finding.message)))
    _hanging(console, 3, "", Text(view.place, "dim"))
    # The whole reasoning once, and no code for notes that are not planned: it would bury the next one.
    first = view.number == 1 or whole
    brief = finding.severity == "note" and not (first or view.planned)
    if finding.why and first:
        _hanging(console, 9, "why", Text(one_line(finding.why)))
    predicted = view.fixes[0].predicted if view.fixes else None
    if view.gain and predicted is None:
        _hanging(console, 9, "step", Text.assemble((view.gain, "green"), _provided(view.assumptions)))
    shown = view.fixes if whole else view.fixes[:1]
    if predicted is None and not whole:  # what to look at, and then what is known to help
        shown += tuple(one for one in view.fixes[1:] if one.predicted is not None and one.predicted.helps)[:1]
    for fix in shown:
        _fix(console, fix, run, brief=brief)
    others = len(view.fixes) - len(shown)
    more = ["how", "why"] if brief and view.fixes else ["why"] if finding.why and not first else []
    if others > 0:
        more.append(f"{others} other fix{'es' * (others > 1)}")
    if more:
        of_run = f" {run}" if brief or others > 0 else ""
        command = f"tracedoc explain {finding.rule_id}{of_run}"
        _command(console, "more", f"{', '.join(more)}: {command}")


def _fix(console: Console, fix: Fix, run: str, *, brief: bool = False) -> None:
    """Show a fix: how, at what risk, and the step with it; ``brief`` for what it is and the step only."""
    name = "" if fix.framework == "any" else framework_name(one_line(fix.framework))
    _hanging(console, 9, "fix", Text.assemble(one_line(fix.title), (f" ({name})" if name else "", "dim")))
    if not brief:
        if fix.advice:
            _hanging(console, 9, "", Text(one_line(fix.advice)))
        _code(console, fix.change)
        if fix.risk and fix.risk != "none":
            _hanging(console, 9, "risk", Text(one_line(fix.risk)))
    if fix.predicted is not None:
        helps = fix.predicted.helps
        words = (predicted_words(fix.predicted, fix.after_plan_ms), "green" if helps else "dim")
        provided = _provided("; ".join(fix.predicted.assumptions)) if helps else ""
        _hanging(console, 9, "step", Text.assemble(words, provided))
        if fix.replays and helps and not brief:
            command = f"tracedoc whatif {run} {shlex.quote(one_line(fix.replays))}"
            _command(console, "try", command)


def _command(console: Console, label: str, command: str) -> None:
    """A command beside a label, on one line: one that is wrapped cannot be pasted."""
    console.print(Text(f"   {label:6}{command}", "dim"), soft_wrap=True)


def _provided(assumptions: str) -> str:
    return f", if {one_line(assumptions)}" if assumptions else ""


def _units(console: Console, view: View) -> None:
    """Show the units that stall most, where a finding is about sharding."""
    about = any(one.finding.topic == "sharding" for one in view.findings)
    stalled = [row for row in view.diagnosis.detail.units if row.stall_ms]
    stalled = sorted(stalled, key=lambda row: -(row.stall_ms or 0.0))[:SHOWN_UNITS]
    table = unit_table(stalled)
    if about and table is not None:
        _cells(console, "Sharded units", table.only(UNIT_COLUMNS), "those that stall most; medians a step")


def _top(console: Console, view: View, *, most: int) -> None:
    """Show the phases, the kernels that lose most time of the analysed step, and the longest collectives."""
    detail = view.diagnosis.detail
    if (phases := phase_table(detail.phases)) is not None:
        _cells(console, "Phases", phases, "of the analysed step; forward lasts until backward begins")
    kernels = kernel_table(detail.kernels)
    if kernels is not None:
        _cells(console, "Kernels", kernels.first(most), "of the analysed step, those that lose most first")
    collectives = collective_table(detail.collectives)
    if collectives is not None:
        shown = collectives.only(COLLECTIVE_COLUMNS).first(most)
        _cells(console, "Collectives", shown, "of the analysed step, with most time first")


def _code(console: Console, change: str) -> None:
    for line in change.strip("\n").expandtabs(4).split("\n") if change else ():
        # Code is never wrapped: a wrapped line cannot be pasted.
        console.print(Text(f"         {line}", "cyan"), soft_wrap=True)


def _hanging(console: Console, indent: int, label: str, text: Text) -> None:
    rows = Table.grid()
    rows.add_column(width=indent)
    rows.add_column(overflow="fold")
    rows.add_row(Text(f"   {label}" if label else "", "dim"), text)
    console.print(rows)


def _limits(console: Console, view: View) -> None:
    if not view.limits:
        return
    heading(console, "Limits", "what this capture cannot show")
    for limit in view.limits:
        severity = (f"{limit.severity}  ", _STYLES.get(limit.severity, "bold")) if limit.severity else ""
        bullet(console, Text.assemble(severity, limit.text, (f"  [{limit.code}]", "dim")))
        if limit.fix is not None:
            _hanging(console, 9, "fix", Text(one_line(limit.fix.title)))
            _code(console, limit.fix.change)


def _bookkeeping(console: Console, view: View) -> None:
    if not view.outcomes:
        return
    console.print()
    console.print(Text(f"{view.outcomes}  (--verdicts lists them)", "dim"))


def _verdicts(console: Console, view: View) -> None:
    heading(console, "Verdicts", view.outcomes)
    for verdict in view.diagnosis.verdicts:
        _verdict(console, verdict)


def _verdict(console: Console, verdict: Verdict) -> None:
    reason = f"  {one_line(verdict.reason)}" if verdict.reason else ""
    console.print(
        Text.assemble(
            (f"{verdict.outcome.replace('_', ' '):14}", "dim"), " ", (verdict.rule_id, "bold"), reason
        )
    )
    for comparison in verdict.comparisons:
        sides = f"{side_text(comparison.left)} against {side_text(comparison.right)}"
        why = f" ({one_line(comparison.reason)})" if comparison.reason else ""
        text = Text.assemble(
            (one_line(comparison.text), "cyan"),
            f"  {holds_text(comparison, verdict)}: {one_line(sides)}{why}",
        )
        console.print(Padding(text, (0, 0, 0, 15)))
    if instances := instances_text(verdict):
        console.print(Padding(Text(instances, "dim"), (0, 0, 0, 15)))


SECTIONS: dict[str, Callable[..., None]] = {
    "what costs the step": _waterfall,
    "budgets": _budgets,
    "findings": _findings,
    "plan": _plan,
    "sharded units": _units,
    "the split of the step": _budget,
    "limits": _limits,
    "verdicts": _verdicts,
    "what rules said": _bookkeeping,
}
"""The parts of the report in order. One that fails costs the others nothing."""


PIPE_WIDTH = 100
"""Columns where the width is not known."""


def text_console(width: int, *, color: bool) -> Console:
    """Return a console that keeps what is printed; ``width`` 0 means a pipe.

    Without ``color`` no escape sequence is printed. Nothing is taken for markup or an emoji: names come from
    files.
    """
    return Console(
        file=StringIO(),
        width=width or PIPE_WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def heading(console: Console, title: str, rest: str = "") -> None:
    """Print the heading of a part, with words beside it."""
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {rest}" if rest else "", "dim")))


def bullet(console: Console, text: Text) -> None:
    """Print an item of a list; its later lines begin under its first word."""
    rows = Table.grid()
    rows.add_column(width=3)
    rows.add_column(overflow="fold")
    rows.add_row("-", text)
    console.print(rows)


def printed_text(console: Console, next_command: str) -> str:
    """The text printed on a console of :func:`text_console`, and the next command as its last line."""
    console.print()
    console.print(Text.assemble(("next: ", "dim"), (next_command, "bold")), soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
