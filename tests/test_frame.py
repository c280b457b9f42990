"""A diagnosis in a notebook: its tables as frames, and what a cell shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tests.example_diagnoses import HOSTILE, sharded
from tracedoc.errors import InputError


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


def test_ranks_have_their_median_step() -> None:
    frame = sharded().to_frame("ranks")
    assert list(frame["rank"]) == [0, 1, 2, 4, 5, 6, 7]
    first = frame.iloc[0]
    budget = sharded().ranks[0].budget
    assert budget is not None
    assert (first["step_ms"], first["exposed_wait_ms"]) == (budget.step_ms, budget.exposed_wait_ms)
    assert first["host"] == "gpu-node-a"


def test_findings_have_their_gain_and_their_first_fix() -> None:
    diagnosis = sharded()
    frame = diagnosis.to_frame("findings")
    assert list(frame["rule_id"]) == [finding.rule_id for finding in diagnosis.findings]
    with_gain = next(finding for finding in diagnosis.findings if finding.gain is not None)
    row = frame[frame["rule_id"] == with_gain.rule_id].iloc[0]
    assert with_gain.gain is not None
    assert row["gain_high_ms"] == with_gain.gain.high_ms
    assert row["change"] in {fix.change for fix in with_gain.fixes}


@pytest.mark.parametrize("table", ["collectives", "kernels"])
def test_tables_of_the_step_have_the_names_of_the_json(table: str) -> None:
    rows = getattr(sharded().detail, table)
    frame = sharded().to_frame(table)
    assert len(frame) == len(rows) > 0
    assert list(frame.columns) == list(rows[0].__struct_fields__)


@pytest.mark.parametrize("table", ["ranks", "findings", "collectives", "kernels"])
def test_empty_tables_keep_their_columns(table: str) -> None:
    empty = replace(
        sharded(), ranks=(), findings=(), detail=replace(sharded().detail, collectives=(), kernels=())
    )
    frame = empty.to_frame(table)
    assert frame.empty
    assert set(frame.columns) <= set(sharded().to_frame(table).columns)
    assert len(frame.columns) >= 4


def test_unknown_table_is_answered_with_those_there_are() -> None:
    with pytest.raises(InputError) as caught:
        sharded().to_frame("step")
    assert "steps, ranks, findings, ledger, collectives, kernels" in caught.value.hint


def test_repr_is_one_line_with_the_answer() -> None:
    text = repr(replace(sharded(), summary="Straggler: rank 5 is late. " + "long " * 100))
    assert "Straggler: rank 5 is late." in text
    assert "\n" not in text
    assert len(text) < 300


def test_notebook_shows_the_answer_and_escapes_what_strangers_wrote() -> None:
    diagnosis = sharded()
    finding = replace(diagnosis.findings[0], message=HOSTILE, title=HOSTILE)
    html = replace(diagnosis, summary=HOSTILE, findings=(finding,))._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert diagnosis.findings[0].title in diagnosis._repr_html_()


def test_a_run_is_named_by_a_string_a_path_or_a_list(sample_traces: Path) -> None:
    run = sample_traces / "synthetic_ddp_tiny_batch"
    options = tracedoc.Options(jobs=1, replay=False)
    of_list = tracedoc.diagnose([run], options)
    assert tracedoc.diagnose(run, options) == of_list
    assert tracedoc.diagnose(str(run), options) == of_list
    assert list(tracedoc.measure(run, options).measurements.run.digests) != []
