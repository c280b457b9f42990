"""Definitions at their edges: each test fails where the definition is read in its nearest other way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

import tracedoc
from tracedoc.facts.catalog import Measurement
from tracedoc.facts.measure_run import Measurements
from tracedoc.ranks.run_view import habitual
from tracedoc.testing import TraceBuilder


def measured(folder: Path, builders: Iterable[TraceBuilder]) -> Measurements:
    for builder in builders:
        builder.write(folder / f"rank-{builder.rank}.json")
    measurements = tracedoc.measure([folder]).measurements
    return measurements


def facts_of(folder: Path, *builders: TraceBuilder) -> Mapping[str, Measurement]:
    return measured(folder, builders).facts


def step(builder: TraceBuilder, index: int) -> TraceBuilder:
    """Add the host range of step ``index``, which is 100 ms long, with a backward pass."""
    return builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)


def test_the_compute_stream_is_the_one_that_computes_longest_not_the_one_with_most_kernels(
    tmp_path: Path,
) -> None:
    builder = TraceBuilder()
    for index, start in [(1, 120), (2, 230)]:
        step(builder, index)
        builder.kernel("long", start, start + 50, stream=7, launch_ms=start - 1)
        for at in (1, 5, 9):
            builder.kernel("short", 100 * index + at, 100 * index + at + 1, stream=9)
    # From 120 to 230; the three short kernels of each step begin 100 ms apart.
    assert facts_of(tmp_path, builder)["step_ms"].value == 110


@pytest.mark.parametrize(
    ("complete", "world_size", "confidence"),
    [
        ([3, 3], 2, "high"),
        ([3, 2], 2, "medium"),  # the rank with the fewest steps counts
        ([3, 0], 2, "low"),  # of a rank that ended before its first step was whole nothing is known
        ([3, 3], 3, "medium"),
        ([0, 0], 2, "low"),
    ],
)
def test_confidence_is_that_of_the_rank_with_the_fewest_complete_steps(
    tmp_path: Path, complete: list[int], world_size: int, confidence: str
) -> None:
    builders = []
    for rank, count in enumerate(complete):
        builder = TraceBuilder(rank, world_size)
        for index in range(1, count + 2):  # the last one only closes the one before
            step(builder, index).kernel("k", 100 * index + 10, 100 * index + 20)
        builders.append(builder)
    assert measured(tmp_path, builders).confidence == confidence


def test_copies_hide_no_communication_and_communication_comes_before_copies(tmp_path: Path) -> None:
    builder = TraceBuilder(0, 2)
    for index in (1, 2, 3):
        start = 100 * index
        step(builder, index).kernel("k", start + 10, start + 20)
        builder.collective("allreduce", start + 15, start + 40)
        builder.copy("DtoH", start + 35, start + 50)
    facts = facts_of(tmp_path, builder)
    # Compute 10-20, exposed communication 20-40, exposed copy 40-50, idle 50-110.
    parts = ("compute_ms", "exposed_comm_ms", "exposed_copy_ms", "idle_ms")
    assert [facts[part].value for part in parts] == [10, 20, 10, 60]


def test_the_host_is_away_in_gaps_longer_than_twenty_launches_take(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index in (1, 2):
        at = 100.0 * index
        step(builder, index)
        for gap in [0.5] * 20 + [20.0] + [0.5] * 10 + [20.01, 0.0]:
            builder.kernel("k", at, at + 0.5)
            at += 0.5 + gap
    facts = facts_of(tmp_path, builder)
    assert facts["launch_interval_ms"].value == pytest.approx(1.0)
    # Twenty launches at their interval are 20 ms, at the most that a launch takes 2.
    assert facts["host_away_gaps"].value == 3  # with the one at the end of the step
    assert facts["launch_pace_idle_ms"].value == pytest.approx(30 * 0.5)


def test_a_pageable_copy_costs_its_exposed_time_and_the_idle_time_inside_its_call(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index in (1, 2, 3):
        start = 100 * index
        step(builder, index).kernel("first", start, start + 20)
        builder.copy("HtoD", start + 40, start + 46, pageable=True, launch_ms=start + 30)
        builder.kernel("other", start + 33, start + 38, stream=9, launch_ms=start + 29)
        builder.kernel("other", start + 44, start + 50, stream=9, launch_ms=start + 29.5)
    # The call lasts from 30 to 46: idle 30-33 and 38-40, exposed copy 40-44. The GPU is idle outside it too:
    # 20-30 and 50-100.
    facts = facts_of(tmp_path, builder)
    assert facts["idle_ms"].value == 65
    assert facts["pageable_stall_ms"].value == 9


def run_with_a_late_rank(
    late_ms: Iterable[float], *, loader_ms: float = 0.0, second_ms: float = 0.0
) -> list[TraceBuilder]:
    """Draw steps of 100 ms on three ranks, of which rank 1 comes to the all-reduce so much later.

    It waits for its data loader for up to ``loader_ms`` of that, and launches the rest later. Rank 2 comes
    ``second_ms`` after rank 0.
    """
    builders = [TraceBuilder(rank, 3) for rank in range(3)]
    for builder in builders:
        for index, late in enumerate([*late_ms, 0.0], 1):
            start, later = 100 * index, (0.0, late, second_ms)[builder.rank]
            step(builder, index).kernel("k", start + 1, start + 10, launch_ms=start)
            if builder.rank == 1 and loader_ms:
                builder.loader(start + 20, start + 20 + min(loader_ms, later))
            come = start + 20 + later
            builder.collective("allreduce", come, start + 90, launch_ms=come)
            builder.runtime("cudaDeviceSynchronize", come + 0.1, start + 90)
    return builders


def test_a_rank_is_late_in_a_step_from_two_percent_of_it(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, *run_with_a_late_rank([2.0, 1.99, 2.0, 1.99, 1.99]))
    assert facts["step_ms"].value == 100
    assert facts["straggler_steps_frac"].values["1"] == pytest.approx(2 / 5)


def test_what_a_late_rank_costs_is_what_the_next_latest_waits_for_it(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, *run_with_a_late_rank([30.0] * 5, loader_ms=20.0, second_ms=15.0))
    assert facts["straggler_cause"].values["1"] == "input"
    assert facts["straggler_cost_ms"].values["1"] == pytest.approx(15.0)  # the later of the others


def test_what_compiling_costs_is_no_more_than_the_median_step(tmp_path: Path) -> None:
    """Of 1,100 ms of finished steps after the first 900 are compilation; the median step takes 100 ms."""
    builder = TraceBuilder(0, 1, device=None)
    for number, (begin, end) in enumerate([(0, 100), (100, 200), (200, 1200), (1200, 1300)]):
        builder.step(number, begin, end).host("aten::mm", begin, begin + 50)
    builder.host("_compile.compile_inner", 260, 1160)
    facts = tracedoc.diagnose([builder.write(tmp_path / "rank-0.json")]).facts
    assert facts["step_ms"].value == 100
    assert facts["recompile_ms"].value == pytest.approx(900 / 1100 * 100)


def test_a_habit_is_what_three_quarters_of_the_steps_exceed() -> None:
    """Of five steps the second shortest counts, column by column."""
    values = np.array([[30, 5], [10, 1], [30, 4], [10, 2], [30, 3]])
    assert habitual(values).tolist() == [10, 2]
