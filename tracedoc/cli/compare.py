"""``tracedoc compare``: what a change did, and why N GPUs are not N times as fast."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from tracedoc.cli.completion import files
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
from tracedoc.cli.reading import Reading, reading_options, run_or_diagnosis
from tracedoc.errors import InputError

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
        from tracedoc.comparison.series import compare_series
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
