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


def test_operators_that_make_samples_or_are_traced_by_a_compiler_are_no_compute(tmp_path: Path) -> None:
    """Of 100 ms the loader takes 40, with 35 of operators, compilation 20, with 15, and the model 30."""
    builder = TraceBuilder(0, 1, device=None)
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for index in range(4):
        start = 100.0 * index
        builder.step(index, start, start + 100)
        builder.host(loader, start, start + 40, category="user_annotation")
        builder.host("aten::conv2d", start + 5, start + 40)
        builder.host("compile_fx (dynamo_timed)", start + 40, start + 60)
        builder.host("aten::mm", start + 45, start + 60)
        builder.host("aten::addmm", start + 60, start + 80)
        builder.backward(start + 85, start + 95)
    builder.write(tmp_path / "rank-0.json")
    found = diagnose([tmp_path], Options(jobs=1))
    assert found.budget is not None
    assert (found.budget.step_ms, found.budget.compute_ms) == (100, 30)
    causes = found.budget.idle_causes_ms
    assert (causes["input"], causes["compile"], causes["unknown"]) == (40, 20, 10)
    assert {one.rule_id for one in found.findings} == {"input-stall", "recompilation", "host.pause"}
