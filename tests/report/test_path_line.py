"""The critical path as a line through the rows of the picture, and in words."""

from __future__ import annotations

import pytest

from tests.example_diagnoses import hostile, sharded
from tracedoc.report.charts.drawing import BESIDE, DEVICE, FAR, HOST, MOST_LEGS, draw, path_lines, path_words
from tracedoc.report.charts.over_time import TimeScale
from tracedoc.report.view import build_view
from tracedoc.tables import PathStretch

SCALE = TimeScale(100.0)
PATH = (
    PathStretch(0, "compute", 0.0, 20.0, "the forward pass"),
    PathStretch(0, "communication", 20.0, 30.0, "send"),
    PathStretch(2, "compute", 40.0, 90.0, "the backward pass"),
    PathStretch(2, "host", 90.0, 100.0),
)


def test_line_runs_where_the_work_was_and_goes_down_where_the_next_begins():
    lines = path_lines(PATH, (0, 1, 2), SCALE)
    assert lines[0].work == (
        f"M0.00 {DEVICE}H200.00M200.00 {BESIDE}H300.00M200.00 {DEVICE}V{BESIDE}M400.00 {BESIDE}V{FAR}"
    )
    assert lines[0].gaps == f"M300.00 {BESIDE}H400.00", "it waits from 30 to 40 ms"
    assert lines[1].work == f"M400.00 -{FAR}V{FAR}", "past the rank between"
    assert lines[2].work.startswith(f"M400.00 {DEVICE}H900.00M900.00 {HOST}H1000.00M400.00 -{FAR}V{DEVICE}")


def test_line_goes_up_to_a_rank_above():
    lines = path_lines(PATH, (2, 0), SCALE)
    assert f"M400.00 {BESIDE}V-{FAR}" in lines[0].work
    assert f"M400.00 {FAR}V{DEVICE}" in lines[2].work


def test_ranks_that_are_not_drawn_have_no_line():
    lines = path_lines(PATH, (1, 2), SCALE)
    assert set(lines) == {2}
    assert f"V{FAR}" not in lines[2].work


def test_words_tell_each_stay_on_a_rank():
    assert path_words(PATH) == (
        "0 ms to 30 ms: rank 0, compute 20 ms (mostly the forward pass), communication 10 ms (mostly send)",
        "40 ms to 100 ms: rank 2, compute 50 ms (mostly the backward pass), host 10 ms",
    )


def test_words_of_many_stays_are_few():
    many = [PathStretch(at % 2, "compute", at, at + 1.0) for at in range(3 * MOST_LEGS)]
    words = path_words(many)
    assert len(words) == MOST_LEGS + 1
    assert words[-1] == f"{2 * MOST_LEGS} shorter stays on a rank are not listed"
    assert path_words(()) == ()


def test_impossible_times_are_not_drawn():
    diagnosis = hostile()
    drawing = draw(diagnosis, build_view(diagnosis).findings)
    assert drawing is not None
    (row,) = drawing.rows
    assert row.path is not None
    assert row.path.work == f"M0.00 {HOST}H500.00"


@pytest.mark.parametrize("span_ms", [0.0, -5.0])
def test_of_no_time_everything_lies_at_its_beginning(span_ms: float):
    scale = TimeScale(span_ms)
    assert scale.thousandths(5.0) == scale.percent(5.0) == 0.0
    assert scale.ticks() == ()


def test_line_of_the_page_passes_through_the_late_rank():
    diagnosis = sharded()
    drawing = draw(diagnosis, build_view(diagnosis).findings)
    assert drawing is not None
    assert "the outlined line is the critical path" in drawing.caption
    late = next(row for row in drawing.rows if row.rank == 5)
    assert late.path is not None
    assert f"M500.00 {HOST}H700.00" in late.path.work, "200 to 280 of 400 ms in cudaMalloc"
