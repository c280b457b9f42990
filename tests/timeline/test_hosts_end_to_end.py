"""The clocks of two hosts, from files to facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.late_arrivals import late_arrivals
from tracedoc.pipeline import measure
from tracedoc.testing import TraceBuilder

STEP = 100.0


def write_rank(path: Path, rank: int, host: str, ahead_ms: float) -> None:
    """Write five steps: rank 1 computes 30 ms longer, then both reduce; the last step only closes."""
    builder = TraceBuilder(rank, 2, host=host)
    for index in range(1, 6):
        begin = STEP * index + ahead_ms
        busy = 60.0 if rank == 1 else 30.0
        builder.step(index, begin, begin + 99).backward(begin + 1, begin + 2)
        builder.kernel("gemm", begin + 5, begin + 5 + busy, launch_ms=begin + 1)
        builder.collective("allreduce", begin + 5 + busy, begin + 70, launch_ms=begin + 2, nbytes=64 << 20)
    builder.write(path)


@pytest.mark.parametrize(("host", "ahead_ms"), [("node0", 0.0), ("node1", 3_200.0)])
def test_a_second_host_whose_clock_is_seconds_ahead_changes_no_fact(
    tmp_path: Path, host: str, ahead_ms: float
) -> None:
    write_rank(tmp_path / "rank-0.json", 0, "node0", 0.0)
    write_rank(tmp_path / "rank-1.json", 1, host, ahead_ms)
    found = measure([tmp_path])
    measurements, limits = found.measurements, found.limits
    assert [limit.code for limit in limits] == []
    waits, transfers = measurements.facts["exposed_wait_ms"], measurements.facts["exposed_transfer_ms"]
    assert waits.values == {"0": pytest.approx(30.0), "1": pytest.approx(0.0)}
    assert transfers.values == {"0": pytest.approx(5.0), "1": pytest.approx(5.0)}
    late = list(late_arrivals(measurements.run.blame))
    assert {arrival.culprit.rank for arrival in late} == {1}
    assert {arrival.culprit.lateness.name for arrival in late} == {"COMPUTE"}
