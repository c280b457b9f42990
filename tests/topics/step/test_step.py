"""The step: how long it is, where it begins, and how its length varies."""

from __future__ import annotations

from pathlib import Path

from tests.topics.small_runs import (
    MIB,
    facts_of_rank,
    two_steps,
    values,
)
from tracedoc.pipeline import Options, measure
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.values import Unknown


def test_the_step_runs_from_first_kernel_to_first_kernel(tmp_path: Path) -> None:
    facts = facts_of_rank(tmp_path, two_steps(TraceBuilder()))
    assert facts["step_ms"] == 100
    assert facts["compute_ms"] == 10
    assert facts["idle_ms"] == 90
    assert facts["complete_steps"] == 2
    assert facts["kernels_per_step"] == 1
    assert facts["step_jitter_frac"] == Unknown("2 complete steps; three are needed")


def test_a_prefetched_copy_on_a_side_stream_begins_no_step(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    # Step 2 launches it at 201, and it runs before that step's first kernel at 210.
    builder.copy("HtoD", 202, 206, nbytes=1 << 20, stream=9, launch_ms=201)
    facts = facts_of_rank(tmp_path, builder)
    assert facts["step_ms"] == 100
    assert facts["exposed_copy_ms"] == 4
    assert facts["idle_ms"] == 86


def test_steps_that_take_no_time_have_no_jitter(tmp_path: Path) -> None:
    builder = TraceBuilder(device=None).host("aten::add", 100, 300)
    for index in (1, 2, 3, 4):
        builder.step(index, 100, 100)
    assert values(tmp_path, builder)["step_jitter_frac"] == Unknown("half of the steps take no time")


def test_only_the_chosen_steps_are_judged(tmp_path: Path) -> None:
    text = "compute 0-50\nstep: 100"
    parse_lanes(text, ranks=1, steps=6)[0].write(tmp_path / "rank-0.json")
    measured = measure([tmp_path], Options(steps=(2, 3))).measurements
    assert measured.steps == (2, 3)


def test_kernels_and_copies_of_other_steps_do_not_count(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index, (count, nbytes) in enumerate([(2, 1 * MIB), (3, 2 * MIB), (5, 4 * MIB), (7, 8 * MIB)], 1):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 50, start + 60)
        for number in range(count):
            at = start + 10 + 2 * number
            builder.kernel("k", at, at + 1, launch_ms=at - 0.5)
            builder.copy("HtoD", at + 1.2, at + 1.4, nbytes, pageable=True, launch_ms=at + 1.1)
    facts = values(tmp_path, builder)
    # Three steps of 100 ms: the lower median is the second.
    assert facts["kernels_per_step"] == facts["pageable_copies_per_step"] == 3
    assert facts["pageable_bytes_per_step"] == 6 * MIB
    assert facts["mean_kernel_ms"] == 1
