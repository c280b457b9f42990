"""``tracedoc whatif`` and ``tracedoc try``: what fixes give in a replay, and in the job started again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from tracedoc.cli import EXIT_INTERRUPTED
from tracedoc.cli.completion import files, folders
from tracedoc.cli.output import (
    SHEET_FORMATS,
    format_option,
    is_quiet,
    output_option,
    quiet_option,
    say,
    show,
    targets,
    write_sheet,
)
from tracedoc.cli.reading import Reading, reading_options, run_measurement, run_pipeline, show_debug
from tracedoc.errors import ChangeError, InputError
from tracedoc.run.untrusted import entry_at

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.ledger import Ledger
    from tracedoc.predicted import Predicted, Trials, WhatIf
    from tracedoc.run.manifest import Manifest
    from tracedoc.trials.fixes import Candidate
    from tracedoc.trials.one_run import Job
    from tracedoc.trials.turns import Progress, Turns

LEAST_TOLD = 0.001
"""Causes that cost less than this share of the step are left out of the table."""


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
        show(rows, report_format, lambda: _changes(listed))
        return
    answer = what_if(run, requests)
    show(answer, report_format, lambda: answer_text(answer, many=len(run.digests) > 1))


def _changes(changes: Sequence[tuple[str, str, str, str]]) -> str:
    from tracedoc.report.texts import one_line, plain

    items = [
        (f"{name} {parameters}".rstrip(), [does], one_line(plain(reason)))
        for name, parameters, does, reason in changes
    ]
    return _possible_and_not(("These can be replayed with this run:", "These cannot:"), items)


def _possible_and_not(titles: tuple[str, str], items: Sequence[tuple[str, Sequence[str], str]]) -> str:
    """What can be done, each with words about it, and what cannot, with the reason."""
    lines: list[str] = []
    for title, possible in zip(titles, (True, False), strict=True):
        mine = [one for one in items if (not one[2]) == possible]
        lines += ([""] if lines and mine else []) + ([title] if mine else [])
        for name, about, reason in mine:
            lines += [f"  {name}", *(f"      {line}" for line in (about if possible else [reason]))]
    return "".join(f"{line}\n" for line in lines)


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
    from tracedoc.report.step_parts import cause_note, unexplained_words
    from tracedoc.report.texts import one_line, plain
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


TIMED_STEPS = 30
TIMED_SECONDS = 3.0
"""Starting a job takes longer than that; means of shorter times differ more from run to run."""
_COMMAND = "tracedoc.try.command"


class _BeforeDashes(click.Command):
    """A command whose own words end at ``--``: what follows is another command, as it would be typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = tuple(args[place + 1 :])
        return super().parse_args(ctx, args[:place])


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds of ``90s``, ``15m`` or ``2h``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is no time such as 90s, 15m or 2h", ctx, param)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _variables(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", value, re.DOTALL):
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", ctx, param)
    return dict(value.split("=", 1) for value in values)


@click.command(
    "try", cls=_BeforeDashes, short_help="Start the job again with its fixes: what does each give?"
)
@click.argument("path", metavar="RUN", shell_complete=files)
@click.argument("fixes", nargs=-1, metavar="[FIX...] [-- COMMAND...]")
@click.option(
    "--list", "listing", is_flag=True, help="List the fixes that can be tried, and why others cannot."
)
@click.option("--all", "every", is_flag=True, help="Try every fix that can be. [the first three]")
@click.option("--together", "as_one", is_flag=True, help="Try them all at once, too.")
@click.option(
    "--steps", type=click.IntRange(min=5), help="Steps to time in a run. [30, or as many as take 3 s]"
)
@click.option(
    "--warmup", type=click.IntRange(min=1), default=10, show_default=True, help="Steps before them."
)
@click.option(
    "--budget", callback=_seconds, default="15m", show_default=True, metavar="TIME", help="Longest time."
)
@click.option(
    "--env", "variables", multiple=True, callback=_variables, metavar="NAME=VALUE", help="Set for the job."
)
@click.option("--cwd", metavar="DIR", shell_complete=folders, help="Where the job starts. [as captured]")
@click.option(
    "--record", metavar="FILE", shell_complete=files, help="Add predictions and outcomes as JSON lines."
)
@format_option("markdown", "html")
@output_option(".txt, .json, .md, .html, .png, .svg or .pdf")
@quiet_option
@click.option("--debug", is_flag=True, help="Show where errors come from.")
@click.pass_context
def try_(
    ctx: click.Context,
    /,
    path: str,
    fixes: tuple[str, ...],
    listing: bool,
    every: bool,
    as_one: bool,
    budget: float,
    record: str | None,
    report_format: str | None,
    outputs: tuple[str, ...],
    debug: bool,
    **start: Any,
) -> None:
    """Start the job of RUN again with its fixes, in turns with the job as it is.

    Each run ends after a few timed steps, without a profiler. Fixes are made
    as the job starts: no file of yours is changed. A FIX is a finding, one
    of its fixes as --list names them, or a change as you would paste it.

    \b
    Examples:
      tracedoc try runs/a --list
      tracedoc try runs/a
      tracedoc try runs/a small-gradient-buckets unfused-optimizer/0
      tracedoc try runs/a "DataLoader(num_workers=4)" "OMP_NUM_THREADS=2"
      tracedoc try runs/a --together --budget 30m -o tried.html
      tracedoc try runs/a -- torchrun --nproc_per_node 8 train.py

    Ctrl-C ends every process of the job and shows what is known by then.
    """
    show_debug(debug)
    if not os.path.isdir(path):
        raise InputError(f"{path} is no folder of a run", "give the folder that tracedoc collect wrote")
    places = targets(report_format, outputs, (path,), SHEET_FORMATS)
    from tracedoc.pipeline import Options
    from tracedoc.report.series_sheets import trial_sheet
    from tracedoc.run.manifest import read_manifest
    from tracedoc.trials.fixes import candidates, choose, together

    manifest = read_manifest(Path(path))
    diagnosis = run_pipeline((path,), Options(cache=True))
    known = candidates(diagnosis, _framework(manifest))
    if listing:
        rows = [
            {"fix": one.fix, "title": one.title, "change": one.text, "predicted_ms": one.predicted_ms,
             "cannot": one.cannot}
            for one in known
        ]  # fmt: skip
        show(rows, report_format, lambda: _fixes(known))
        return
    chosen = choose(known, fixes, every=every)
    if as_one and len(chosen) > 1:
        chosen.append(together(chosen, diagnosis))
    job = _job(manifest, ctx.meta[_COMMAND], **start)
    found, interrupted = _take_turns(job, chosen, known, budget)
    _keep(found, diagnosis, Path(path), record)
    sheet = trial_sheet(found)
    write_sheet(places, found, sheet, sheet)
    if interrupted:
        ctx.exit(EXIT_INTERRUPTED)


def _framework(manifest: Manifest | None) -> Mapping[str, Any]:
    """What the first rank that was captured says of the job's live objects."""
    ranks = manifest.ranks if manifest is not None else ()
    return next((found for rank in ranks if (found := entry_at(rank.part or {}, "framework"))), {})


def _job(
    manifest: Manifest | None,
    given: tuple[str, ...],
    *,
    steps: int | None,
    warmup: int,
    variables: dict[str, str],
    cwd: str | None,
) -> Job:
    """What to start: the command that was given, else the captured one, where it was started."""
    from tracedoc.collector.launcher import check_command
    from tracedoc.trials.one_run import Job

    node = manifest.nodes[0] if manifest is not None and manifest.nodes else {}
    recorded = node.get("command")
    command = given or tuple(map(str, recorded)) if isinstance(recorded, list) else given
    if not command:
        raise InputError("this run does not keep its command", "give it: tracedoc try RUN -- COMMAND")
    if any("<hidden>" in word for word in command):
        raise InputError(
            "the command held what may be a secret, which is not kept", "give it: tracedoc try RUN -- COMMAND"
        )
    folder = Path(cwd or str(node.get("cwd") or "."))
    if not folder.is_dir():
        raise InputError(
            f"{folder}, where the job was started, is not here", "name another folder with --cwd"
        )
    check_command(command)
    environ = {**os.environ, **variables}
    return Job(
        command,
        folder.absolute(),
        environ,
        warmup,
        steps or TIMED_STEPS,
        0.0 if steps else TIMED_SECONDS,
    )


def _take_turns(
    job: Job, chosen: Sequence[Candidate], known: Sequence[Candidate], budget_s: float
) -> tuple[Trials, bool]:
    from tracedoc.collector.launcher import public_command
    from tracedoc.predicted import Trials
    from tracedoc.trials.turns import Turns

    words = shlex.join(public_command(job.command))
    say(f"tracedoc: starts {words}")
    say(
        f"tracedoc: in {job.folder}, several times for some {job.wait + job.steps} steps, at most"
        f" {budget_s / 60:.3g} min: what it writes, it writes each time (steer it: --env, --cwd, -- COMMAND)"
    )
    interrupted = False
    with _progress() as tell, _ended_by_sigterm():
        turns: Turns = Turns(job, chosen, budget_s, tell)
        try:
            turns.take()
        except KeyboardInterrupt:
            interrupted = True
    left_out = tuple((one.fix, one.title, one.cannot) for one in known if one.cannot)
    return Trials(words, turns.steps, turns.known, left_out, turns.ended), interrupted


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the job's processes, too, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield what tells how far trials are: a line that is redrawn on a terminal, else a line for each run."""
    from rich.console import Console
    from rich.status import Status

    from tracedoc.report.view import tried_words

    def words(now: Progress) -> str:
        done = "; ".join(f"{one.title}: {tried_words(one)}" for one in now.known if one.gain_ms)
        return f"{now.title}: step {now.step} of {now.steps}{f' ({done})' if done else ''}"

    if not sys.stderr.isatty() or is_quiet():
        yield lambda now: say(f"tracedoc: {words(now)}") if now.step == 0 else None
        return
    with Status("", console=Console(stderr=True)) as status:
        yield lambda now: status.update(words(now))


def _keep(found: Trials, diagnosis: Diagnosis, folder: Path, named: str | None) -> None:
    """Keep what was tried beside the run, and in the records."""
    from tracedoc.predicted import keep_tried
    from tracedoc.trials.fixes import record

    try:
        keep_tried(folder, found)
    except OSError as error:
        say(f"tracedoc: {folder} cannot keep what was tried: {error.strerror}")
    try:
        record(found, diagnosis, Path(named) if named else None)
    except OSError as error:
        raise InputError(f"{named} cannot be written: {error.strerror}", "name another file") from None


def _fixes(known: Sequence[Candidate]) -> str:
    items = [(f"{one.fix}: {one.title}", one.text.splitlines(), one.cannot) for one in known]
    return (
        _possible_and_not(("These can be tried:", "These cannot:"), items) or "This run has no fix to try.\n"
    )
