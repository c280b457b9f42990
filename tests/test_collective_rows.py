"""The table of collectives in a diagnosis: sums over a step, and what a link really reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.detail.tables import collective_rows
from tracedoc.pipeline import Options, measure
from tracedoc.report.charts.detail_tables import collective_table
from tracedoc.tables import CollectiveRow
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes

MIB = 1 << 20


def rows_of(folder: Path, builders: list[TraceBuilder]) -> dict[str, CollectiveRow]:
    for builder in builders:
        builder.write(folder / f"rank-{builder.rank}.json")
    run = measure([folder], Options(jobs=1)).measurements.run
    return {row.op: row for row in collective_rows(run, run.digest(0))}


def test_bandwidth_is_that_of_the_transfer_and_not_of_the_waiting(tmp_path: Path) -> None:
    # Rank 1 comes 30 ms late to the first of two all-reduces of 64 MiB; both take 10 ms from then on.
    text = """
    compute    0-50   90-95
    allreduce  50-90  64MiB  95-105 64MiB
    step: 110
    rank 1:
    compute    0-80   90-95
    allreduce  80-90  64MiB  95-105 64MiB
    """
    row = rows_of(tmp_path, parse_lanes(text, ranks=2))["all_reduce"]
    assert (row.calls_per_step, row.bytes_median, row.bytes_per_step) == (2, 64 * MIB, 128 * MIB)
    assert (row.time_ms, row.exposed_ms, row.wait_ms, row.transfer_ms) == (50, 50, 30, 20)
    # 2 (n - 1) / n is 1 for two ranks: 128 MiB in 20 ms.
    assert row.busbw_gbps == pytest.approx(128 * MIB / 20e6)
    assert row.median_transfer_ms == 10
    # The distances between the arrivals are 30 and 0 ms, five times each.
    assert row.arrival_spread_ms == 15
    assert (row.matched_calls, row.partial_calls) == (10, 0)
    assert row.last_arrivals["1"] >= 5


@pytest.mark.parametrize(("op", "factor"), [("allreduce", 1.5), ("allgather", 0.75), ("reducescatter", 0.75)])
def test_bus_bandwidth_of_four_ranks(op: str, factor: float, tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, parse_lanes(f"compute 0-80\n{op} 80-100 256MiB", ranks=4)).values()
    assert row.busbw_gbps == pytest.approx(factor * 256 * MIB / 20e6)


def lossy(rank: int, lost: tuple[int, int]) -> TraceBuilder:
    """Draw three steps with two all-reduces each; rank 1 lacks the one that ``lost`` names."""
    builder = TraceBuilder(rank, 2)
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 50, start + 60)
        builder.kernel("k", start + 10, start + 20)
        for number in range(2):
            if rank == 0 or (index, number) != lost:
                at = start + 30 + 10 * number
                builder.collective("allreduce", at, at + 5, nbytes=64 * MIB, seq=2 * index + number)
    return builder


@pytest.mark.parametrize(("lost", "known"), [((1, 1), False), ((2, 1), True)])
def test_an_operation_without_a_partner_leaves_the_bandwidth_of_its_step_unknown(
    lost: tuple[int, int], known: bool, tmp_path: Path
) -> None:
    # Of two complete steps of 100 ms the first is judged.
    row = rows_of(tmp_path, [lossy(rank, lost) for rank in range(2)])["all_reduce"]
    assert (row.calls_per_step, row.matched_calls) == (2, 5)
    assert row.busbw_gbps == (pytest.approx(128 * MIB / 10e6) if known else None)
    # Two all-reduces of 5 ms each, some of which may be waiting: the link is no slower than that.
    assert row.least_busbw_gbps == (None if known else pytest.approx(128 * MIB / 10e6))
    (shown,) = collective_table([row]).only(("Bus bandwidth",)).rows  # type: ignore[union-attr]
    assert shown == ("13.4 GB/s" if known else "at least 13.4 GB/s",)
