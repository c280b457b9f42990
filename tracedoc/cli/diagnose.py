"""``tracedoc diagnose``, by the settings of a project, and ``tracedoc report``: an answer shown again."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import Target, json_text, quiet_option, report_options, say, send, targets, write
from tracedoc.cli.reading import Reading, diagnosis_of, names_in, reading_options, rules_option, run_pipeline
from tracedoc.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.run.hang import Standstill

LEVELS = ("critical", "warning", "note")
KEYS = ("select", "ignore", "fail-on", "budgets")


@dataclass(frozen=True, slots=True)
class Config:
    """What a project chose for ``tracedoc diagnose``; ``source`` is the file, empty if there is none."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str | None = None
    budgets: tuple[str, ...] = ()
    source: str = ""


def find_config(folder: Path) -> Config:
    """Return the settings that hold in a folder: those of the nearest file, from there upwards.

    ``tracedoc.toml`` goes before a ``pyproject.toml`` beside it; one without ``[tool.tracedoc]`` is passed
    over. Raises :class:`InputError` for an unknown key, a wrong value, or what is not TOML.
    """
    for place in (folder, *folder.parents):
        own = place / "tracedoc.toml"
        if os.path.isfile(own):  # unlike Path.is_file, false where it may not be looked for
            return _config(_parsed(own), own)
        project = place / "pyproject.toml"
        # Somebody else's broken file is none of our business.
        if os.path.isfile(project) and b"tool.tracedoc" in _read(project):
            table = _parsed(project).get("tool", {}).get("tracedoc")
            if isinstance(table, dict):
                return _config(table, project)
    return Config()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", "make it readable, or remove it"
        ) from error


def _parsed(file: Path) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.toml.decode(_read(file), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}", "correct it, or remove it") from error


def _config(table: dict[str, Any], file: Path) -> Config:
    for key in table:
        if key not in KEYS:
            raise InputError(
                f"{file}: no setting is called {key!r}{did_you_mean(key, KEYS)}",
                f"settings are {', '.join(KEYS)}",
            )
    level = table.get("fail-on")
    if level is not None and level not in LEVELS:
        raise InputError(f"{file}: fail-on is {level!r}", f"use one of {', '.join(LEVELS)}")
    return Config(
        select=_texts(table, "select", file),
        ignore=_texts(table, "ignore", file),
        fail_on=level,
        budgets=_texts(table, "budgets", file),
        source=str(file),
    )


def _texts(table: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    texts = table.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        what, example = ("budgets", "step_ms <= 420") if key == "budgets" else ("rules", "pipeline")
        raise InputError(f"{file}: {key} is no list of {what}", f'write it as {key} = ["{example}"]')
    return tuple(texts)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=files)
@report_options
@click.option("--select", metavar="IDS", help="Judge only these rules or topics (comma-separated).")
@click.option("--ignore", metavar="IDS", help="Leave these rules or topics out.")
@rules_option()
@click.option(
    "--fail-on",
    type=click.Choice(LEVELS),
    help="Exit with 1 on a finding this severe; previews do not count.",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="LIMIT",
    help="Exit with 1 unless this holds, as 'step_ms <= 420'.",
)
@reading_options
def diagnose(
    paths: tuple[str, ...],
    report_format: str | None,
    outputs: tuple[str, ...],
    select: str | None,
    ignore: str | None,
    rule_directories: tuple[str, ...],
    fail_on: str | None,
    budgets: tuple[str, ...],
    verdicts: bool,
    top: int,
    redact: bool | None,
    browse: bool,
    reading: Reading,
) -> None:
    """Say why a training run is slow, and what would help.

    PATH is a trace (.json, .json.gz), several of them, a folder with one
    trace a rank, a URL of either (s3://, gs://, hf://, https://), or -
    for stdin. Dumps of PyTorch's flight recorder, alone or in the folder,
    tell which rank is missing in which collective of a job that hangs.

    \b
    Examples:
      tracedoc diagnose runs/a
      tracedoc diagnose rank0.json.gz rank1.json.gz --steps 3-10
      tracedoc diagnose runs/a -o - -o report.html -o diagnosis.json
      tracedoc diagnose runs/a --open                  the page, in a browser
      tracedoc diagnose runs/a -f json | jq .findings
      tracedoc diagnose runs/a --top 10                with kernels and collectives
      tracedoc diagnose runs/a --fail-on warning       in a pipeline
      tracedoc diagnose runs/a --budget 'step_ms <= 420'
      tracedoc diagnose runs/a -f markdown             for a pull request

    A project may keep select, ignore, fail-on and budgets in tracedoc.toml,
    or in pyproject.toml under [tool.tracedoc]; options given here go before
    them.
    """
    places = targets(report_format, outputs, paths)
    config = _settings()
    if config.source:
        say(f"settings: {config.source}")
    from tracedoc.pipeline import Options

    options = Options(
        select=config.select if select is None else names_in(select),
        ignore=config.ignore if ignore is None else names_in(ignore),
        rule_directories=rule_directories,
        **reading,
        budgets=budgets or config.budgets,
    )
    try:
        result = run_pipeline(paths, options)
    except InputError:
        # A job that hangs before it is captured leaves dumps alone.
        from tracedoc.run.flight import dumps_at
        from tracedoc.run.hang import read_standstill

        found = dumps_at([Path(path) for path in paths])
        if not found:
            raise
        write_standstill(read_standstill(found), places)
        return
    command = "" if "-" in paths else shlex.join(["tracedoc", "diagnose", *paths])
    run = shlex.quote(paths[0]) if command and len(paths) == 1 else "RUN"
    write(result, places, command=command, run=run, verdicts=verdicts, top=top, redact=redact, browse=browse)
    level = fail_on or config.fail_on
    count = _gating(result, level) if level else 0
    if count:
        are = "finding is" if count == 1 else "findings are"
        say(f"--fail-on {level}: {count} {are} {level} or worse")
    missed = _missed(result)
    for words in missed:
        say(f"budget {words}")
    if (level and count) or missed:
        raise click.exceptions.Exit(1)


def write_standstill(found: Standstill, places: Sequence[Target]) -> None:
    """Write what the dumps of the flight recorder say, as text or JSON."""

    def rendered(chosen: str, width: int, color: bool) -> list[str]:
        if chosen not in ("text", "json"):
            raise InputError(
                "these are dumps of the flight recorder without a trace", "use -f text or -f json"
            )
        if chosen == "json":
            return [json_text({"answer": found.lines, "flight_recorder": found})]
        return ["".join(f"{line[0].upper()}{line[1:]}.\n" for line in found.lines)]

    send(places, rendered, found.lines[0])


def _missed(diagnosis: Diagnosis) -> list[str]:
    """Return the budgets that are not met, in words. What is unknown is not met: a gate stays shut."""
    from tracedoc.report.texts import plain
    from tracedoc.report.view import budget_words

    return [plain(budget_words(check)) for check in diagnosis.budgets if check.outcome != "met"]


def _settings() -> Config:
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it has been removed
        return Config()
    return find_config(folder)


def _gating(diagnosis: Diagnosis, level: str) -> int:
    worse = LEVELS[: LEVELS.index(level) + 1]
    return sum(finding.severity in worse and finding.gates for finding in diagnosis.findings)


@click.command(short_help="Show a diagnosis that was saved as JSON or as a page.")
@click.argument("diagnosis", metavar="DIAGNOSIS", shell_complete=files)
@report_options
@quiet_option
def report(
    diagnosis: str,
    report_format: str | None,
    outputs: tuple[str, ...],
    verdicts: bool,
    top: int,
    redact: bool | None,
    browse: bool,
) -> None:
    """Show a diagnosis that was saved as JSON or as a page; - is stdin.

    \b
    Examples:
      tracedoc report diagnosis.json
      tracedoc report diagnosis.json -o report.html
      tracedoc report report.html
      tracedoc report diagnosis.json --open
      tracedoc report diagnosis.json -f json --redact > to-share.json
    """
    places = targets(report_format, outputs, () if diagnosis == "-" else (diagnosis,))
    result = diagnosis_of(_bytes_of(diagnosis), "standard input" if diagnosis == "-" else diagnosis)
    write(
        result,
        places,
        command="" if diagnosis == "-" else shlex.join(["tracedoc", "report", diagnosis]),
        verdicts=verdicts,
        top=top,
        redact=redact,
        browse=browse,
    )


def _bytes_of(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{path} does not exist", "write one with: tracedoc diagnose RUN -o diagnosis.json"
        ) from error
    except IsADirectoryError as error:
        raise InputError(
            f"{path} is a folder, not a diagnosis",
            f"write one with: tracedoc diagnose {shlex.quote(path)} -o diagnosis.json",
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}", "give a file that you may read"
        ) from error
