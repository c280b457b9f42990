"""What counts as compute in a CPU trace: operators that work, not operators that wait inside."""

from __future__ import annotations

from pathlib import Path

import tracedoc
from tracedoc.pipeline import Options, diagnose
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.idle import host_spans


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


def test_torchscript_compiles_where_no_operator_runs_in_its_first_calls(tmp_path: Path) -> None:
    """Of five calls of 20 ms, 5 ms after what runs before each, the first two take 60 and 30 ms more.

    What the script does before each of the calls is its own.
    """
    builder, start = TraceBuilder(0, 1, device=None), 0.0
    for before, inside in ((65, 0), (15, 20), (5, 0), (5, 0), (5, 0)):
        builder.host("aten::randn", start, start + 10)
        begins = start + 10 + before
        builder.host("forward", begins, begins + 20 + inside)
        builder.host("aten::linear", begins, begins + 10)
        builder.host("aten::tanh", begins + 10 + inside, begins + 20 + inside)
        start = begins + 20 + inside
    trace = tracedoc.load(builder.write(tmp_path / "rank-0.json"))
    assert host_spans(trace).compile.total_ns == 90_000_000
    found = diagnose([tmp_path], Options(jobs=1))
    # 30 of operators and 5 before them five times, and 90.
    assert found.ledger is not None
    assert {one.id: round(one.share_ms) for one in found.ledger.causes}["host.compile"] == 90
    assert "warm-up-captured" in {one.rule_id for one in found.findings}
