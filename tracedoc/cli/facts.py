"""``tracedoc facts`` and ``tracedoc kernels``: measurements, and kernels against what the device reaches."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import format_option, in_columns, show, text_width, to_stdout
from tracedoc.cli.reading import Reading, reading_options, run_measurement, run_pipeline
from tracedoc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracedoc.crosscheck.agreement import CrossCheck, RankCheck
    from tracedoc.diagnosis import FactRecord, Scalar
    from tracedoc.pipeline import Options
    from tracedoc.step.kernel_times import KernelGroup
    from tracedoc.timeline.build import RankTimeline

MANY_ALIKE = 3
"""From this many facts that are unknown for one reason on, the reason is printed once."""


@click.command(short_help="Print what was measured, without opinions.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=files)
@format_option()
@click.option("--json", "report_format", flag_value="json", hidden=True)
@click.option("--ranks", is_flag=True, help="Show the values of every rank or group too.")
@click.option(
    "--cross-check",
    is_flag=True,
    help="Compare with HolisticTraceAnalysis instead: its breakdown and overlap beside ours, with reasons.",
)
@reading_options
def facts(
    paths: tuple[str, ...],
    report_format: str | None,
    ranks: bool,
    cross_check: bool,
    reading: Reading,
) -> None:
    """Print what was measured by topic: name and value, or why it is unknown.

    \b
    Examples:
      tracedoc facts runs/a
      tracedoc facts runs/a --ranks
      tracedoc facts runs/a -f json | jq .step_ms.value
      tracedoc facts runs/a --cross-check              HolisticTraceAnalysis beside it
      tracedoc explain exposed_comm_ms                 the definition
    """
    from tracedoc.pipeline import Options

    options = Options(**reading)
    if cross_check:
        _cross_check(paths, options, report_format)
        return
    found = run_pipeline(paths, options).facts
    show(found, report_format, lambda: facts_table(found, ranks=ranks))


def _cross_check(paths: tuple[str, ...], options: Options, report_format: str | None) -> None:
    from tracedoc.crosscheck.agreement import cross_check

    digests = run_measurement(paths, options).run.digests
    found = cross_check([(digest.rank, digest.source) for digest in digests])
    show(found, report_format, lambda: check_text(found, text_width()))


def facts_table(records: dict[str, FactRecord], *, ranks: bool) -> str:
    """Return the facts as aligned columns: name, value with unit, and the reason where one is unknown.

    Facts stand under their topics; those that are unknown for one reason stand together at the end, from
    :data:`MANY_ALIKE` of them on.
    """
    from tracedoc.report.texts import one_line, plain
    from tracedoc.topics import by_topic

    alike: dict[str, list[str]] = {}
    for name, record in records.items():
        if record.value is None and record.unknown and not (ranks and record.values):
            alike.setdefault(one_line(plain(record.unknown)), []).append(plain(name))
    alike = {reason: names for reason, names in alike.items() if len(names) >= MANY_ALIKE}
    left_out = {name for names in alike.values() for name in names}
    rows = [("fact", "value", "")]
    for topic, names in by_topic([name for name in records if plain(name) not in left_out]).items():
        rows += [("", "", ""), (topic, "", "")]
        for name in names:
            rows += _rows(name, records[name], ranks=ranks)
    safe = [(plain(name), one_line(plain(value)), one_line(plain(reason))) for name, value, reason in rows]
    together = (
        f"\nunknown: {reason}\n{fill(', '.join(names), 96, initial_indent='  ', subsequent_indent='  ')}"
        for reason, names in alike.items()
    )
    return "\n".join([*in_columns(safe, numbers=(1,)), *together]) + "\n"


def _rows(name: str, record: FactRecord, *, ranks: bool) -> list[tuple[str, str, str]]:
    rows = [(f"  {name}", *_cells(record.unknown, record.value, record.unit))]
    if ranks:
        key_name = "rank " if record.scope == "rank" else ""
        for key, value in record.values.items():
            unknown = value.get("unknown", "") if isinstance(value, dict) else None
            plain_value = None if isinstance(value, dict) else value
            rows.append((f"    {key_name}{key}", *_cells(unknown, plain_value, record.unit)))
    return rows


def _cells(unknown: str | None, value: Scalar | None, unit: str) -> tuple[str, str]:
    from tracedoc.units import format_quantity

    if value is None:
        return "unknown", unknown or ""
    # Long text would push every column out.
    if isinstance(value, str) and len(value) > 24:
        return "", value
    return format_quantity(value, unit), ""


NAMES = {
    "span_ms": "whole capture",
    "compute_ms": "compute",
    "non_compute_ms": "non-compute",
    "idle_ms": "idle",
    "overlap_frac": "overlap",
}


def check_text(check: CrossCheck, width: int) -> str:
    """Return the numbers of both tools for each rank, and why they differ."""
    intro = (
        f"tracedoc beside HolisticTraceAnalysis {check.hta_version}: each capture, from its first to its last"
        " GPU event. Non-compute is exposed communication plus exposed copies; overlap is the share of"
        " communication that runs beside compute."
    )
    lines = [fill(intro, width, break_on_hyphens=False)]
    for rank in check.ranks:
        lines += ["", *_rank(rank, width)]
    return "\n".join(lines) + "\n"


def _rank(check: RankCheck, width: int) -> Iterator[str]:
    from tracedoc.report.texts import one_line, plain

    yield plain(one_line(f"rank {check.rank}  {check.source}"))
    if check.ours is None or check.hta is None:
        yield fill(plain(one_line(check.error)), width, initial_indent="  ", subsequent_indent="  ")
        return
    yield f"  {'':14}{'tracedoc':>12}{'HTA':>12}{'difference':>14}"
    for part, name in NAMES.items():
        ours, theirs = getattr(check.ours, part), getattr(check.hta, part)
        if ours is None or theirs is None:
            continue
        change = theirs - ours if part in _different(check) else 0.0
        yield f"  {name:14}{_value(part, ours):>12}{_value(part, theirs):>12}{_change(part, change):>14}"
    for reason in check.reasons:
        parts = ", ".join(f"{NAMES[part]} {_change(part, by)}" for part, by in reason.changes.items())
        yield _item(plain(one_line(f"{reason.text}: {parts}")), width)
    if check.unexplained:
        parts = ", ".join(f"{NAMES[part]} {_change(part, by)}" for part, by in check.unexplained.items())
        yield _item(f"not explained by a known definition: {parts}", width)
    elif not check.reasons:
        yield "  The two agree."


def _different(check: RankCheck) -> set[str]:
    found = set(check.unexplained)
    for reason in check.reasons:
        found |= reason.changes.keys()
    return found


def _item(text: str, width: int) -> str:
    return fill(text, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)


def _value(part: str, value: float) -> str:
    from tracedoc.units import format_ms, format_percent

    return format_percent(value) if part == "overlap_frac" else format_ms(value)


def _change(part: str, value: float) -> str:
    from tracedoc.units import format_ms

    if value == 0:
        return "same"
    sign = "+" if value > 0 else "-"
    if part == "overlap_frac":
        return f"{sign}{abs(100 * value):.2g} points"
    return f"{sign}{format_ms(abs(value))}"


SHOWN = 40
"""So many lines are printed as text; JSON and CSV have all."""

NAME_LETTERS = 60


@click.command(short_help="Print the kernels of a step, by the time they lose.")
@click.argument("path", metavar="RUN", shell_complete=files)
@click.option(
    "--by",
    type=click.Choice(["operator", "module", "kernel", "phase"]),
    default="operator",
    help="What the kernels of a line have in common. [operator]",
)
@click.option("--rank", type=int, help="Whose kernels. [the rank that stands for the run]")
@format_option("csv", "parquet")
@reading_options
def kernels(path: str, by: str, rank: int | None, report_format: str | None, reading: Reading) -> None:
    """Print what the kernels of the analysed step do, and how much of what the GPU reaches they reach.

    FLOPs and bytes are counted from recorded shapes (record_shapes=True), each tensor read and written once.
    Lost is the time beyond what that takes at the rates that the GPU reaches in practice.

    \b
    Examples:
      tracedoc kernels runs/a
      tracedoc kernels runs/a --by phase
      tracedoc kernels runs/a --by kernel -f csv > kernels.csv
    """
    from tracedoc.step.kernel_times import kernel_groups

    timeline = _timeline(path, rank, reading, with_modules=by == "module")
    rows = kernel_groups(timeline, by)
    if report_format == "csv":
        to_stdout(_csv(rows), "csv")
    elif report_format == "parquet":
        from tracedoc.frames import parquet

        to_stdout(parquet(rows), "parquet")
    else:
        show(rows, report_format, lambda: _table(rows, by))


def _timeline(path: str, rank: int | None, reading: Reading, *, with_modules: bool) -> RankTimeline:
    """The timeline of one rank of a run, by default of the one that stands for it."""
    from tracedoc.pipeline import Options
    from tracedoc.timeline.build import build_timeline
    from tracedoc.trace.kineto import read_trace

    options = Options(**reading)
    run = run_measurement((path,), options).run
    chosen = run.representative if rank is None else rank
    digest = next((one for one in run.digests if one.rank == chosen), None)
    if digest is None:
        listed = ", ".join(str(one.rank) for one in run.digests[:16])
        raise InputError(f"{path} has no rank {chosen}", f"its ranks: {listed}")
    trace = read_trace(digest.source, python_functions=with_modules)
    return build_timeline(trace, steps=options.steps)


def _csv(rows: Sequence[KernelGroup]) -> str:
    import csv
    import io

    from msgspec.structs import asdict, fields

    from tracedoc.step.kernel_times import KernelGroup

    text = io.StringIO()
    writer = csv.DictWriter(text, [one.name for one in fields(KernelGroup)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return text.getvalue()


def _table(rows: Sequence[KernelGroup], by: str) -> str:
    from tracedoc.report.charts.detail_tables import short_name
    from tracedoc.report.texts import one_line, plain
    from tracedoc.units import format_between, format_ms, format_percent, three_digits

    def cell(value: float | None) -> str:
        return "" if value is None else three_digits(value)

    def between(least: float | None, most: float | None, write: Callable[[float], str]) -> str:
        return "" if least is None or most is None else format_between(least, most, write)

    total = sum(row.time_ms for row in rows)
    if not rows:
        return "The analysed step has no compute kernel.\n"
    lines = [(by, "calls", "time", "share", "TFLOP/s", "GB/s", "reached", "lost")]
    for row in rows[:SHOWN]:
        name = plain(one_line(short_name(row.name) if by == "kernel" else row.name))
        lines.append(
            (
                name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS - 3]}...",
                str(row.calls),
                format_ms(row.time_ms),
                format_percent(row.time_ms / total if total else 0.0),
                cell(row.tflops),
                cell(row.gbps),
                between(row.reached_least_frac, row.reached_most_frac, format_percent),
                between(row.lost_least_ms, row.lost_most_ms, format_ms),
            )
        )
    text = in_columns(lines, numbers=range(1, len(lines[0])))
    left = len(rows) - SHOWN
    return "\n".join([*text, *([f"and {left} more: -f csv has all"] if left > 0 else [])]) + "\n"
