"""Facts that no rule decides on and people read: small runs with numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import tracedoc
from tracedoc.facts.catalog import Measurement
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.values import Unknown, Value

MIB = 1 << 20


def of_run(folder: Path, builders: Iterable[TraceBuilder]) -> Mapping[str, Measurement]:
    for builder in builders:
        builder.write(folder / f"rank-{builder.rank}.json")
    measurements = tracedoc.measure([folder]).measurements
    return measurements.facts


def of_lanes(folder: Path, text: str, *, ranks: int = 2) -> dict[str, Value]:
    found = of_run(folder, parse_lanes(text, ranks=ranks))
    return {name: fact.value for name, fact in found.items()}


def steps(builder: TraceBuilder, *starts: float) -> TraceBuilder:
    """Add host steps at these times (the last one only closes the one before), each with a kernel of 10 ms.

    It starts 10 ms into the step and is launched 1 ms earlier.
    """
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], starts[-1] + 100], strict=True), 1):
        builder.step(index, start, end - 1).backward(start + 50, start + 60)
        builder.kernel("first", start + 10, start + 20, launch_ms=start + 9)
    return builder


def values(folder: Path, builder: TraceBuilder) -> dict[str, Value]:
    return {name: fact.value for name, fact in of_run(folder, [builder]).items()}


def idle_causes(path: Path) -> dict[str, float]:
    """The idle time of the analysed step by cause, in ms."""
    step = tracedoc.measure([path]).measurements.run.digests[0].judged_step
    assert step is not None
    return {cause: ns / 1e6 for cause, ns in step.idle_ns.items()}


def test_steps_that_take_no_time_have_no_jitter(tmp_path: Path) -> None:
    builder = TraceBuilder(device=None).host("aten::add", 100, 300)
    for index in (1, 2, 3, 4):
        builder.step(index, 100, 100)
    assert values(tmp_path, builder)["step_jitter_frac"] == Unknown("half of the steps take no time")


def test_idle_time_of_the_host_s_other_delays(tmp_path: Path) -> None:
    builder = steps(TraceBuilder(), 100, 200, 300)
    # The judged step is 110 to 210, idle from 120 on; its successor is launched at 209.
    builder.host("compile_fx (dynamo_timed)", 130, 140).host("gc.collect", 145, 150)
    builder.host("aten::add", 160, 170)
    facts, causes = values(tmp_path, builder), idle_causes(tmp_path / "rank-0.json")
    assert facts["idle_ms"] == 90
    assert (causes["compile"], causes["gc"]) == (10, 5)
    assert "profiler" not in causes
    # A launch explains 50 us of the 1 ms that follow it; the rest of it is a kernel that could have run.
    assert facts["queued_idle_ms"] == pytest.approx(0.95)
    assert facts["dispatch_idle_ms"] == pytest.approx(10, abs=0.06)
    # 90 less 10 + 5 + 10 of the ranges and the millisecond after the launch.
    assert facts["python_idle_ms"] == pytest.approx(64, abs=0.06)


def test_the_profiler_s_own_work_is_a_cause(tmp_path: Path) -> None:
    document = json.loads(steps(TraceBuilder(), 100, 200, 300).to_json())
    flush = next(e for e in document["traceEvents"] if e.get("name") == "ProfilerStep#1")
    # From 131 to 151 ms: the step begins at 100.
    overhead = {**flush, "cat": "overhead", "name": "Activity Buffer Request", "args": {}}
    document["traceEvents"].append({**overhead, "ts": flush["ts"] + 31_000, "dur": 20_000})
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(document))
    assert idle_causes(path)["profiler"] == 20


def test_only_the_captures_of_graphs_are_compilation_not_the_time_between(tmp_path: Path) -> None:
    builder = steps(TraceBuilder(), 100, 200, 300)
    for start in (130, 150):
        builder.runtime("cudaStreamBeginCapture", start, start + 0.1)
        builder.runtime("cudaStreamEndCapture", start + 9.9, start + 10)
    assert idle_causes(builder.write(tmp_path / "rank-0.json"))["compile"] == 20


def test_the_launch_interval_is_that_of_the_judged_step(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index, (first, second) in enumerate([(3, 6), (1, 2), (7, 9)], 1):
        start = 100 * index
        builder.step(index, start, start + 99).backward(start + 50, start + 60)
        for at in (5, 5 + first, 5 + first + second):
            builder.kernel("k", start + at + 1, start + at + 1.5, launch_ms=start + at)
    # Two complete steps of 100 ms: the first is judged, with 3 and 6 ms.
    assert values(tmp_path, builder)["launch_interval_ms"] == 4.5


def test_a_full_launch_queue_is_not_the_host_s_work(tmp_path: Path) -> None:
    builder = steps(TraceBuilder(), 100, 200, 300)
    for start in (100, 200, 300):
        builder.runtime("cudaLaunchKernel", start + 70, start + 90)
        builder.runtime("cudaLaunchKernel", start + 95, start + 95.19)  # slow, but not blocked
    # The host's step is 99 ms long.
    assert values(tmp_path, builder)["host_floor_ms"] == 79


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


def test_peaks_are_those_of_the_data_sheet(tmp_path: Path) -> None:
    facts = values(tmp_path, steps(TraceBuilder(device="NVIDIA H100 80GB HBM3"), 100, 200, 300))
    # H100 SXM: dense bf16 and tf32.
    assert (facts["peak_half_tflops"], facts["peak_tf32_tflops"]) == (989, 494)


def test_graphs_are_counted_by_their_launches(tmp_path: Path) -> None:
    assert values(tmp_path, steps(TraceBuilder(), 100, 200, 300))["cuda_graph_launches"] == 0
    builder = steps(TraceBuilder(), 100, 200, 300)
    for start in (100, 200, 300):
        builder.runtime("cudaGraphLaunch", start + 32, start + 32.1)
        builder.runtime("cudaGraphLaunch", start + 34, start + 34.1)
    assert values(tmp_path, builder)["cuda_graph_launches"] == 2


BUCKETS = """
backward   20-80
compute    0-80  x40
allreduce  40-50 25MiB  50-60 10MiB  70-75 1MiB
allgather  85-90 8MiB
step: 100
"""


def test_reductions_of_gradients_by_number_and_size(tmp_path: Path) -> None:
    facts = of_lanes(tmp_path, BUCKETS)
    assert facts["gradient_buckets"] == 3
    assert facts["gradient_bytes"] == 36 * MIB
    assert facts["median_bucket_bytes"] == 10 * MIB
    assert facts["comm_bytes_per_step"] == 44 * MIB
    assert facts["matched_collectives_frac"] == 1


@pytest.mark.parametrize(
    ("second", "mebibytes"),
    [("", 4), ("70-95 1MiB x12", 4)],  # twelve in all, or in each of two micro-batches
    ids=["one reduces", "both reduce"],
)
def test_a_bucket_is_a_third_of_what_one_micro_batch_reduces(
    tmp_path: Path, second: str, mebibytes: int
) -> None:
    text = f"""
    host       0-5    name=DistributedDataParallel.forward  50-55 name=DistributedDataParallel.forward
    backward   15-28  65-78
    compute    0-30   45-75
    allreduce  20-45  1MiB x12  {second}
    optimizer  95-100
    """
    facts = of_lanes(tmp_path, text)
    assert facts["gradient_bytes"] == (24 if second else 12) * MIB
    assert facts["suggested_bucket_bytes"] == mebibytes * MIB
    assert facts["suggested_bucket_mb"] == mebibytes


def test_only_the_exposed_part_of_a_small_collective_counts(tmp_path: Path) -> None:
    text = "compute 0-60  80-84\nallreduce 75-85 1MiB\nstep: 100"
    assert of_lanes(tmp_path, text)["latency_bound_exposed_ms"] == 6


def without_size(builder: TraceBuilder, nbytes: int) -> str:
    """Return a trace whose collectives of ``nbytes`` do not say their size, as graphs and old files do."""
    document = json.loads(builder.to_json())
    for event in document["traceEvents"]:
        arguments = event.get("args", {})
        if arguments.get("In msg nelems") == nbytes // 2:
            del arguments["In msg nelems"], arguments["Out msg nelems"]
    return json.dumps(document)


def test_a_collective_of_unknown_size_is_not_small(tmp_path: Path) -> None:
    # One of 1 MiB is latency-bound on this link, one of 512 MiB is not; each is exposed for 10 ms.
    text = "compute 0-60\nallreduce 60-70 512MiB  75-85 1MiB\nstep: 100"
    facts = of_lanes(tmp_path, text)
    assert facts["latency_bound_frac"] == 0.5
    assert facts["latency_bound_exposed_ms"] == 10
    for builder in parse_lanes(text, ranks=2):
        (tmp_path / f"rank-{builder.rank}.json").write_text(without_size(builder, 1 * MIB))
    measurements = tracedoc.measure([tmp_path]).measurements
    assert measurements.facts["latency_bound_exposed_ms"].value == 0
    assert measurements.facts["comm_bytes_per_step"].value == Unknown("1 of 2 collectives carry no size")


def test_a_collective_that_one_rank_lost_is_not_matched(tmp_path: Path) -> None:
    builders = []
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 20)
            for number in range(2):
                if (rank, index, number) != (1, 2, 1):
                    at = start + 30 + 10 * number
                    builder.collective("allreduce", at, at + 5, seq=2 * index + number)
        builders.append(builder)
    # 6 + 5 collectives, of which one has no partner.
    assert of_run(tmp_path, builders)["matched_collectives_frac"].value == pytest.approx(10 / 11)


def test_what_remains_between_two_clocks(tmp_path: Path) -> None:
    builders = []
    for rank, ahead_ms in enumerate((0.0, 700.0)):
        builder = TraceBuilder(rank, 2, host=f"node{rank}")
        for index in (1, 2, 3):
            start = 100 * index + ahead_ms
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 20)
            # Rank 1 leaves 0, 0.01 and 0.04 ms later than its clock's distance alone.
            end = start + 40 + (0.0, 0.01, 0.04)[index - 1] * rank
            builder.collective("allreduce", start + 30, end)
        builders.append(builder)
    # The median is 0.01 ms more than the distance; what is left is 0.01, 0 and 0.03 ms.
    assert of_run(tmp_path, builders)["clock_residual_ms"].value == pytest.approx(0.01)


SHARDED = """
strategy: fsdp2
lead: 30
backward   40-120
allgather  {forward}   40-120 256MiB x4 2ms prefetch unit=layers.*
compute    2-42 x4 8ms unit=layers.*          42-122 x4 18ms unit=layers.*
"""


def test_gathers_are_as_many_units_ahead_as_they_start_before(tmp_path: Path) -> None:
    late = of_lanes(tmp_path, SHARDED.format(forward="0-40 256MiB x4 2ms unit=layers.*"))
    assert late["prefetch_depth"] == 0
    # Each but the first starts with the compute of the unit before it: one unit ahead.
    starts = (0, 3, 13, 23)
    ahead = "  ".join(f"{at}-{at + 2} 256MiB unit=layers.{unit}" for unit, at in enumerate(starts))
    once = SHARDED.format(forward=ahead).replace("40-120 256MiB x4 2ms prefetch unit=layers.*", "")
    assert of_lanes(tmp_path, once)["prefetch_depth"] == 1


def test_the_part_of_a_stall_that_a_late_launch_makes(tmp_path: Path) -> None:
    # Each gather is launched 0.05 ms before it starts; seven of eight have compute to hide behind.
    facts = of_lanes(
        tmp_path,
        """
        strategy: fsdp2
        lead: 1.9
        backward   40-120
        allgather  0-40 256MiB x4 2ms lead=0.05 unit=layers.*
        allgather  40-120 256MiB x4 2ms lead=0.05 prefetch unit=layers.*
        compute    2-42 x4 8ms unit=layers.*   42-122 x4 18ms unit=layers.*
        """,
    )
    # The kernel behind a gather is launched 1.9 ms before it starts: each of the eight stalls is that long.
    assert facts["gather_stall_ms"] == pytest.approx(8 * 1.9)
    assert facts["hideable_gather_stall_ms"] == pytest.approx(7 * 1.9)
    # In seven of them 0.05 ms would remain had the gather started as it was launched.
    assert facts["gather_stall_late_ms"] == pytest.approx(7 * 1.85)


def test_a_gather_of_a_block_takes_its_bytes_and_the_latency_of_the_link(tmp_path: Path) -> None:
    lanes = SHARDED.format(forward="0-40 256MiB x4 2ms unit=layers.*")
    # 7/8 of 256 MiB and of the half-rate size of 20 MiB cross the link of an H100, at 0.8 x 450 GB/s.
    estimate = of_lanes(tmp_path, lanes, ranks=8)["block_gather_estimate_ms"]
    assert estimate == pytest.approx(0.875 * 276 * MIB / 360e6)


def test_small_units_cost_their_latency_and_the_hooks_that_keep_the_gpu_idle(tmp_path: Path) -> None:
    builders = []
    for rank in range(2):
        builder = TraceBuilder(rank, 2)
        for index in (1, 2, 3):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 90, start + 95)
            for unit in range(8):
                at = start + 10 * unit
                hook = f"FSDP::all_gather (layers.{unit // 4}.part{unit % 4})"
                # 6 ms of Python inside the hook before the next kernel is launched.
                builder.host(
                    f"FSDP::pre_forward (layers.{unit // 4}.part{unit % 4})",
                    at + 2,
                    at + 8,
                    category="user_annotation",
                )
                builder.collective(
                    "allgather", at + 0.1, at + 0.3, nbytes=2 * MIB, launch_ms=at, within=[hook]
                )
                builder.kernel("first", at + 9, at + 10, launch_ms=at + 8.9)
        builders.append(builder)
    found = of_run(tmp_path, builders)
    assert (found["fsdp_units"].value, found["fsdp_blocks"].value) == (8, 2)
    assert found["sharding_hook_idle_ms"].value == pytest.approx(48, abs=0.01)
    # 8 gathers of 0.2 ms, of which half of 2 MiB takes 2.9 us at 360 GB/s; 6 of 8 calls and hooks go.
    merged = 0.75 * 8 * (0.2 - MIB / 360e6)
    assert found["mergeable_exposed_ms"].value == pytest.approx(merged)
    assert found["fine_wrapping_cost_ms"].value == pytest.approx(merged + 36, abs=0.01)


@pytest.mark.parametrize(
    ("calls", "exposed_ms", "share"),
    [
        # On this link 2 ranks reach half of 360 GB/s at 9.5 MiB: a quarter of that takes 35 us.
        ("x1600", 40, 1.0),
        ("x4", Unknown("most of the exposed communication is in collectives that carry no size"), None),
    ],
)
def test_collectives_without_a_size_are_small_where_they_are_short(
    tmp_path: Path, calls: str, exposed_ms: float | Unknown, share: float | None
) -> None:
    for builder in parse_lanes(f"step: 100\ncompute 0-60\nallreduce 60-100 {calls}", ranks=2):
        (tmp_path / f"rank-{builder.rank}.json").write_text(without_size(builder, 16 * MIB))
    facts = tracedoc.measure([tmp_path], tracedoc.Options(jobs=1)).measurements.facts
    assert facts["comm_bytes_per_step"].value == Unknown(
        f"{calls[1:]} of {calls[1:]} collectives carry no size"
    )
    found = facts["latency_bound_exposed_ms"].value
    assert found == (pytest.approx(exposed_ms, abs=0.1) if isinstance(exposed_ms, int) else exposed_ms)
    if share is not None:
        assert facts["latency_bound_frac"].value == share
