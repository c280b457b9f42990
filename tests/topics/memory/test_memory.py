"""Allocations and copies of small traces."""

from __future__ import annotations

from pathlib import Path

from tests.topics.small_runs import (
    facts_of_rank,
    of_lanes,
    two_steps,
)
from tracedoc.pipeline import measure
from tracedoc.testing import TraceBuilder
from tracedoc.values import Unknown


def test_allocations_of_the_first_step_are_left_out(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    for start in range(110, 120):
        builder.runtime("cudaMalloc", start, start + 0.5)
    assert facts_of_rank(tmp_path, builder)["allocator_calls_per_step"] == 0
    builder.runtime("cudaMalloc", 230, 231).runtime("cudaFree", 240, 241)
    assert facts_of_rank(tmp_path, builder)["allocator_calls_per_step"] == 2


def test_a_second_step_that_is_cut_off_shows_a_habit_of_the_allocator(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index in (1, 2):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel("first", 100 * index + 10, 100 * index + 20, launch_ms=100 * index + 9)
    calls = {}
    for name, start in (("first", 130), ("both", 230)):
        builder.runtime("cudaMalloc", start, start + 5)
        path = builder.write(tmp_path / f"{name}.json")
        calls[name] = measure([path]).measurements.facts["allocator_calls_per_step"]
    assert calls["first"].value == Unknown("no finished step after the first one")
    assert calls["both"].value == 1


def test_exposed_copies_between_host_and_device_are_told_from_those_within_the_device(tmp_path: Path) -> None:
    lanes = """
      step: 100
      compute    0-60
      copy       50-65   64MiB
      copy       70-90   256MiB  DtoD
      copy       92-95   4MiB    DtoH
    """
    facts = of_lanes(tmp_path, lanes)
    # 60-65 and 92-95 cross the bus, 70-90 does not; 50-60 is behind compute.
    assert facts["exposed_copy_ms"] == 28
    assert facts["exposed_host_copy_ms"] == 8


def test_what_ddp_copies_from_buckets_into_gradients(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    name = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    for start in (100, 200, 300):
        builder.host(name, start + 24, start + 31).copy("DtoD", start + 30, start + 36, launch_ms=start + 25)
        builder.copy("DtoD", start + 40, start + 42, launch_ms=start + 39)
    facts = facts_of_rank(tmp_path, builder)
    assert facts["bucket_copy_ms"] == 6
    assert facts["exposed_copy_operators"] == f"{name} 6 ms, aten::copy_ 2 ms"
