"""``tracedoc collect``: run a training command and capture a few steps of every rank."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracedoc.cli.completion import files, folders
from tracedoc.cli.output import Command, is_quiet, quiet_option, say
from tracedoc.run.untrusted import value_at

if TYPE_CHECKING:
    from tracedoc.collector.launcher import Outcome
    from tracedoc.collector.options import Options
    from tracedoc.run.manifest import ManifestRank


def _ranks(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from tracedoc.collector.options import listed_ranks

    try:
        listed_ranks(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of ranks such as 0,4-7", ctx, param) from None
    return value


def _number(
    name: str, default: float, metavar: str, words: str, *, least: int = 0
) -> Callable[[Command], Command]:
    """An option for a number from ``least`` on, or above it where ``default`` is no whole number."""
    whole = isinstance(default, int)
    kind = click.IntRange(min=least) if whole else click.FloatRange(min=least, min_open=True)
    return click.option(name, type=kind, default=default, show_default=True, metavar=metavar, help=words)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a training command and capture a few steps of every rank.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...", shell_complete=files)
@click.option("--from", "server", metavar="URL", help="Capture a running job: http://HOST:25999, or dynolog.")
@click.option("--again", metavar="RUN", shell_complete=folders, help="Capture the running job of RUN again.")
@_number("--seconds", 2.0, "S", "With --from: how long to record.")
@_number("--job-id", 0, "N", "With --from dynolog: the job's SLURM_JOB_ID.")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    shell_complete=folders,
    help="The run directory. [tracedoc-runs/<time>-<script>]",
)
@_number("--wait", 5, "N", "Optimizer steps to let pass first; 50 where loader workers read ahead.")
@_number("--warmup", 1, "N", "Steps with the profiler armed, not recording.")
@_number("--active", 5, "N", "Steps to record; one more is, to see where the last one ends.", least=1)
@click.option(
    "--ranks",
    callback=_ranks,
    default="auto",
    show_default=True,
    metavar="LIST",
    help="0,4-7 or all; auto is all up to 16, beyond that device activity only on most.",
)
@_number("--max-seconds", 300.0, "S", "Longest time to record, and to write.")
@_number(
    "--max-mb", 500.0, "MB", "Stop recording when a rank's trace is about this large, before compression."
)
@click.option(
    "--record-shapes/--no-record-shapes",
    default=True,
    show_default=True,
    help="Shapes of operators' inputs, at 1 to 5 us an operator in the recorded steps; off by itself where "
    "less than 10 % of device memory is free.",
)
@click.option("--with-stack", is_flag=True, help="Python stacks too: larger files, slower steps.")
@click.option(
    "--source-step/--no-source-step",
    default=True,
    show_default=True,
    help="One more step with Python stacks, on up to 8 ranks, in files of their own.",
)
@click.option("--profile-memory", is_flag=True, help="Allocations too.")
@click.option(
    "--nccl-log/--no-nccl-log",
    default=None,
    help="Keep NCCL's log of its paths for all ranks. [the first rank of a node, not kept]",
)
@click.option("--exit-after-capture", is_flag=True, help="End the job when it is captured, with exit code 0.")
@click.option("--diagnose", "then_diagnose", is_flag=True, help="Diagnose the run straight after.")
@click.option(
    "--baseline", is_flag=True, help="First capture the same command on one process, in DIR/baseline."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@quiet_option
@click.pass_context
def collect(
    ctx: click.Context,
    /,
    command: tuple[str, ...],
    output: str | None,
    then_diagnose: bool,
    baseline: bool,
    dry_run: bool,
    server: str | None,
    again: str | None,
    seconds: float,
    job_id: int,
    **settings: Any,
) -> None:
    """Run a training command and capture a few steps of every rank.

    The command runs as it is: torchrun, accelerate launch, deepspeed, python,
    srun. Its script needs no change. A hook in each of its Python processes
    waits for the optimizer, lets steps pass, records some with torch's
    profiler, and writes one small trace a rank.

    \b
    Examples:
      tracedoc collect -- torchrun --nproc_per_node 8 train.py
      tracedoc collect -o runs/a --exit-after-capture -- torchrun train.py
      tracedoc collect --wait 50 --active 8 -- accelerate launch train.py
      tracedoc collect --diagnose -- python train.py
      tracedoc collect --dry-run -- torchrun train.py
      TRACEDOC_LIVE=1 tracedoc collect -o runs/a -- torchrun train.py
      tracedoc collect --again runs/a --diagnose       while it runs
      tracedoc collect --from http://node0:25999       a debug server's job
      tracedoc collect --from dynolog --seconds 5      a job under dynolog

    The exit code is the command's own: 128+n if signal n ended it, 127 if it
    is not found; 2 if collecting cannot begin.
    """
    from tracedoc.collector import launcher
    from tracedoc.collector.options import Options

    if len([one for one in (command, server, again) if one]) != 1:
        raise click.UsageError("Give one of -- COMMAND, --from URL and --again RUN.")
    if server or again:
        from tracedoc.cli.watch import capture_again, capture_from

        captured = (
            capture_from(server, output, seconds, settings["max_mb"], job_id)
            if server
            else capture_again(str(again), settings["warmup"], settings["active"])
        )
        _then(captured, then_diagnose)
        return
    folder = launcher.run_folder(command, output, datetime.now(), os.environ)
    options = Options(folder=str(folder), **settings)
    single = launcher.single_process(command) if baseline else None
    if dry_run:
        _tell_plan(command, options, single)
        return
    alone = None
    try:
        if single is not None:
            launcher.check_command(single)
            first = replace(
                options,
                folder=str(Path(options.folder) / launcher.BASELINE),
                ranks="all",
                exit_after_capture=True,
            )
            say(f"tracedoc: one process first: {shlex.join(launcher.public_command(single))}")
            alone = launcher.collect(single, first)
            _tell_outcome(alone, first)
        outcome = launcher.collect(command, options)
    except launcher.CommandError as error:
        click.echo(f"error: {error.message}\nhint: {error.hint}", err=True)
        ctx.exit(error.code)
    _tell_outcome(outcome, options)
    if alone is not None and alone.manifest.ranks:
        _tell_beside(alone, outcome)
    if outcome.manifest.ranks:
        _then(outcome.folder, then_diagnose)
    ctx.exit(outcome.code)


def _then(folder: Path, diagnose: bool) -> None:
    """Diagnose a run, or say how."""
    if not diagnose:
        say(f"next: tracedoc diagnose {shlex.quote(_shown(folder))}")
        return
    sys.stdout.flush()
    quiet = ["--quiet"] if is_quiet() else []
    subprocess.run([sys.executable, "-m", "tracedoc", "diagnose", _shown(folder), *quiet], check=False)


def _tell_plan(command: tuple[str, ...], options: Options, single: list[str] | None) -> None:
    from tracedoc.collector import launcher

    last = options.start + options.warmup + options.active
    hook = Path(options.folder) / ".hook-HOST-PID"
    lines = [
        f"run directory  {_shown(Path(options.folder))}",
        f"records        steps {options.start + options.warmup}-{last} (from 0), ranks: {options.ranks}",
    ]
    if single is not None:
        lines.append(f"first          {shlex.join(launcher.public_command(single))}")
    lines.append(f"command        {shlex.join(launcher.public_command(command))}")
    lines += [
        f"environment    {name}={value}"
        for name, value in launcher.environment(hook, options, os.environ).items()
    ]
    click.echo("\n".join(lines))


def _tell_outcome(outcome: Outcome, options: Options) -> None:
    """Say on stderr what was captured, or why nothing was."""
    from tracedoc.run.ending import how_it_ended
    from tracedoc.run.hang import hang_limits

    manifest = outcome.manifest
    for entry in (*manifest.ranks, *manifest.silent):
        if entry.reason and entry.level:
            say(f"tracedoc: rank {entry.rank}: {entry.state}: {entry.reason}")
    if words := how_it_ended(manifest):
        say(f"tracedoc: {words}")
    for limit in hang_limits([str(outcome.folder)], None):
        say(f"tracedoc: {limit.message}")
    if manifest.ranks:
        count = len(manifest.ranks)
        asked = count + sum(entry.level != "" for entry in manifest.silent)
        world = max(_whole(entry, "world_size") for entry in (*manifest.ranks, *manifest.silent))
        if options.ranks in ("auto", "all"):
            asked = max(asked, world)
        say(
            f"tracedoc: captured {count} of {asked} ranks, "
            f"{_steps(manifest.ranks)}, {_size(manifest.ranks)} in {_shown(outcome.folder)}"
        )
        if times := _times(manifest.ranks):
            say(f"tracedoc: {times}")
        return
    if options.ranks == "none" and manifest.silent:
        logs = f"step logs of {len(manifest.silent)} ranks in {_shown(outcome.folder)}"
        say(f"tracedoc: no rank was to be captured; {logs}")
        return
    message, hint = _why_nothing(outcome, options.start + options.warmup)
    click.echo(f"error: {message}\nhint: {hint}", err=True)


def _tell_beside(alone: Outcome, outcome: Outcome) -> None:
    """Say on stderr what one process makes of a step, beside the whole job, and how to look into it."""
    from tracedoc.units import format_ms

    one, job = (_slowest(found.manifest.ranks) for found in (alone, outcome))
    if one and one.before and job and job.before:
        times = (
            f"{format_ms(one.before.median_ms)} on one process, {format_ms(job.before.median_ms)} in the job"
        )
        say(f"tracedoc: a step before the capture (median): {times}")
    shown = shlex.quote(_shown(alone.folder))
    say(f"tracedoc: the one process: tracedoc diagnose {shown}")


def _steps(ranks: tuple[ManifestRank, ...]) -> str:
    spans = {(entry.steps_first, entry.steps_recorded) for entry in ranks}
    first, recorded = max(spans, key=lambda span: span[1])
    words = f"steps {first}-{first + recorded - 1}" if recorded else "no complete step"
    return words if len(spans) == 1 else f"{words} (not the same on every rank)"


def _size(ranks: tuple[ManifestRank, ...]) -> str:
    from tracedoc.units import format_bytes

    return format_bytes(sum(_whole(entry, "bytes") for entry in ranks))


def _times(ranks: tuple[ManifestRank, ...]) -> str:
    """The median step of the slowest rank before, in and after the capture, in words."""
    from tracedoc.units import format_ms

    slowest = _slowest(ranks)
    if slowest is None:
        return ""
    words = [
        f"{format_ms(time.median_ms)} {where}"
        for where, time in (
            ("before it", slowest.before),
            ("in it", slowest.during),
            ("after it", slowest.after),
        )
        if time is not None
    ]
    return f"a step around the capture (median): {', '.join(words)}"


def _slowest(ranks: tuple[ManifestRank, ...]) -> ManifestRank | None:
    """Return the rank whose captured steps took longest, ``None`` where none was timed."""
    timed = [entry for entry in ranks if entry.during is not None]
    return max(timed, key=lambda entry: entry.during.median_ms if entry.during else 0.0, default=None)


def _why_nothing(outcome: Outcome, first: int) -> tuple[str, str]:
    """Return an error and a hint; ``first`` is the step that recording begins with."""
    silent = [entry for entry in outcome.manifest.silent if entry.level]
    if any(entry.steps_total > first for entry in silent):
        return (
            "nothing was captured",
            "the lines above say why, rank by rank; without a trace there is no diagnosis",
        )
    if any("ended" in (entry.part or {}) for entry in silent):
        total = max(entry.steps_total for entry in silent)
        return (
            f"nothing was captured: the job made {total} optimizer steps",
            "record earlier: --wait 1 --warmup 1 --active 3",
        )
    if silent:
        return "nothing was captured", "each rank was gone before it could write; the lines above say more"
    if outcome.manifest.silent:
        others = ", ".join(str(entry.rank) for entry in outcome.manifest.silent[:8])
        return (
            "none of the ranks asked for made an optimizer step",
            f"these did: {others}; choose with --ranks",
        )
    if outcome.hook_error:
        return (
            f"the hook could not start in the job's Python ({outcome.hook_error})",
            "collecting needs Python 3.10 or newer there, and torch 2.0 or newer",
        )
    if outcome.torch_processes:
        return (
            "no rank reached an optimizer step",
            "the job ended before its first step, or its optimizer is none of torch.optim's or DeepSpeed's: "
            "then the script can capture itself, with tracedoc.collect(DIR) and capture.step() in its loop",
        )
    return (
        "no rank reached an optimizer step: no Python process of the command imported torch.optim",
        "torch may be missing; python -E, -I and -S, containers and remote shells drop PYTHONPATH, "
        "which carries the hook",
    )


def _whole(entry: ManifestRank, name: str) -> int:
    return value_at(entry.part or {}, name, int) or 0


def _shown(folder: Path) -> str:
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
