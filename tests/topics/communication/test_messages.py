"""Small messages, and messages without a size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tracedoc
from tests.topics.small_runs import (
    MIB,
    of_lanes,
)
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.values import Unknown


def test_only_the_exposed_part_of_a_small_collective_counts(tmp_path: Path) -> None:
    text = "compute 0-60  80-84\nallreduce 75-85 1MiB\nstep: 100"
    assert of_lanes(tmp_path, text)["latency_bound_exposed_ms"] == 6


def without_size(builder: TraceBuilder, nbytes: int) -> str:
    """Return a trace whose collectives of ``nbytes`` do not say their size, as graphs and old files do."""
    document = json.loads(builder.to_json())
    for event in document["traceEvents"]:
        arguments = event.get("args", {})
        if arguments.get("In msg nelems") == nbytes // 2:
            del arguments["In msg nelems"], arguments["Out msg nelems"]
    return json.dumps(document)


def test_a_collective_of_unknown_size_is_not_small(tmp_path: Path) -> None:
    # 512 MiB in 10 ms are 54 GB/s; a call of 28 us is then half of the time of 1.4 MiB, so 0.25 MiB are
    # latency-bound and 512 MiB are not; each is exposed for 10 ms.
    text = "compute 0-60\nallreduce 60-70 512MiB  75-85 0.25MiB\nstep: 100"
    facts = of_lanes(tmp_path, text)
    assert facts["latency_bound_frac"] == 0.5
    assert facts["latency_bound_exposed_ms"] == 10
    for builder in parse_lanes(text, ranks=2):
        (tmp_path / f"rank-{builder.rank}.json").write_text(without_size(builder, MIB // 4))
    measurements = tracedoc.measure([tmp_path]).measurements
    assert measurements.facts["latency_bound_exposed_ms"].value == 0
    assert measurements.facts["comm_bytes_per_step"].value == Unknown("1 of 2 collectives carry no size")


@pytest.mark.parametrize(
    ("calls", "exposed_ms", "share"),
    [
        # On this link 2 ranks reach half of 360 GB/s at 9.5 MiB: a quarter of that takes 35 us.
        ("x160", 4, 1.0),
        ("x4", Unknown("most of the exposed communication is in collectives that carry no size"), None),
    ],
)
def test_collectives_without_a_size_are_small_where_they_are_short(
    tmp_path: Path, calls: str, exposed_ms: float | Unknown, share: float | None
) -> None:
    for builder in parse_lanes(f"step: 100\ncompute 0-60\nallreduce 60-64 {calls}", ranks=2):
        (tmp_path / f"rank-{builder.rank}.json").write_text(without_size(builder, 16 * MIB))
    facts = tracedoc.measure([tmp_path], tracedoc.Options(jobs=1)).measurements.facts
    assert facts["comm_bytes_per_step"].value == Unknown(
        f"{calls[1:]} of {calls[1:]} collectives carry no size"
    )
    found = facts["latency_bound_exposed_ms"].value
    assert found == (pytest.approx(exposed_ms, abs=0.1) if isinstance(exposed_ms, int) else exposed_ms)
    if share is not None:
        assert facts["latency_bound_frac"].value == share
