"""``tracedoc history``: the runs of a folder, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import folders
from tracedoc.cli.output import SHEET_FORMATS, are_shared, format_option, output_option, targets, write_sheet
from tracedoc.cli.reading import Reading, holds_diagnosis, reading_options, run_or_diagnosis
from tracedoc.errors import InputError, TracedocError

if TYPE_CHECKING:
    from tracedoc.diagnosis import Diagnosis

_PAGES = (".json", ".html", ".htm")


@click.command(short_help="List the runs of a folder: steps, findings, what fixes gave.")
@click.argument("folder", metavar="DIR", shell_complete=folders)
@format_option("markdown", "html")
@output_option(".txt, .json, .md, .html, .png, .svg or .pdf")
@click.option(
    "--scaling",
    type=click.Choice(["weak", "strong"]),
    help="For runs on different numbers of GPUs. [by the arithmetic]",
)
@reading_options
def history(
    folder: str,
    report_format: str | None,
    outputs: tuple[str, ...],
    scaling: str | None,
    reading: Reading,
) -> None:
    """List the runs in DIR, oldest first: step, efficiency, findings.

    A run is a folder of traces in DIR, or a diagnosis there as JSON or
    page. Each is compared with the one before it: what was fixed, what that
    was predicted to give, and what it gave. Runs stand in the order of
    their capture or, where the traces of one do not tell it, of the files.

    \b
    Examples:
      tracedoc history runs
      tracedoc history runs -o history.png
      tracedoc history diagnoses -f markdown
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is no folder", "give the folder that holds the runs")
    places = targets(report_format, outputs, (folder,), SHEET_FORMATS)
    from tracedoc.comparison.series import history as history_of
    from tracedoc.pipeline import Options
    from tracedoc.report.series_sheets import history_sheet
    from tracedoc.report.texts import redacted

    options = Options(**reading)
    runs: list[tuple[str, Diagnosis]] = []
    unread: list[tuple[str, str]] = []
    for path in _entries(folder, {os.path.abspath(place.path) for place in places if place.path != "-"}):
        try:
            runs.append((path.name, run_or_diagnosis(str(path), options)))
        except TracedocError as error:
            unread.append((path.name, error.message))
    if all(one.run.captured_at for _, one in runs):
        runs.sort(key=lambda run: run[1].run.captured_at)
    if not runs:
        reason = f": {unread[0][0]}: {unread[0][1]}" if unread else ""
        raise InputError(f"{folder} holds no run{reason}", "give the folder that holds the runs")
    found = history_of(folder, runs, scaling=scaling, unread=unread)
    sheet = history_sheet(found)
    shared = sheet
    if are_shared(places):
        hidden = [(name, redacted(one)) for name, one in runs]
        names = [(name, "cannot be read") for name, _ in unread]
        shared = history_sheet(history_of(folder, hidden, scaling=scaling, unread=names))
    write_sheet(places, found, sheet, shared)


def _entries(folder: str, written: set[str]) -> Iterator[Path]:
    """Yield what may be a run, by file time and then by name; of a folder and its JSON, the JSON."""
    paths = [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
    kept = [path for path in paths if os.path.abspath(path) not in written]
    files = {path.stem: path for path in kept if path.suffix in _PAGES and path.is_file()}
    diagnoses = {stem: path for stem, path in files.items() if holds_diagnosis(str(path))}
    runs = [path for path in kept if path.is_dir() and path.name not in diagnoses]
    yield from sorted((*diagnoses.values(), *runs), key=lambda path: (_made(path), path.name))


def _made(path: Path) -> float:
    """The time at which a run was made: a folder, by its oldest file."""
    if path.is_file():
        return path.stat().st_mtime
    return min((one.stat().st_mtime for one in path.iterdir() if one.is_file()), default=path.stat().st_mtime)
