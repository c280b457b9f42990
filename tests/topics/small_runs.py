"""Small traces whose facts can be worked out by hand, and their facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tracedoc
from tracedoc.facts.catalog import Measurement
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.values import Value
from tracedoc.worker import measure_rank

MIB = 1 << 20


def of_run(folder: Path, builders: Iterable[TraceBuilder]) -> Mapping[str, Measurement]:
    for builder in builders:
        builder.write(folder / f"rank-{builder.rank}.json")
    measurements = tracedoc.measure([folder]).measurements
    return measurements.facts


def of_lanes(folder: Path, text: str, *, ranks: int = 2) -> dict[str, Value]:
    found = of_run(folder, parse_lanes(text, ranks=ranks))
    return {name: fact.value for name, fact in found.items()}


def steps(builder: TraceBuilder, *starts: float) -> TraceBuilder:
    """Add host steps at these times (the last one only closes the one before), each with a kernel of 10 ms.

    It starts 10 ms into the step and is launched 1 ms earlier.
    """
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], starts[-1] + 100], strict=True), 1):
        builder.step(index, start, end - 1).backward(start + 50, start + 60)
        builder.kernel("first", start + 10, start + 20, launch_ms=start + 9)
    return builder


def values(folder: Path, builder: TraceBuilder) -> dict[str, Value]:
    return {name: fact.value for name, fact in of_run(folder, [builder]).items()}


def idle_causes(path: Path) -> dict[str, float]:
    """The idle time of the analysed step by cause, in ms."""
    step = tracedoc.measure([path]).measurements.run.digests[0].judged_step
    assert step is not None
    return {cause: ns / 1e6 for cause, ns in step.idle_ns.items()}


def two_steps(builder: TraceBuilder) -> TraceBuilder:
    """Add host steps 1, 2 and 3 of 100 ms; the third one only closes the second."""
    for index in (1, 2, 3):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel("first", 100 * index + 10, 100 * index + 20, launch_ms=100 * index + 9)
    return builder


def facts_of_rank(folder: Path, builder: TraceBuilder) -> dict[str, Value]:
    """The facts of one rank alone, as its worker measures them."""
    trace = tracedoc.load(builder.write(folder / "rank-0.json"))
    return dict(measure_rank(tracedoc.build_timeline(trace), rank=0).facts)
