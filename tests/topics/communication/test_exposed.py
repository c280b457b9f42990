"""Exposed communication: what blocks compute, what is waiting, and what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topics.small_runs import (
    facts_of_rank,
)
from tracedoc.pipeline import measure
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes


def test_communication_that_releases_queued_work_is_blocking(tmp_path: Path) -> None:
    lanes = "compute 0-60\nallreduce 60-90 64MiB\ncompute 90-100\nlead: 50\nstep: 100"
    facts = facts_of_rank(tmp_path, parse_lanes(lanes, ranks=2)[0])
    assert facts["exposed_comm_ms"] == 30
    assert facts["blocking_comm_ms"] == 30


def test_communication_beside_a_late_host_blocks_nothing(tmp_path: Path) -> None:
    lanes = "compute 0-60\nallreduce 60-90 64MiB\ncompute 95-100 lead=0.5\nstep: 100"
    facts = facts_of_rank(tmp_path, parse_lanes(lanes, ranks=2)[0])
    assert facts["exposed_comm_ms"] == 30
    assert facts["blocking_comm_ms"] == 0


def test_waiting_is_told_from_transfer_where_all_ranks_are_there(tmp_path: Path) -> None:
    text = "compute 0-80\nallreduce 80-100 64MiB\nrank 1:\n  compute 0-90\n  allreduce 90-100 64MiB"
    for builder in parse_lanes(text, ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = measure([tmp_path])
    measured, limits = found.measurements, found.limits
    assert measured.facts["exposed_wait_ms"].values == {"0": 10, "1": 0}
    assert measured.facts["exposed_transfer_ms"].values == {"0": 10, "1": 10}
    assert measured.facts["exposed_comm_unsplit_ms"].values == {"0": 0, "1": 0}
    assert measured.confidence == "high"
    assert limits == ()


def test_one_rank_alone_leaves_its_communication_unsplit(tmp_path: Path) -> None:
    builder = parse_lanes("compute 0-80\nallreduce 80-100 64MiB", ranks=2)[0]
    builder.write(tmp_path / "rank-0.json")
    found = measure([tmp_path])
    measured, limits = found.measurements, found.limits
    assert measured.facts["exposed_comm_unsplit_ms"].value == 20
    assert measured.facts["comm_split"].value == "one rank"
    assert measured.facts["missing_ranks"].value == 1
    assert measured.confidence == "medium"
    assert [limit.code for limit in limits] == ["missing-ranks"]


@pytest.mark.parametrize(
    ("unsplit_ms", "split"),
    [
        (2, "transfer"),
        (3, "arrivals partly known"),
    ],
)
def test_a_tenth_of_unknown_arrivals_does_not_blur_the_rest(
    unsplit_ms: int, split: str, tmp_path: Path
) -> None:
    # Two of three ranks were captured: only what they do among themselves can be split.
    for rank in range(2):
        builder = TraceBuilder(rank, 3)
        for index in (1, 2, 3, 4):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 60, launch_ms=start + 9)
            middle = start + 80 - unsplit_ms
            builder.collective("allreduce", start + 60, middle, group="pair", ranks=(0, 1))
            builder.collective("allreduce", middle, start + 80)
        builder.write(tmp_path / f"rank-{rank}.json")
    measured = measure([tmp_path]).measurements
    assert measured.facts["exposed_comm_ms"].value == 20
    assert measured.facts["exposed_comm_unsplit_ms"].value == unsplit_ms
    assert measured.facts["comm_split"].value == split
