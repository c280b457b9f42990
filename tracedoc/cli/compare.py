"""``tracedoc compare``: what a change did, and why N GPUs are not N times as fast."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, TypedDict

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import Target, format_option, json_text, output_option, say, send, targets
from tracedoc.cli.reading import Reading, holds_diagnosis, reading_options, run_pipeline
from tracedoc.errors import InputError

if TYPE_CHECKING:
    from tracedoc.comparison.compare import RunComparison
    from tracedoc.diagnosis import Diagnosis
    from tracedoc.pipeline import Options


class Asked(TypedDict):
    """What the user said about the work on the two sides."""

    scaling: str | None
    samples_per_step: tuple[float, float] | None


_FORMATS = {".txt": "text", ".json": "json", ".md": "markdown"}
_FIGURES = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_LARGEST_DIAGNOSIS = 256 << 20


def _percent(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no percentage such as 5%", ctx, param)
    return float(match[1]) / 100


def _pair(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, float] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", value)
    if match is None or not float(match[1]) or not float(match[2]):
        raise click.BadParameter(f"{value!r} is no pair of numbers such as 64,512", ctx, param)
    return float(match[1]), float(match[2])


@click.command(short_help="Compare two runs: what a change did, what more GPUs lose.")
@click.argument("base", metavar="BASE", shell_complete=files)
@click.argument("head", metavar="HEAD", shell_complete=files)
@format_option("markdown")
@output_option(".txt, .json or .md, or the waterfall as .png, .svg or .pdf")
@click.option(
    "--scaling",
    type=click.Choice(["weak", "strong"]),
    help="Each GPU has the same batch (weak), or all share one (strong). [by the arithmetic]",
)
@click.option(
    "--samples-per-step",
    callback=_pair,
    metavar="BASE,HEAD",
    help="Samples of all GPUs in a step, on each side.",
)
@click.option(
    "--fail-on-regression",
    callback=_percent,
    metavar="SHARE",
    help="Exit with 1 where the step is surely longer, and by this share or more, as 5%.",
)
@reading_options
def compare(
    base: str,
    head: str,
    report_format: str | None,
    outputs: tuple[str, ...],
    scaling: str | None,
    samples_per_step: tuple[float, float] | None,
    fail_on_regression: float | None,
    reading: Reading,
) -> None:
    """Say what changed from BASE to HEAD: each a run, or its diagnosis as JSON or page.

    With as many GPUs on both sides: improved, unchanged, regressed, or
    inconclusive; which parts of the step changed; and whether a fix gave
    what was predicted. With more GPUs in HEAD: why they are not as many
    times faster.

    \b
    Examples:
      tracedoc compare runs/before runs/after
      tracedoc compare before.json after.json -f markdown
      tracedoc compare runs/1gpu runs/8gpu --scaling weak
      tracedoc compare main.json branch.json --fail-on-regression 5%
    """
    places = targets(report_format, outputs, (base, head), _FORMATS | _FIGURES)
    from tracedoc.comparison.compare import compare as compare_runs
    from tracedoc.pipeline import Options
    from tracedoc.report.texts import redacted

    options = Options(**reading)
    sides = _side(base, options), _side(head, options)
    how: Asked = {"scaling": scaling, "samples_per_step": samples_per_step}
    found = compare_runs(*sides, **how)
    # Markdown and figures are for others to read, as in `tracedoc diagnose`.
    shared = compare_runs(*map(redacted, sides), **how) if _is_shared(places) else found
    _write(found, shared, places)
    if fail_on_regression is not None:
        _gate(found, fail_on_regression)


def _is_shared(places: tuple[Target, ...]) -> bool:
    return any(place.format not in ("text", "json") for place in places)


def _side(path: str, options: Options) -> Diagnosis:
    """Return the diagnosis of a run, or the one that a file holds: JSON, or a page."""
    if not os.path.isfile(path) or not holds_diagnosis(path):
        return run_pipeline((path,), options)
    from tracedoc.diagnosis_json import from_json
    from tracedoc.report.embedded import diagnosis_in_page, is_page

    if os.path.getsize(path) > _LARGEST_DIAGNOSIS:
        raise InputError(f"{path} is larger than a diagnosis gets", "give the folder of its run")
    with open(path, "rb") as file:
        data = file.read()
    try:
        return from_json(diagnosis_in_page(data) if is_page(data) else data)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", error.hint) from error


def _write(found: RunComparison, shared: RunComparison, places: tuple[Target, ...]) -> None:
    """Write the comparison; ``shared`` is the one without names of hosts, to pass on."""
    from tracedoc.cli.compare_text import comparison_markdown, comparison_text, first_line, waterfall_drawing
    from tracedoc.report.render import save_bytes

    def rendered(chosen: str, width: int, color: bool) -> list[str]:
        if chosen == "json":
            return [json_text(found)]
        return [comparison_markdown(shared) if chosen == "markdown" else comparison_text(found, width)]

    figures = [place for place in places if place.format in _FIGURES.values()]
    send([place for place in places if place not in figures], rendered, first_line(found))
    for place in figures:
        save_bytes(place.path, waterfall_drawing(shared, place.format))
        say(f"wrote {place.path}")


def _gate(found: RunComparison, least: float) -> None:
    """Exit with 1 for a step that is surely longer by ``least`` or more."""
    if found.verdict is None or found.steps is None:
        say("--fail-on-regression: the runs are on different numbers of GPUs; nothing is judged")
        return
    if found.verdict.word == "inconclusive":
        needed = found.verdict.steps_needed
        more = f"; about {needed} steps on each side would decide" if needed else ""
        say(f"--fail-on-regression: inconclusive: {found.verdict.why}{more}")
        return
    if found.verdict.word == "regressed" and found.steps.change_frac >= least:
        say(f"--fail-on-regression: the step is {100 * found.steps.change_frac:.1f} % longer")
        raise click.exceptions.Exit(1)
