"""``tracedoc whatif``: replay the analysed step with changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import format_option, possible_and_not, show
from tracedoc.cli.reading import Reading, reading_options, run_measurement
from tracedoc.errors import ChangeError

LEAST_TOLD = 0.001
"""Causes that cost less than this share of the step are left out of the table."""

if TYPE_CHECKING:
    from tracedoc.ledger import Ledger
    from tracedoc.predicted import Predicted, WhatIf


@click.command(short_help="Replay the step with changes: what would it be then?")
@click.argument("path", metavar="RUN", shell_complete=files)
@click.argument("changes", nargs=-1, metavar="[CHANGE...]")
@click.option("--list", "listing", is_flag=True, help="List all changes, and why some cannot be made here.")
@format_option()
@click.option("--json", "report_format", flag_value="json", hidden=True)
@reading_options
def whatif(
    path: str,
    changes: tuple[str, ...],
    listing: bool,
    report_format: str | None,
    reading: Reading,
) -> None:
    """Replay the analysed step of RUN with changes, and say how long it would take.

    A CHANGE is a name, with parameters in one word with it or quoted together. Several are made alone, and
    one on top of the other. Without one, the critical path is shown, and what each cause costs the step.

    \b
    Examples:
      tracedoc whatif runs/a                              what costs the step
      tracedoc whatif runs/a --list                       what can be changed
      tracedoc whatif runs/a no-sync
      tracedoc whatif runs/a "faster-link by=2" feed-input
      tracedoc whatif runs/a "even-rank rank=3" -f json | jq .alone
    """
    from tracedoc.pipeline import Options
    from tracedoc.whatif.answer import list_changes, what_if
    from tracedoc.whatif.changes.registry import parse_request

    if listing and changes:
        raise ChangeError("--list takes no change", "leave the changes out, or --list")
    requests = [parse_request(text) for text in changes]
    options = Options(**reading)
    run = run_measurement((path,), options).run
    if listing:
        names, listed = ("change", "parameters", "does", "not_applicable"), list_changes(run)
        rows = [dict(zip(names, row, strict=True)) for row in listed]
        show(rows, report_format, lambda: _listing(listed))
        return
    answer = what_if(run, requests)
    show(answer, report_format, lambda: answer_text(answer, many=len(run.digests) > 1))


def _listing(changes: list[tuple[str, str, str, str]]) -> str:
    from tracedoc.report.texts import one_line, plain

    items = [
        (f"{name} {parameters}", [does], one_line(plain(reason)))
        for name, parameters, does, reason in changes
    ]
    return (
        "\n".join(possible_and_not(("These can be replayed with this run:", "These cannot:"), items)) + "\n"
    )


def answer_text(answer: WhatIf, *, many: bool) -> str:
    """Return the answer as text."""
    from tracedoc.predicted import NotPredicted
    from tracedoc.report.texts import one_line, plain
    from tracedoc.report.words import piece_words, shares_of
    from tracedoc.units import format_step_change

    replay = answer.replay
    if replay.state != "used" or replay.step_ms is None:
        lines = [f"No prediction: {one_line(plain(replay.reason))}."]
        lines += ["", *_ledger_lines(answer.ledger)] if answer.ledger is not None else []
        return "\n".join(lines) + "\n"
    lines = [_head(answer)]
    if not answer.alone:
        lines += ["", f"Critical path: {shares_of(replay.path)}"]
        lines += [f"  {one_line(plain(piece_words(piece, ranks=many)))}" for piece in replay.longest]
        lines += ["", *_ledger_lines(answer.ledger)] if answer.ledger is not None else []
    for one in answer.alone:
        lines += ["", one.change]
        if isinstance(one, NotPredicted):
            lines.append(f"  cannot be made to this run: {one_line(plain(one.reason))}")
        else:
            lines += _prediction_lines(one)
    if answer.together:
        lines += ["", "One on top of the other:"]
        lines += [
            f"  {format_step_change(one.before_ms, one.step_ms):44} {one.change}" for one in answer.together
        ]
    lines += [f"\nNote: {one_line(plain(note))}." for note in replay.notes]
    return "\n".join(lines) + "\n"


def _ledger_lines(ledger: Ledger) -> list[str]:
    """What each cause costs the mean captured step, as a table."""
    from tracedoc.report.texts import one_line, plain
    from tracedoc.report.waterfall import cause_note, unexplained_words
    from tracedoc.units import format_ms

    if not ledger.step_ms:
        return [f"No ledger: {one_line(plain(ledger.reason))}."]
    lines = [
        f"The mean captured step, {format_ms(ledger.step_ms)}, by what costs it:",
        f"  {'share':>8}  {'alone':>8}  {'last':>8}  cause",
    ]
    for one in ledger.causes:
        if max(one.share_ms, one.alone_ms[1]) < LEAST_TOLD * ledger.step_ms:
            continue
        shown = "  ".join(f"{format_ms(ms):>8}" for ms in (one.share_ms, one.alone_ms[1], one.last_ms))
        note = f" ({cause_note(one)})" if cause_note(one) else ""
        lines.append(f"  {shown}  {one_line(plain(f'{one.id}: {one.words}{note}'))}")
    words = ", ".join(filter(None, ("without all of them", unexplained_words(ledger))))
    return [*lines, f"  {format_ms(ledger.ideal_ms):>8}{'':22}{words}"]


def _head(answer: WhatIf) -> str:
    from tracedoc.units import format_percent, three_digits

    replay = answer.replay
    error = format_percent(replay.model_error_frac or 0.0)
    step = f" {replay.step}" if replay.step is not None else ""
    step_ms = three_digits(replay.step_ms or 0.0)
    return f"Step{step}: {step_ms} ms, replayed within {error}. Confidence: {replay.confidence}."


def _prediction_lines(one: Predicted) -> list[str]:
    from tracedoc.units import format_step_change

    then = f", then limited by {one.then_limited_by}" if one.then_limited_by else ""
    lines = [f"  {format_step_change(one.before_ms, one.step_ms)}{then}"]
    if one.assumptions:
        lines.append(f"  if {'; '.join(one.assumptions)}")
    return lines
