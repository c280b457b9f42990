"""What the log of all steps says of when they are slow."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tracedoc.diagnosis import Diagnosis
from tracedoc.run.steplog import BEGINS, ENDS, HEADER, RECORD, WINDOW, WRITTEN
from tracedoc.testing.cases import draw_log, write_job
from tracedoc.testing.lanes import parse_lanes


def diagnose(folder: Path, log: str) -> Diagnosis:
    """Diagnose two ranks with this log."""
    for builder in parse_lanes("compute 0-60\nallreduce 60-70", ranks=2):
        builder.write(folder / f"rank-{builder.rank}.json")
    write_job(folder, range(2), {}, log)
    return tracedoc.diagnose([folder], tracedoc.Options(jobs=1))


def test_the_step_from_which_on_a_job_is_slower(tmp_path: Path) -> None:
    """Steps 6 to 30 take 100 ms, steps 31 to 45 take 120: 15 of 40 take 20 ms longer, none 1.5 times 100."""
    facts = diagnose(tmp_path, "100 x30 120 x15").facts
    assert facts["slow_steps_pattern"].value == "from one step on"
    assert facts["slow_steps_start"].value == 31
    assert facts["slow_steps_usual_ms"].value == 100
    assert facts["slow_steps_excess_ms"].value == pytest.approx(20)
    assert facts["slow_steps_cost_ms"].value == pytest.approx(20 * 15 / 40)
    assert facts["step_outliers"].value == 0
    assert facts["slow_steps_period"].unknown == "slow steps do not come at equal distances"


@pytest.mark.parametrize(
    ("row", "excess_ms", "cost_ms"),
    [("150 130 130", 50, 11), ("130 150 130", 30, 11), ("140 x3", 40, 12)],
)
def test_slow_steps_in_a_row_at_equal_distances(
    tmp_path: Path, row: str, excess_ms: int, cost_ms: int
) -> None:
    """Seven steps of 100 ms, then three slow ones: a tenth of what these take longer is what a step costs."""
    facts = diagnose(tmp_path, f"100 x7 {row} " * 9).facts
    assert facts["slow_steps_pattern"].value == "regular"
    assert facts["slow_steps_period"].value == 10
    assert facts["slow_steps_start"].value == 8
    assert facts["slow_steps_lasting"].value == 3
    assert facts["slow_steps_usual_ms"].value == 100
    assert facts["slow_steps_excess_ms"].value == pytest.approx(excess_ms)
    assert facts["slow_steps_cost_ms"].value == pytest.approx(cost_ms, rel=0.06)


@pytest.mark.parametrize(
    "log",
    [
        "120 x30 100 x15",
        "100 x30 120 x8",
        "100 x15 120 x15 100 x15",
        "100 x45",
        # What makes steps long lasts for five of them, at random.
        "100 x5 90 x5 90 x5 115 x5 95 x5 105 x5 110 x5",
    ],
)
def test_a_job_that_gets_faster_or_recovers_is_not_slower(tmp_path: Path, log: str) -> None:
    """Also not one that is slower in its last eight steps only."""
    assert diagnose(tmp_path, log).facts["slow_steps_pattern"].value == "none"


def behind_a_window(folder: Path, log: str, *, written_ms: int | None = None) -> Diagnosis:
    """The same with a window in steps 21 and 22, and 2 s of writing, unless the log tells when it ended."""
    diagnose(folder, log)
    for rank in range(2):
        logged = draw_log(log, rank=rank)
        began = HEADER.unpack_from(logged)[3]
        marks = [(BEGINS, 2_050), (ENDS, 2_300)] + ([(WRITTEN, written_ms)] if written_ms else [])
        for number, ms in marks:
            logged += RECORD.pack(number, WINDOW, began + ms * 1_000_000, 0)
        (folder / f"rank-{rank}.steps").write_bytes(logged)
    return tracedoc.diagnose([folder], tracedoc.Options(jobs=1))


def test_a_change_behind_the_capture_may_be_its_own(tmp_path: Path) -> None:
    """What is slower behind it may be so for that reason, unless it makes outliers of all steps."""
    facts = behind_a_window(tmp_path, "100 x21 120 x49").facts
    assert facts["slow_steps_pattern"].value == "none"
    facts = behind_a_window(tmp_path, "100 x21 160 x49").facts
    assert facts["slow_steps_pattern"].value == "from one step on"
    assert facts["slow_steps_excess_ms"].value == pytest.approx(60)


def test_steps_count_again_once_the_trace_is_written(tmp_path: Path) -> None:
    """70 steps of 100 ms: 21 to 23 are captured, 24 to 44 begin within 2 s; it was written in step 25."""
    assert behind_a_window(tmp_path, "100 x70").facts["logged_steps"].value == 70 - 5 - 24
    facts = behind_a_window(tmp_path, "100 x70", written_ms=2_450).facts
    assert facts["logged_steps"].value == 70 - 5 - 5


def test_steps_behind_the_capture_that_are_all_slow_are_compared_with_captured_ones(tmp_path: Path) -> None:
    """The captured steps take 70 ms, and the job 110 ever since: 1.5 times as long, and 40 ms a step."""
    facts = diagnose(tmp_path, "0 x6 110 x40").facts
    assert facts["slow_steps_pattern"].value == "from one step on"
    assert facts["slow_steps_usual_ms"].value == pytest.approx(70)
    assert facts["slow_steps_cost_ms"].value == pytest.approx(40)
    assert diagnose(tmp_path, "0 x6 100 x40").facts["slow_steps_pattern"].value == "none"


def test_steps_right_behind_the_capture_are_as_usual_where_a_later_one_begins_the_change(
    tmp_path: Path,
) -> None:
    """Captured steps take 70 ms, the twelve behind them 80, the 50 from step 19 on 110."""
    facts = diagnose(tmp_path, "0 x6 80 x12 110 x50").facts
    assert facts["slow_steps_start"].value == 19
    assert facts["slow_steps_usual_ms"].value == pytest.approx(80)
    assert facts["slow_steps_excess_ms"].value == pytest.approx(30)


def test_the_median_of_a_log_is_as_sure_as_the_sign_test_has_it(tmp_path: Path) -> None:
    """100 to 200 ms in turns from both ends: of 101 steps about the 41st and the 61st, as tables have it.

    Rank 1 waits 15 ms for a core in every other step: 50 of 101, of 150 ms on average.
    """
    ends = [100 + place // 2 if place % 2 else 200 - place // 2 for place in range(101)]
    waits = (f"{ms} wait 15" if place % 2 else str(ms) for place, ms in enumerate(ends))
    facts = diagnose(tmp_path, "150 x5 " + " ".join(waits)).facts
    assert facts["logged_steps"].value == 101
    assert facts["logged_median_low_ms"].value == pytest.approx(140, abs=1)
    assert facts["logged_median_high_ms"].value == pytest.approx(160, abs=1)
    assert facts["logged_core_wait_frac"].value == pytest.approx(50 * 15 / (101 * 150))


def test_the_median_of_steps_that_last_is_less_sure(tmp_path: Path) -> None:
    """The same lengths in order: each is as long as the one before, and the log shows one rise."""
    facts = diagnose(tmp_path, "150 x5 " + " ".join(str(100 + place) for place in range(101))).facts
    assert facts["logged_median_low_ms"].value == pytest.approx(100, abs=5)
    assert facts["logged_median_high_ms"].value == pytest.approx(200, abs=5)
