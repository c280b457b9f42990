"""Facts about waits for the GPU and long gaps, on small traces worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.pipeline import diagnose
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.values import Unknown, Value


def facts_of(path: Path) -> dict[str, Value]:
    measurements = tracedoc.measure([path]).measurements
    return {name: fact.value for name, fact in measurements.facts.items()}


def with_items(builder: TraceBuilder, *, annotation: str = "", pauses: bool = False) -> TraceBuilder:
    """Add three steps of 100 ms: 60 ms of compute, ``.item()`` until they are over, 30 ms from 70 on.

    In between the host is inside an operator, unless it pauses.
    """
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 1, start + 98).backward(start + 75, start + 80)
        builder.kernel("first", start, start + 60, launch_ms=start - 0.5)
        builder.host("aten::item", start + 2, start + 60.1)
        builder.host("aten::_local_scalar_dense", start + 2.1, start + 60.1)
        builder.runtime("cudaStreamSynchronize", start + 3, start + 60)
        if not pauses:
            builder.host("aten::embedding", start + 60.1, start + 69.9)
        if annotation:
            builder.host(annotation, start + 1, start + 61, category="user_annotation")
        builder.kernel("second", start + 70, start + 100, launch_ms=start + 69.9)
    return builder


def test_a_wait_is_named_with_its_operator_and_place(tmp_path: Path) -> None:
    facts = facts_of(with_items(TraceBuilder(), annotation="log the loss").write(tmp_path / "rank-0.json"))
    assert facts["sync_idle_ms"] == 10
    assert (facts["sync_call"], facts["sync_place"]) == (".item()", "log the loss")
    assert (facts["sync_call_waits"], facts["sync_places"]) == (1, 1)


def test_a_wait_in_a_step_without_phases_has_no_place(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("first", 10, 60, launch_ms=1).kernel("second", 70, 100, launch_ms=69)
    builder.host("aten::item", 2, 60.1).runtime("cudaStreamSynchronize", 3, 60)
    found = facts_of(builder.write(tmp_path / "rank-0.json"))
    assert found["sync_call"] == ".item()"
    assert isinstance(found["sync_place"], Unknown)


def test_a_pause_behind_a_wait_is_no_part_of_the_wait(tmp_path: Path) -> None:
    """The host calls nothing from 60.1 to 69.9 ms: mending either, the second kernel starts as early."""
    facts = facts_of(with_items(TraceBuilder(), pauses=True).write(tmp_path / "rank-0.json"))
    assert facts["sync_idle_ms"] == pytest.approx(0.2, abs=0.01)
    assert facts["host_away_idle_ms"] == pytest.approx(9.8, abs=0.01)


def test_the_diagnosis_keeps_the_tables_of_the_host(tmp_path: Path) -> None:
    diagnosis = diagnose([with_items(TraceBuilder()).write(tmp_path / "rank-0.json")])
    host = diagnosis.detail.host
    assert host is not None
    assert diagnosis.budget is not None
    assert sum(row.idle_ms for row in host.causes) == diagnosis.budget.idle_ms == 10
    (wait,) = host.syncs
    assert (wait.operator, wait.call, wait.count) == ("aten::item", "cudaStreamSynchronize", 1)
    assert wait.idle_ms == 10
    assert diagnosis.findings[0].rule_id == "blocking-syncs"


def test_a_step_without_waits_says_so(tmp_path: Path) -> None:
    (builder,) = parse_lanes("compute 0-100", ranks=1, lead=0.01)
    facts = facts_of(builder.write(tmp_path / "rank-0.json"))
    assert facts["sync_call"] == Unknown("no wait of the step leaves the GPU idle")
    assert facts["host_away_operator"] == Unknown("the host is never away for long")


def test_a_long_gap_is_named_by_the_operator_that_fills_it(tmp_path: Path) -> None:
    (builder,) = parse_lanes(
        """
        step: 100
        lead: 0.01
        compute    0-60  x100
        backward   50-55
        host       62-99  name=aten::sort
        host       99.2-99.3
        """,
        ranks=1,
    )
    facts = facts_of(builder.write(tmp_path / "rank-0.json"))
    assert facts["host_away_gaps"] == 1
    assert (facts["host_away_operator"], facts["host_away_phase"]) == ("aten::sort", "between two steps")


@pytest.mark.parametrize(("second_ends", "doing"), [(99, "aten::randint"), (88, "Python")])
def test_a_gap_is_that_of_its_longest_operator_if_less_lies_outside_of_all(
    tmp_path: Path, second_ends: float, doing: str
) -> None:
    """Of 40 ms one takes 19 and another 17, which leaves 4; or 16 and 6, which leaves 18."""
    first_ends = 80 if second_ends == 99 else 77
    (builder,) = parse_lanes(
        f"""
        step: 100
        lead: 0.01
        compute    0-60  x100
        backward   50-55
        host       61-{first_ends}  name=aten::randint
        host       82-{second_ends}  name=aten::sort
        host       99.2-99.3
        """,
        ranks=1,
    )
    assert facts_of(builder.write(tmp_path / "rank-0.json"))["host_away_operator"] == doing


def test_gaps_of_one_kind_are_told_by_number_longest_and_sum(tmp_path: Path) -> None:
    (builder,) = parse_lanes(
        """
        step: 100
        lead: 0.01
        compute    0-10   x100
        compute    30-40  x100
        compute    70-100 x300
        backward   92-95
        host       11-29  name=aten::sort
        host       41-69  name=aten::sort
        """,
        ranks=1,
    )
    host = diagnose([builder.write(tmp_path / "rank-0.json")]).detail.host
    assert host is not None
    (row,) = host.away
    assert (row.doing, row.where, row.count) == ("aten::sort", "the forward pass", 2)
    assert (row.longest_ms, row.idle_ms) == (30, 50)


def test_a_capture_with_stacks_names_the_function(tmp_path: Path) -> None:
    builder = with_items(TraceBuilder())
    for index in (1, 2, 3):
        start = 100 * index
        for depth, frame in enumerate(
            ("train.py(12): train", "metrics.py(40): log", "torch/_tensor.py(7): item")
        ):
            at = start + 1 + depth / 10
            builder.host(frame, at, start + 60.5, category="python_function")
    facts = facts_of(builder.write(tmp_path / "rank-0.json"))
    assert (facts["sync_call"], facts["sync_place"]) == (".item()", "metrics.py(40): log")


def test_lost_kernels_make_idle_time_unknown_and_are_a_limit(tmp_path: Path) -> None:
    builder = with_items(TraceBuilder())
    for index in (1, 2):  # behind the last kernel of the capture, none is lost
        builder.runtime("cudaLaunchKernel", 100 * index + 61, 100 * index + 61.01)
    path = builder.write(tmp_path / "rank-0.json")
    facts = facts_of(path)
    assert isinstance(facts["sync_idle_ms"], Unknown)
    assert isinstance(facts["launch_pace_idle_ms"], Unknown)
    diagnosis = diagnose([path])
    assert "lost-kernels" in {limit.code for limit in diagnosis.limits}
    assert "blocking-syncs" not in {finding.rule_id for finding in diagnosis.findings}


def clipped_and_updated(*, dtensors: bool) -> TraceBuilder:
    """Steps of 100 ms: 40 ms of compute; clipping launches a kernel 21 ms on, an update its own after 20."""
    builder = TraceBuilder()
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 1, start + 98).backward(start + 2, start + 5)
        if dtensors:
            builder.host("fsdp::all_gather_copy_in", start - 0.9, start - 0.8)
        builder.kernel("first", start, start + 40, launch_ms=start - 0.5)
        builder.host("aten::_foreach_norm", start + 41, start + 41.002)
        builder.kernel("clip", start + 61, start + 70, launch_ms=start + 60.99, op="aten::_foreach_mul_")
        builder.optimizer(start + 62, start + 90.1)
        builder.kernel("update", start + 90, start + 100, launch_ms=start + 89.99)
    return builder


def test_dispatch_of_dtensors_is_slow_launching_however_long_its_gaps_are(tmp_path: Path) -> None:
    """20 ms of the gap of 21 pass in clipping, and all 20 of the second one in the optimizer."""
    facts = facts_of(clipped_and_updated(dtensors=True).write(tmp_path / "rank-0.json"))
    idle = [facts[name] for name in ("dtensor_idle_ms", "launch_pace_idle_ms", "host_away_idle_ms")]
    assert idle == pytest.approx([40, 41, 0], abs=0.02)


def test_the_same_gaps_without_dtensors_are_something_else(tmp_path: Path) -> None:
    facts = facts_of(clipped_and_updated(dtensors=False).write(tmp_path / "rank-0.json"))
    assert isinstance(facts["dtensor_idle_ms"], Unknown)
    assert (facts["launch_pace_idle_ms"], facts["host_away_idle_ms"]) == (0, 41)
