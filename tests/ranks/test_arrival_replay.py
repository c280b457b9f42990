"""What late ranks cost each step, on traces whose answer is worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracedoc.pipeline import Options, measure
from tracedoc.ranks.arrival_replay import StartPolicy, gains_together
from tracedoc.testing import TraceBuilder

MIB = 1 << 20


@pytest.mark.parametrize("together", [StartPolicy.MEDIAN, StartPolicy.MEAN])
def test_a_late_rank_is_on_time_again_where_its_host_waits(tmp_path: Path, together: StartPolicy) -> None:
    """Rank 1 is away for 200 ms in step 2, whose reduction takes 10 ms; half of it counts by the mean.

    No kernel follows the reduction in its step: only the hosts wait for it.
    """
    for rank in range(2):
        builder, start = TraceBuilder(rank, 2), 1.0
        for index in range(5):
            away = 200.0 if index == 2 else 0.0
            mine, end = start + 60.0 + away * rank, start + 70.0 + away
            builder.step(index, start - 0.5, end + 0.4)
            builder.kernel("gemm", start, start + 50.0, launch_ms=start - 0.01)
            builder.kernel("gemm", mine - 10.0, mine, launch_ms=mine - 10.01)
            builder.collective("allreduce", mine, end, nbytes=64 * MIB, launch_ms=mine - 9.9)
            builder.runtime("cudaDeviceSynchronize", mine - 9.8, end + 0.01)
            start = end + 1.0
        builder.write(tmp_path / f"rank-{rank}.json")
    run = measure([tmp_path], Options(jobs=1)).measurements.run
    gained = gains_together(run, together, range(4)) / 1e6
    late = 200.0 if together is StartPolicy.MEDIAN else 100.0
    assert gained == pytest.approx([0.0, 0.0, late, 0.0], abs=0.1)
