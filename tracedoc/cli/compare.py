"""``tracedoc compare`` and ``tracedoc history``: what changes did, and why N GPUs are not N times as fast."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from tracedoc.cli.completion import files, folders
from tracedoc.cli.output import (
    SHEET_FORMATS,
    Target,
    are_shared,
    format_option,
    output_option,
    say,
    targets,
    write_sheet,
)
from tracedoc.cli.reading import Reading, holds_diagnosis, reading_options, run_or_diagnosis
from tracedoc.errors import InputError, TracedocError

if TYPE_CHECKING:
    from tracedoc.comparison.compare import RunComparison
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.report.sheet import Sheet

Found = TypeVar("Found")


def _percent(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no percentage such as 5%", ctx, param)
    return float(match[1]) / 100


def _samples(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    if re.fullmatch(r"\d+(?:\.\d+)?(?:,\d+(?:\.\d+)?)+", value) is None:
        raise click.BadParameter(f"{value!r} are no numbers such as 64,512", ctx, param)
    samples = tuple(float(part) for part in value.split(","))
    if not all(0 < one < 1e15 for one in samples):
        raise click.BadParameter(f"{value!r}: a step has samples, such as 64,512", ctx, param)
    return samples


@click.command(short_help="Compare runs: what a change did, what more GPUs lose.")
@click.argument("runs", metavar="BASE HEAD...", nargs=-1, required=True, shell_complete=files)
@format_option("markdown", "html")
@output_option(".txt, .json, .md, .html, .png, .svg or .pdf")
@click.option(
    "--scaling",
    type=click.Choice(["weak", "strong"]),
    help="Each GPU has the same batch (weak), or all share one (strong). [by the arithmetic]",
)
@click.option(
    "--samples-per-step",
    callback=_samples,
    metavar="BASE,HEAD...",
    help="Samples (or tokens) of all GPUs in a step, for each run.",
)
@click.option(
    "--fail-on-regression",
    callback=_percent,
    metavar="SHARE",
    help="Exit with 1 where the step is surely longer by this share or more, as 5%, or a straggler is new.",
)
@reading_options
def compare(
    runs: tuple[str, ...],
    report_format: str | None,
    outputs: tuple[str, ...],
    scaling: str | None,
    samples_per_step: tuple[float, ...] | None,
    fail_on_regression: float | None,
    reading: Reading,
) -> None:
    """Say what changed from BASE to HEAD: each a run, or its diagnosis as JSON or page.

    With as many GPUs on both sides: improved, unchanged, regressed, or
    inconclusive; which parts of the step changed; and whether a fix gave
    what was predicted. With more GPUs in HEAD: why they are not as many
    times faster. With three runs or more: the curve over their GPUs, where
    it bends, and how it would go on.

    \b
    Examples:
      tracedoc compare runs/before runs/after
      tracedoc compare before.json after.json -f markdown
      tracedoc compare before.json after.json -o compare.html -o compare.png
      tracedoc compare runs/1gpu runs/8gpu --scaling weak
      tracedoc compare 1gpu/ 2gpu/ 4gpu/ 8gpu/ --samples-per-step 64,128,256,512
      tracedoc compare main.json branch.json --fail-on-regression 5%
    """
    if len(runs) < 2:
        raise click.UsageError("a comparison needs two runs: tracedoc compare BASE HEAD")
    places = targets(report_format, outputs, runs, SHEET_FORMATS)
    from tracedoc.pipeline import Options

    options = Options(**reading)
    sides = [run_or_diagnosis(path, options) for path in runs]
    if len(sides) > 2:
        if fail_on_regression is not None:
            raise InputError("--fail-on-regression needs two runs", "compare them two at a time")
        from tracedoc.comparison.compare import compare_series
        from tracedoc.report.series_sheets import series_sheet

        made = partial(compare_series, scaling=scaling, samples_per_step=samples_per_step)
        _written(sides, places, made, series_sheet)
        return
    found = _two(sides, places, scaling, samples_per_step)
    if fail_on_regression is not None:
        _gate(found, fail_on_regression)


def _two(
    sides: list[Diagnosis],
    places: tuple[Target, ...],
    scaling: str | None,
    samples: tuple[float, ...] | None,
) -> RunComparison:
    from tracedoc.comparison.compare import compare as compare_runs
    from tracedoc.report.comparison_sheet import comparison_sheet

    if samples is not None and len(samples) != 2:
        raise InputError(
            f"{len(samples)} numbers of samples were given for 2 runs", "give two, such as 64,512"
        )
    pair = (samples[0], samples[1]) if samples is not None else None

    def made(runs: list[Diagnosis]) -> RunComparison:
        return compare_runs(runs[0], runs[1], scaling=scaling, samples_per_step=pair)

    return _written(sides, places, made, comparison_sheet)


def _written(
    sides: list[Diagnosis],
    places: tuple[Target, ...],
    made: Callable[[list[Diagnosis]], Found],
    sheet: Callable[[Found], Sheet],
) -> Found:
    """Write what is made of the runs, from runs without hosts and paths where others read it; return it."""
    from tracedoc.report.texts import redacted

    found = made(sides)
    shared = made([redacted(one) for one in sides]) if are_shared(places) else found
    write_sheet(places, found, sheet(found), sheet(shared))
    return found


def _gate(found: RunComparison, least: float) -> None:
    """Exit with 1 for a step that is surely longer by ``least`` or more."""
    if found.verdict is None or found.steps is None:
        say("--fail-on-regression: the runs are on different numbers of GPUs; nothing is judged")
        return
    late = [one for one in found.findings if one.state == "new" and one.topic == "straggler"]
    late = [one for one in late if one.severity not in ("", "note")]
    if late and found.verdict.word != "improved":
        say(f"--fail-on-regression: new: {late[0].title} [{late[0].rule_id}]")
        raise click.exceptions.Exit(1)
    if found.verdict.word == "inconclusive":
        needed = found.verdict.steps_needed
        more = f"; about {needed} steps on each side would decide" if needed else ""
        say(f"--fail-on-regression: inconclusive: {found.verdict.why}{more}")
        return
    longer = found.steps.mean_frac if found.steps.of_slow_steps else found.steps.change_frac
    if found.verdict.word == "regressed" and longer >= least:
        say(f"--fail-on-regression: the step is {100 * longer:.1f} % longer")
        raise click.exceptions.Exit(1)


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
    from tracedoc.comparison.compare import history as history_of
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
