"""Of two runs with a ledger each the comparison says which causes grew, and adds up exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.comparison.test_scaling import on
from tests.example_diagnoses import sharded
from tests.known_runs import diagnosis_of
from tracedoc.comparison.compare import compare
from tracedoc.comparison.differences import FindingChange
from tracedoc.comparison.step_change import StepVerdict
from tracedoc.comparison.waterfall import cause_waterfall, step_lengths
from tracedoc.diagnosis import Diagnosis
from tracedoc.ledger import Ledger, LedgerCause
from tracedoc.report.comparison_sheet import comparison_sheet
from tracedoc.report.sheet import sheet_text


def slower_link() -> Diagnosis:
    """The sharded run with 30 ms more of exposed transfer, and no launch-bound part any more."""
    base = sharded()
    assert base.ledger is not None
    causes = tuple(
        replace(one, share_ms=one.share_ms + 30, place="the backward pass")
        if one.id == "link.transfer"
        else one
        for one in base.ledger.causes
        if one.id != "host.launch"
    )
    return replace(base, ledger=replace(base.ledger, step_ms=435.0, causes=causes))


def test_each_cause_is_a_part_with_its_change() -> None:
    fall = compare(sharded(), slower_link()).waterfall
    assert (fall.ideal_ms, fall.measured_ms, fall.by_cause) == (420, 435, True)
    changes = {part.key: part.change_ms for part in fall.parts}
    assert {key: change for key, change in changes.items() if change} == {
        "link.transfer": 30.0,
        "host.launch": -15.0,
    }
    assert sum(part.ideal_ms for part in fall.parts) == pytest.approx(fall.ideal_ms)
    assert sum(part.measured_ms for part in fall.parts) == pytest.approx(fall.measured_ms)


def test_cause_that_grew_says_where() -> None:
    parts = {part.key: part for part in compare(sharded(), slower_link()).waterfall.parts}
    assert parts["link.transfer"].evidence.startswith("the backward pass; all_gather: ")
    assert parts["host.launch"].evidence == "the forward pass"
    text = sheet_text(comparison_sheet(compare(sharded(), slower_link())), 0)
    assert "Times are those of the mean captured step." in text
    assert "Cause " in text


def test_work_of_fewer_gpus_is_scaled_to_that_of_more() -> None:
    fall = cause_waterfall(sharded(), slower_link(), 0.5)
    assert fall is not None
    assert fall.ideal_ms == 210
    assert sum(part.change_ms for part in fall.parts) == pytest.approx(435 - 210)


def test_without_a_ledger_on_both_sides_parts_of_the_step_are_compared() -> None:
    old = replace(sharded(), ledger=None)
    assert cause_waterfall(old, sharded()) is None
    assert not compare(old, sharded()).waterfall.by_cause
    assert step_lengths(old, sharded()) == (400, 400)


def test_efficiency_is_that_of_the_steps_which_the_parts_add_up_to() -> None:
    one, two = on(1, 100, 2.0), on(2, 100, 2.0)
    one = replace(one, ledger=Ledger(100.0, 100.0))
    two = replace(
        two, ledger=Ledger(125.0, 100.0, 0.0, (LedgerCause("link.slow", 25.0, (20.0, 25.0, 25.0), 25.0),))
    )
    found = compare(one, two)
    assert found.scaling is not None
    assert found.scaling.efficiency == pytest.approx(0.8)
    assert comparison_sheet(found).answer.endswith(
        "Most is lost to a link below what it should give (+25 ms)."
    )


def test_real_runs_add_up(sample_traces: Path) -> None:
    names = ("cpu_ddp_healthy", "cpu_ddp_straggler")
    sides = [diagnosis_of(sample_traces / name) for name in names]
    fall = compare(*sides).waterfall
    assert sum(part.change_ms for part in fall.parts) == pytest.approx(fall.measured_ms - fall.ideal_ms)
    # The pause of rank 1, and that it is late by it.
    largest = sorted(fall.parts, key=lambda part: -part.change_ms)[:2]
    assert {one.key for one in largest} == {"host.pause", "ranks.host"}


def test_the_first_line_names_the_function_that_went() -> None:
    base = sharded()
    assert base.ledger is not None
    code = LedgerCause("host.pause", 100.0, (100.0,) * 3, 100.0, place="`encode` (`train.py:7`)")
    ledger = replace(base.ledger, step_ms=520.0, causes=(*base.ledger.causes, code))
    found = replace(compare(replace(base, ledger=ledger), base), verdict=StepVerdict("improved"))
    line = comparison_sheet(found).answer
    assert line.endswith("mostly host code (Python, files, sleep) in `encode` (`train.py:7`) (-100 ms).")


def test_a_new_finding_says_nothing_twice() -> None:
    found = compare(sharded(), slower_link())
    said = {
        "The link is slow.": "",
        "The link is slow. Both save 9 ms.": ": Both save 9 ms.",
        "12 of 90 GB/s.": ": 12 of 90 GB/s.",
    }
    for message, shown in said.items():
        new = FindingChange("link.slow", "The link is slow", "new", head_message=message)
        assert dict(comparison_sheet(replace(found, findings=(new,))).lists)["New"] == (
            f"The link is slow [link.slow]{shown}",
        )


def test_the_samples_a_second_are_those_of_each_side(sample_traces: Path) -> None:
    """Its mean step, which they are of, is longer than its median one."""
    straggler = diagnosis_of(sample_traces / "cpu_ddp_straggler")
    side = replace(straggler, run=replace(straggler.run, samples_per_s=10.0))
    assert compare(side, side).base.samples_per_s == pytest.approx(10.0)
