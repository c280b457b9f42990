"""``tracedoc try``: start the job again with its fixes, and say what each gave."""

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
    possible_and_not,
    quiet_option,
    say,
    show,
    targets,
    write_sheet,
)
from tracedoc.cli.reading import run_pipeline, show_debug
from tracedoc.errors import InputError
from tracedoc.run.untrusted import entry_at

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.predicted import Trials
    from tracedoc.run.manifest import Manifest
    from tracedoc.trials.fixes import Candidate
    from tracedoc.trials.one_run import Job
    from tracedoc.trials.turns import Progress, Turns

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
        show(rows, report_format, lambda: _listing(known))
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


def _listing(known: Sequence[Candidate]) -> str:
    items = [(f"{one.fix}: {one.title}", one.text.splitlines(), one.cannot) for one in known]
    lines = possible_and_not(("These can be tried:", "These cannot:"), items)
    return "\n".join(lines or ["This run has no fix to try."]) + "\n"
