"""The steps of a diagnosis as a table."""

from __future__ import annotations

from msgspec.structs import replace

from tests.example_diagnoses import sharded


def test_frame_has_one_row_for_each_rank_and_step() -> None:
    frame = sharded().to_frame()
    assert list(frame.columns[:5]) == ["rank", "step", "step_ms", "compute_ms", "exposed_comm_ms"]
    assert len(frame) == 7 * 5
    late = frame[(frame["rank"] == 5) & (frame["step"] == 4)].iloc[0]
    assert (late["step_ms"], late["idle_ms"], late["idle_allocator_ms"]) == (400.0, 98.0, 88.0)


def test_cause_that_a_step_does_not_have_is_zero() -> None:
    diagnosis = sharded()
    steps = (
        replace(diagnosis.ranks[0].steps[0], idle_causes_ms={"gc": 2.0}),
        replace(diagnosis.ranks[0].steps[1], idle_causes_ms={}),
    )
    frame = replace(diagnosis, ranks=(replace(diagnosis.ranks[0], steps=steps),)).to_frame()
    assert list(frame["idle_gc_ms"]) == [2.0, 0.0]


def test_frame_without_steps_keeps_its_columns() -> None:
    frame = replace(sharded(), ranks=()).to_frame()
    assert frame.empty
    assert {"rank", "step", "step_ms", "complete"} <= set(frame.columns)
