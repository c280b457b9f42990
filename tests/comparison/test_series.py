"""A series of runs: its curve, its bend, and how it goes on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.comparison.test_scaling import on
from tracedoc.comparison.compare import compare_series, history
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import InputError
from tracedoc.predicted import NotPredicted, Predicted, ReplayReport
from tracedoc.report.series_sheets import series_sheet
from tracedoc.report.sheet import sheet_text


def runs() -> list[Diagnosis]:
    """Return weak scaling whose steps take 100, 100, 125 and 250 ms on 1, 2, 4 and 8 GPUs."""
    return [on(1, 100, 2.0), on(2, 100, 2.0), on(4, 125, 2.0), on(8, 250, 2.0)]


def predicting(run: Diagnosis, *steps_ms: tuple[float, float, float]) -> Diagnosis:
    assert run.budget is not None
    step_ms = run.budget.step_ms
    answers = tuple(
        Predicted(f"more-ranks by={2 + 2 * place}", one, (0.0, 0.0, 0.0), "communication", "medium")
        for place, one in enumerate(steps_ms)
    )
    return replace(run, replay=ReplayReport("used", step_ms=step_ms, more_ranks=answers))


def test_curve_has_efficiency_speed_up_and_cost_of_each_run() -> None:
    found = compare_series(runs())
    assert found.kind == "weak"
    assert [point.gpus for point in found.points] == [1, 2, 4, 8]
    assert [point.efficiency for point in found.points] == pytest.approx([1, 1, 0.8, 0.4])
    assert [point.step_efficiency for point in found.points] == pytest.approx([1, 1, 0.8, 0.5])
    assert [point.speed_up for point in found.points] == pytest.approx([1, 2, 3.2, 3.2])
    assert [point.gpu_time_ratio for point in found.points] == pytest.approx([1, 1, 1.25, 2.5])


def test_curve_bends_where_a_step_of_it_loses_most() -> None:
    assert compare_series(runs()).bend == 8
    assert compare_series([on(1, 100, 2.0), on(2, 101, 2.0), on(4, 102, 2.0)]).bend is None


def test_order_of_the_runs_does_not_matter() -> None:
    samples = (64, 128, 256, 512)
    forward = compare_series(runs(), samples_per_step=samples)
    backward = compare_series(runs()[::-1], samples_per_step=samples[::-1])
    assert forward.points == backward.points
    assert [one.samples_per_s for one in forward.points] == pytest.approx([640, 1280, 2048, 2048])


def test_gpu_hours_are_those_of_a_million_samples() -> None:
    """8 GPUs x 250 ms for 512 samples: 3.90625 ms of a GPU each, a million of which are 1.085 hours."""
    found = compare_series(runs(), samples_per_step=(64, 128, 256, 512))
    assert found.points[-1].gpu_hours == pytest.approx(8 * 0.250 / 512 * 1e6 / 3600)


def test_curve_goes_on_with_the_replay_of_the_last_run() -> None:
    sides = runs()[:3]
    sides[-1] = predicting(sides[-1], (125, 150, 200), (125, 200, 400))
    twice, four_times = compare_series(sides).beyond
    assert (twice.gpus, four_times.gpus) == (8, 16)
    assert twice.step_ms == pytest.approx((125, 150, 200))
    assert twice.efficiency == pytest.approx((0.5, 2 / 3, 0.8))


def test_beyond_one_host_there_is_a_bound_only() -> None:
    sides = [replace(one, ranks=one.ranks[:1]) for one in runs()[:3]]
    sides[-1] = predicting(sides[-1], (125, 150, 200), (125, 200, 400))
    twice, four_times = compare_series(sides).beyond
    assert twice.step_ms is not None
    assert four_times.step_ms is None
    assert "other hosts" in four_times.reason
    assert (four_times.least_ms, four_times.most_efficiency) == pytest.approx((125, 0.8))


def test_what_is_not_replayed_says_why_and_what_is_known() -> None:
    sides = runs()[:3]
    refused = ReplayReport("refused", "kernels are missing")
    assert compare_series([*sides[:2], replace(sides[2], replay=refused)]).beyond[0].reason == refused.reason
    answer = (NotPredicted("more-ranks by=2", "a pipeline can grow in two ways"),) * 2
    unsure = replace(sides[2], replay=ReplayReport("used", step_ms=125.0, more_ranks=answer))
    assert compare_series([*sides[:2], unsure]).beyond[0].reason == answer[0].reason


def test_strong_scaling_is_bounded_by_its_compute() -> None:
    """All compute: 25 ms on 4 GPUs become at least 12.5 on 8, which an ideal curve has at 12.5."""
    found = compare_series([on(1, 100, 2.0), on(2, 50, 1.0), on(4, 25, 0.5)])
    assert found.kind == "strong"
    twice = found.beyond[0]
    assert twice.step_ms is None
    assert (twice.least_ms, twice.most_efficiency) == pytest.approx((12.5, 1.0))


def test_text_marks_predictions_and_names_the_bend() -> None:
    sides = runs()[:3]
    sides[-1] = predicting(sides[-1], (125, 150, 200), (125, 200, 400))
    text = " ".join(sheet_text(series_sheet(compare_series(sides)), 100).split())
    assert text.startswith("80 % efficiency from 1 to 4 GPUs (weak scaling): 3.20 times as fast, ideally 4.")
    assert "The curve bends at 4 GPUs: the step from 2 is 80 % efficient" in text
    assert "predictions by replay and bounds, nothing measured" in text
    assert "about 150 ms (125 ms to 200 ms)" in text


def test_two_runs_on_as_many_gpus_are_an_error() -> None:
    with pytest.raises(InputError, match="two of these runs have 2 GPUs"):
        compare_series([on(1, 100, 2.0), on(2, 100, 2.0), on(2, 110, 2.0)])


def test_each_run_needs_its_samples() -> None:
    with pytest.raises(InputError, match="2 numbers of samples were given for 4 runs"):
        compare_series(runs(), samples_per_step=(64, 128))


def test_curve_bends_where_efficiency_falls_and_not_where_it_is_low() -> None:
    """The steps of the curve are 50 % and then 40 % efficient: half is lost at 2 GPUs, a tenth more at 4."""
    assert compare_series([on(1, 100, 2.0), on(2, 200, 2.0), on(4, 500, 2.0)]).bend == 2


def test_efficiency_in_a_history_is_against_the_run_on_fewest_gpus() -> None:
    named = [(f"on {gpus}", run) for gpus, run in zip((1, 2, 4, 8), runs(), strict=True)]
    found = [run.efficiency for run in history("runs", named).runs]
    assert found[0] is None
    assert found[1:] == pytest.approx([1.0, 0.8, 0.4])
