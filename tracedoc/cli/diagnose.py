"""``tracedoc diagnose``: from traces to the answer."""

from __future__ import annotations

import logging
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files, folders
from tracedoc.cli.output import progress_on_terminal, targets, write
from tracedoc.config import LEVELS, find_config
from tracedoc.errors import InputError, TracedocError
from tracedoc.run.remote import is_remote

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.pipeline import Options

_LARGEST_DIAGNOSIS = 256 << 20


def step_range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Return the first and last step of ``3-10``, or of one step; an option's callback."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise click.BadParameter(f"{value!r} is no range of steps such as 3-10", ctx, param)
    return int(match[1]), int(match[2] or match[1])


def byte_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of ``500MB`` or ``2GiB``, or of a plain number; an option's callback."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kMGT])(i?)B)?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size such as 500MB or 2GiB", ctx, param)
    power = "kMGT".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=files)
@click.option(
    "-f",
    "--format",
    "report_format",
    type=click.Choice(["text", "json", "html"]),
    help="Format of stdout. [text]",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="FILE",
    shell_complete=files,
    help="Write .html, .json or .txt; - is stdout.",
)
@click.option("--select", metavar="IDS", help="Judge only these rules (comma-separated).")
@click.option("--ignore", metavar="IDS", help="Leave these rules out.")
@click.option(
    "--rules",
    "rule_directories",
    multiple=True,
    metavar="DIR",
    shell_complete=folders,
    help="Add rules of your own.",
)
@click.option("--steps", callback=step_range, metavar="A-B", help="Judge only these steps, as 3-10.")
@click.option("--cycle", type=int, metavar="N", help="Profiler cycle to judge. [newest common to most ranks]")
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    help="Exit with 1 on a finding this severe; previews never count.",
)
@click.option("--verdicts", is_flag=True, help="List what every rule said, with its numbers.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes. [one a core]")
@click.option(
    "--executor", metavar="WHERE", help="Read on other machines: dask://HOST:PORT, dask://local, mpi."
)
@click.option("--strict", is_flag=True, help="Fail where a limit would do.")
@click.option(
    "--max-bytes",
    callback=byte_count,
    metavar="SIZE",
    help="Refuse a file with more JSON, as 2GB. [gzip: 100 times its size]",
)
@click.option("--redact/--no-redact", default=None, help="Hide host names and absolute paths. [only in html]")
@click.option("--debug", is_flag=True, help="Show where errors come from.")
def diagnose(
    paths: tuple[str, ...],
    report_format: str | None,
    outputs: tuple[str, ...],
    select: str | None,
    ignore: str | None,
    rule_directories: tuple[str, ...],
    steps: tuple[int, int] | None,
    cycle: int | None,
    fail_on: str | None,
    verdicts: bool,
    jobs: int | None,
    executor: str | None,
    strict: bool,
    max_bytes: int | None,
    redact: bool | None,
    debug: bool,
) -> None:
    """Say why a training run is slow, and what would help.

    PATH is a trace (.json, .json.gz), several of them, a folder with one
    trace a rank, a URL of either (s3://, gs://, hf://, https://), or -
    for stdin.

    \b
    Examples:
      tracedoc diagnose runs/a
      tracedoc diagnose rank0.json.gz rank1.json.gz --steps 3-10
      tracedoc diagnose runs/a -o - -o report.html -o diagnosis.json
      tracedoc diagnose runs/a -f json | jq .findings
      tracedoc diagnose runs/a --fail-on warning       in a pipeline

    A project may keep select, ignore and fail-on in tracedoc.toml, or in
    pyproject.toml under [tool.tracedoc]; options given here go before them.
    """
    show_debug(debug)
    places = targets(report_format, outputs, paths)
    config = find_config(Path.cwd())
    if config.source:
        click.echo(f"settings: {config.source}", err=True)
    begin_early(paths, jobs, executor)
    from tracedoc.pipeline import Options

    options = Options(
        select=config.select if select is None else _names(select),
        ignore=config.ignore if ignore is None else _names(ignore),
        rule_directories=rule_directories,
        steps=steps,
        cycle=cycle,
        jobs=jobs,
        executor=executor,
        strict=strict,
        max_bytes=max_bytes,
    )
    result = run_pipeline(paths, options)
    command = "" if "-" in paths else shlex.join(["tracedoc", "diagnose", *paths])
    write(result, places, command=command, verdicts=verdicts, redact=redact)
    level = fail_on or config.fail_on
    if level and (count := _gating(result, level)):
        are = "finding is" if count == 1 else "findings are"
        click.echo(f"--fail-on {level}: {count} {are} {level} or worse", err=True)
        raise click.exceptions.Exit(1)


def begin_early(paths: tuple[str, ...], jobs: int | None, executor: str | None) -> None:
    """Start workers, where several will be used, while this process still imports what it needs itself."""
    # numpy would start a thread a core for linear algebra, of which there is none here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if executor is None and jobs != 1 and not any(is_remote(path) for path in paths):
        from tracedoc.executors import begin_workers
        from tracedoc.run.discover import discover

        with suppress(TracedocError):  # told when it matters
            begin_workers({file.path: file.size_bytes for file in discover(paths).files}, jobs)


def run_pipeline(paths: tuple[str, ...], options: Options) -> Diagnosis:
    """Diagnose with a progress bar on a terminal; raise :class:`InputError` for what is no trace path."""
    from tracedoc.pipeline import diagnose as diagnose_paths

    for path in paths:
        _check_input(path)
    with progress_on_terminal() as progress:
        return diagnose_paths(paths, options, progress=progress)


def show_debug(debug: bool) -> None:
    """Send the log to stderr if asked."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")


def _check_input(path: str) -> None:
    if path == "-" or is_remote(path):
        return
    if not os.path.exists(path):
        raise InputError(f"{path or repr(path)} does not exist", "give a trace file or the folder of a run")
    if os.path.isfile(path) and is_diagnosis(path):
        shown = shlex.quote(path)
        raise InputError(
            f"{path} is a diagnosis, not a trace", f"to show it: tracedoc report {shown} -o report.html"
        )


def is_diagnosis(path: str) -> bool:
    """Return whether a file is a diagnosis that tracedoc wrote."""
    try:
        with open(path, "rb") as file:
            if not re.match(rb'\s*\{\s*"(summary|schema_version|tool_version)"', file.read(200)):
                return False
            if os.fstat(file.fileno()).st_size > _LARGEST_DIAGNOSIS:
                return False
            file.seek(0)
            text = file.read()
    except OSError:
        return False  # the reader will say what is wrong with it
    from tracedoc.diagnosis import from_json

    try:
        from_json(text)
    except TracedocError:
        return False
    return True


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _gating(diagnosis: Diagnosis, level: str) -> int:
    worse = LEVELS[: LEVELS.index(level) + 1]
    return sum(finding.severity in worse and finding.status == "stable" for finding in diagnosis.findings)
