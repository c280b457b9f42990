"""Hold predicted steps, peaks and what fits against runs that others published, with their sources."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tracedoc.planner.hardware import find_gpu
from tracedoc.planner.memory import SPREAD


@pytest.fixture(scope="module")
def bench(repository: Path) -> Any:
    sys.path.insert(0, str(repository / "benchmarks"))
    try:
        import plan
    finally:
        sys.path.pop(0)
    return plan


@pytest.fixture(scope="module")
def rows(bench: Any) -> list[Any]:
    return list(bench.rows())


def of(rows: list[Any], source: str) -> list[Any]:
    return [row for row in rows if row.published["source"] == source]


def test_fitted_rows_are_predicted_within_15_percent(bench: Any, rows: list[Any]) -> None:
    found = bench.summary(of(rows, "llm-foundry"))
    assert found["rows"] == 122
    assert found["median"] <= 0.05
    assert found["within 15 %"] >= 0.9
    assert found["in range"] >= 0.8


def test_rows_that_nothing_was_fitted_to_are_predicted_as_well(bench: Any, rows: list[Any]) -> None:
    found = bench.summary(of(rows, "torchtitan") + of(rows, "torchtune"))
    assert found["rows"] == 18
    assert found["median"] <= 0.08
    assert found["within 15 %"] >= 0.83


def test_slow_networks_are_predicted_within_15_percent(bench: Any, rows: list[Any]) -> None:
    found = bench.summary(of(rows, "fms-fsdp"))
    assert (found["rows"], found["within 15 %"]) == (7, 1.0)


def test_layouts_of_megatron_and_torchtitan_are_predicted_within_a_third(bench: Any, rows: list[Any]) -> None:
    """Constants were fitted to NeMo's runs, nothing to those of torchtitan."""
    fitted, left_out = bench.summary(of(rows, "NeMo")), bench.summary(of(rows, "torchtitan, layouts"))
    assert (fitted["rows"], left_out["rows"]) == (19, 11)
    assert fitted["median"] <= 0.06
    assert fitted["within 15 %"] >= 0.9
    assert fitted["in range"] >= 0.9
    assert left_out["median"] <= 0.05
    assert left_out["within 15 %"] >= 0.8
    assert left_out["in range"] >= 0.8
    errors = [abs(row.error) for row in of(rows, "torchtitan, layouts")]
    assert max(errors) <= 0.33


def test_layouts_are_predicted_within_15_percent(bench: Any, rows: list[Any]) -> None:
    """Dense models, and those with experts."""
    layouts = [row for row in rows if "layout" in row.published]
    dense = bench.summary(row for row in layouts if not row.question.model.experts_met)
    assert dense["rows"] == 94
    assert dense["median"] <= 0.05
    assert dense["within 15 %"] >= 0.94
    experts = bench.summary(row for row in layouts if row.question.model.experts_met)
    assert experts["rows"] == 61
    assert experts["median"] <= 0.07
    assert experts["within 15 %"] >= 0.9
    assert experts["in range"] >= 0.95


def test_layouts_that_nothing_was_fitted_to_are_predicted_as_well(bench: Any, rows: list[Any]) -> None:
    names = ("FlagPerf, Megatron", "Megatron-Bridge, held back", "DGX Cloud, Nemotron and Grok")
    names += ("torchtitan, layouts", "Infinigence, RTX 4090", "Korthikanti et al., A100")
    names += ("Megatron-Bridge, 26.04",)
    found = bench.summary(row for name in names for row in of(rows, name))
    assert found["rows"] == 76
    assert found["median"] <= 0.08
    assert found["within 15 %"] >= 0.9
    assert found["in range"] >= 0.94


def test_ranges_hold_most_runs_and_are_narrow_where_the_gpu_is_known(rows: list[Any]) -> None:
    assert sum(row.in_range for row in rows) >= 0.95 * len(rows)
    dense = [row for row in rows if not row.question.model.experts_met]
    assert sum(row.in_range for row in dense) >= 0.95 * len(dense)
    known = [row for row in dense if find_gpu(row.published["gpu"]).matmul]
    widths = [row.step.worst_ms / row.step.best_ms for row in known]
    assert max(widths) <= 1.51
    assert median(widths) <= 1.35


def test_no_run_that_ran_is_refused(rows: list[Any]) -> None:
    assert [row.published for row in rows if row.refused] == []


def test_published_peaks_are_predicted_within_10_percent(bench: Any, rows: list[Any]) -> None:
    found = bench.summary(rows)
    assert found["peaks"] == 26
    assert found["peaks within 10 %"] >= 0.9
    alone = bench.summary(row for row in rows if "layout" not in row.published)
    assert alone["peaks within 10 %"] >= 0.9


def test_nine_of_ten_published_peaks_lie_within_the_spread(rows: list[Any]) -> None:
    errors = [row.peak_error for row in rows if row.peak_error is not None]
    assert sum(abs(error) <= SPREAD for error in errors) >= 0.9 * len(errors)
    # It is no wider than that takes: with a quarter less it would not hold.
    assert sum(abs(error) <= 0.75 * SPREAD for error in errors) < 0.9 * len(errors)
