"""Which rank stands for a run."""

from __future__ import annotations

from pathlib import Path

import tracedoc
from tracedoc.testing import TraceBuilder


def test_the_rank_that_the_others_wait_for_stands_for_the_run(tmp_path: Path) -> None:
    """Rank 1 launches 30 ms later than ranks 0 and 2, which wait for it in the all-reduce of each step."""
    for rank in range(3):
        late = 30 if rank == 1 else 0
        builder = TraceBuilder(rank, 3)
        for number in range(4):
            begin = 100.0 * number
            builder.step(number, begin, begin + 100)
            builder.kernel("gemm", begin + 10 + late, begin + 40 + late)
            builder.collective("allreduce", begin + 40 + late, begin + 80, nbytes=8 << 20)
        builder.write(tmp_path / f"rank-{rank}.json")
    found = tracedoc.diagnose([tmp_path], tracedoc.Options(jobs=1))
    assert found.budget is not None
    assert found.budget.at is not None
    assert (found.budget.at.rank, found.budget.exposed_wait_ms) == (1, 0.0)
    # Of ranks that wait alike the first one stands for all.
    assert {one.rank: one.budget.exposed_wait_ms for one in found.ranks if one.budget} == {0: 30, 1: 0, 2: 30}
