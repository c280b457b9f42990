"""What counts as compute in a CPU trace: operators that work, not operators that wait inside."""

from __future__ import annotations

from pathlib import Path

from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder


def test_an_operator_that_waits_for_a_collective_inside_does_not_compute_meanwhile(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 1, device=None)
    for index in range(4):
        start = 100.0 * index
        builder.step(index, start, start + 100)
        builder.host("aten::mm", start, start + 20)
        # A tensor-parallel result is awaited by the operator that needs it.
        builder.host("aten::add", start + 30, start + 80)
        builder.host("PythonSubclass", start + 30.5, start + 79)
        builder.host("_c10d_functional::wait_tensor", start + 31, start + 71)
        builder.host("gloo:all_reduce", start + 25, start + 70, thread="gloo0", category="user_annotation")
        builder.backward(start + 85, start + 95)
    builder.write(tmp_path / "rank-0.json")
    budget = diagnose([tmp_path], Options(jobs=1)).budget
    assert budget is not None
    # aten::mm 20, aten::add 1 before and 9 after its wait, the node of the backward pass 10.
    assert (budget.step_ms, budget.compute_ms) == (100, 40)
    # 25-30 and 31-70: nothing computes while the collective runs.
    assert (budget.exposed_comm_ms, budget.comm_ms) == (44, 45)
