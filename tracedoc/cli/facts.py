"""``tracedoc facts``: the measurements, no opinions."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import format_option, in_columns, show, text_width
from tracedoc.cli.reading import Reading, reading_options, run_measurement, run_pipeline

if TYPE_CHECKING:
    from tracedoc.crosscheck.agreement import CrossCheck, RankCheck
    from tracedoc.diagnosis import FactRecord, Scalar
    from tracedoc.pipeline import Options

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
