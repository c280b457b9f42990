"""``tracedoc kernels``: the kernels of a step, against what the device reaches in practice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import format_option, in_columns, show, to_stdout
from tracedoc.cli.reading import Reading, reading_options, run_measurement
from tracedoc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracedoc.step.kernel_times import KernelGroup
    from tracedoc.timeline.build import RankTimeline

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
