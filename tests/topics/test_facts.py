"""Facts of small traces, worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tracedoc.facts.catalog import CATALOG, computed
from tracedoc.pipeline import Options, measure
from tracedoc.testing import TraceBuilder
from tracedoc.testing.lanes import parse_lanes
from tracedoc.timeline import stalls
from tracedoc.values import Failed, Unknown, Value
from tracedoc.worker import measure_rank

Measure = Callable[[TraceBuilder], dict[str, Value]]


@pytest.fixture
def facts_of(tmp_path: Path) -> Measure:
    def measured(builder: TraceBuilder) -> dict[str, Value]:
        trace = tracedoc.load(builder.write(tmp_path / "rank-0.json"))
        return dict(measure_rank(tracedoc.build_timeline(trace), rank=0).facts)

    return measured


def two_steps(builder: TraceBuilder) -> TraceBuilder:
    """Add host steps 1, 2 and 3 of 100 ms; the third one only closes the second."""
    for index in (1, 2, 3):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel("first", 100 * index + 10, 100 * index + 20, launch_ms=100 * index + 9)
    return builder


def test_the_step_runs_from_first_kernel_to_first_kernel(facts_of: Measure) -> None:
    facts = facts_of(two_steps(TraceBuilder()))
    assert facts["step_ms"] == 100
    assert facts["compute_ms"] == 10
    assert facts["idle_ms"] == 90
    assert facts["complete_steps"] == 2
    assert facts["kernels_per_step"] == 1
    assert facts["step_jitter_frac"] == Unknown("2 complete steps; three are needed")


def test_a_prefetched_copy_on_a_side_stream_begins_no_step(facts_of: Measure) -> None:
    builder = two_steps(TraceBuilder())
    # Step 2 launches it at 201, and it runs before that step's first kernel at 210.
    builder.copy("HtoD", 202, 206, nbytes=1 << 20, stream=9, launch_ms=201)
    facts = facts_of(builder)
    assert facts["step_ms"] == 100
    assert facts["exposed_copy_ms"] == 4
    assert facts["idle_ms"] == 86


def test_idle_time_has_one_cause_a_nanosecond(facts_of: Measure) -> None:
    builder = two_steps(TraceBuilder())
    # Step 1 is idle from 120 to 210; step 2 from 220 to 310: the next kernel is launched 1 ms before it.
    builder.loader(130, 150).runtime("cudaMalloc", 145, 160).runtime("cudaStreamSynchronize", 155, 170)
    builder.loader(230, 250).runtime("cudaMalloc", 245, 260).runtime("cudaStreamSynchronize", 255, 270)
    facts = facts_of(builder)
    assert facts["input_idle_ms"] == 20
    assert facts["allocator_idle_ms"] == 10
    assert facts["sync_idle_ms"] == 10
    # The rest of 90: from the launch on, at most 50 us are the launch's own latency.
    assert facts["late_launch_idle_ms"] == pytest.approx(50 - 0.95)
    assert facts["unexplained_idle_ms"] == 0
    assert facts["loader_wait_ms"] == 20


def test_the_hosts_floor_leaves_out_what_blocks_it(facts_of: Measure) -> None:
    builder = two_steps(TraceBuilder())
    for start in (100, 200, 300):
        builder.loader(start + 25, start + 35).runtime("cudaStreamSynchronize", start + 30, start + 45)
    # 99 ms of host step, of which 25-45 is blocked once, however often it is covered.
    facts = facts_of(builder)
    assert facts["host_floor_ms"] == 79


def test_allocations_of_the_first_step_are_left_out(facts_of: Measure) -> None:
    builder = two_steps(TraceBuilder())
    for start in range(110, 120):
        builder.runtime("cudaMalloc", start, start + 0.5)
    assert facts_of(builder)["allocator_calls_per_step"] == 0
    builder.runtime("cudaMalloc", 230, 231).runtime("cudaFree", 240, 241)
    assert facts_of(builder)["allocator_calls_per_step"] == 2


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


def test_mfu_counts_two_m_n_k_against_the_dense_peak(facts_of: Measure) -> None:
    builder = TraceBuilder(device="NVIDIA H100 80GB HBM3")
    types = ["c10::BFloat16", "c10::BFloat16"]
    for index in (1, 2, 3):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel(
            "nvjet_tst_128x128_gemm",
            100 * index + 10,
            100 * index + 70,
            launch_ms=100 * index + 9,
            op="aten::mm",
            dims=[[8192, 8192], [8192, 8192]],
            types=types,
        )
    facts = facts_of(builder)
    flops = 2 * 8192**3  # 1.0995e12 in 100 ms
    assert facts["model_tflops"] == pytest.approx(flops / 0.1 / 1e12)
    assert facts["mfu_frac"] == pytest.approx(flops / 0.1 / 989e12)


def test_mfu_is_unknown_where_matrix_kernels_come_from_elsewhere(facts_of: Measure) -> None:
    builder = TraceBuilder()
    for index in (1, 2, 3):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
        builder.kernel(
            "nvjet_gemm", 100 * index + 10, 100 * index + 20, op="aten::mm",
            dims=[[8, 8], [8, 8]], types=["float", "float"],
        )  # fmt: skip
        builder.kernel(
            "cutlass_gemm_of_a_compiled_region", 100 * index + 20, 100 * index + 90, op="CompiledFunction"
        )
    mfu = facts_of(builder)["mfu_frac"]
    assert isinstance(mfu, Unknown)
    assert "12 % of the matrix kernels' time" in mfu.reason


def test_samples_and_tokens_come_from_the_first_embedding(facts_of: Measure) -> None:
    builder = two_steps(TraceBuilder())
    for start in (100, 200, 300):
        builder.host("DistributedDataParallel.forward", start + 1, start + 40, category="user_annotation")
        builder.kernel(
            "indexSelectLargeIndex", start + 21, start + 22, launch_ms=start + 3, op="aten::embedding",
            dims=[[50257, 768], [8, 1024], [], [], []], types=["float", "long int", "Scalar", "", ""],
        )  # fmt: skip
    facts = facts_of(builder)
    assert facts["micro_batch_samples"] == 8
    assert facts["samples_per_s"] == pytest.approx(80)
    assert facts["tokens_per_s"] == pytest.approx(81920)


def test_communication_that_releases_queued_work_is_blocking(facts_of: Measure) -> None:
    lanes = "compute 0-60\nallreduce 60-90 64MiB\ncompute 90-100\nlead: 50\nstep: 100"
    facts = facts_of(parse_lanes(lanes, ranks=2)[0])
    assert facts["exposed_comm_ms"] == 30
    assert facts["blocking_comm_ms"] == 30


def test_communication_beside_a_late_host_blocks_nothing(facts_of: Measure) -> None:
    lanes = "compute 0-60\nallreduce 60-90 64MiB\ncompute 95-100 lead=0.5\nstep: 100"
    facts = facts_of(parse_lanes(lanes, ranks=2)[0])
    assert facts["exposed_comm_ms"] == 30
    assert facts["blocking_comm_ms"] == 0


def test_waiting_is_told_from_transfer_where_all_ranks_are_there(tmp_path: Path) -> None:
    text = "compute 0-80\nallreduce 80-100 64MiB\nrank 1:\n  compute 0-90\n  allreduce 90-100 64MiB"
    for builder in parse_lanes(text, ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = measure([tmp_path])
    measured, limits = found.measurements, found.limits
    assert measured.facts["exposed_wait_ms"].values == {"0": 10, "1": 0}
    assert measured.facts["exposed_transfer_ms"].values == {"0": 10, "1": 10}
    assert measured.facts["exposed_comm_unsplit_ms"].values == {"0": 0, "1": 0}
    assert measured.confidence == "high"
    assert limits == ()


def test_one_rank_alone_leaves_its_communication_unsplit(tmp_path: Path) -> None:
    builder = parse_lanes("compute 0-80\nallreduce 80-100 64MiB", ranks=2)[0]
    builder.write(tmp_path / "rank-0.json")
    found = measure([tmp_path])
    measured, limits = found.measurements, found.limits
    assert measured.facts["exposed_comm_unsplit_ms"].value == 20
    assert measured.facts["comm_split"].value == "one rank"
    assert measured.facts["missing_ranks"].value == 1
    assert measured.confidence == "medium"
    assert [limit.code for limit in limits] == ["missing-ranks"]


@pytest.mark.parametrize(
    ("unsplit_ms", "split"),
    [
        (2, "transfer"),
        (3, "arrivals partly known"),
    ],
)
def test_a_tenth_of_unknown_arrivals_does_not_blur_the_rest(
    unsplit_ms: int, split: str, tmp_path: Path
) -> None:
    # Two of three ranks were captured: only what they do among themselves can be split.
    for rank in range(2):
        builder = TraceBuilder(rank, 3)
        for index in (1, 2, 3, 4):
            start = 100 * index
            builder.step(index, start, start + 99).backward(start + 50, start + 60)
            builder.kernel("k", start + 10, start + 60, launch_ms=start + 9)
            middle = start + 80 - unsplit_ms
            builder.collective("allreduce", start + 60, middle, group="pair", ranks=(0, 1))
            builder.collective("allreduce", middle, start + 80)
        builder.write(tmp_path / f"rank-{rank}.json")
    measured = measure([tmp_path]).measurements
    assert measured.facts["exposed_comm_ms"].value == 20
    assert measured.facts["exposed_comm_unsplit_ms"].value == unsplit_ms
    assert measured.facts["comm_split"].value == split


def test_only_the_chosen_steps_are_judged(tmp_path: Path) -> None:
    text = "compute 0-50\nstep: 100"
    parse_lanes(text, ranks=1, steps=6)[0].write(tmp_path / "rank-0.json")
    measured = measure([tmp_path], Options(steps=(2, 3))).measurements
    assert measured.steps == (2, 3)


def test_every_fact_says_what_it_is() -> None:
    for definition in CATALOG.values():
        assert definition.doc.endswith((".", ")")), definition.name
        assert definition.name == definition.name.lower()
        assert all(f'"{value}"' in definition.doc for value in definition.values), definition.name
        suffixes = {"ms": "_ms", "fraction": "_frac", "bytes": ("_bytes", "_per_step"), "gbps": "_gbps"}
        if definition.unit in suffixes:
            assert definition.name.endswith(suffixes[definition.unit]), definition.name


def test_a_fact_that_fails_costs_only_itself(facts_of: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    from msgspec.structs import replace

    def broken(_: object) -> float:
        raise RuntimeError("boom")

    monkeypatch.setitem(CATALOG, "idle_ms", replace(CATALOG["idle_ms"], compute=broken))
    facts = facts_of(two_steps(TraceBuilder()))
    failed = facts["idle_ms"]
    assert isinstance(failed, Failed)
    assert failed.reason == "error: RuntimeError: boom"
    assert 'raise RuntimeError("boom")' in failed.traceback
    assert facts["step_ms"] == 100


def test_a_shared_function_that_fails_costs_the_facts_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> float:
        raise RuntimeError("boom")

    monkeypatch.setattr(stalls, "launch_interval_ns", broken)
    caplog.set_level("DEBUG", logger="tracedoc")
    diagnosis = tracedoc.diagnose([two_steps(TraceBuilder()).write(tmp_path / "rank-0.json")])
    failed = {name for name, fact in diagnosis.facts.items() if fact.unknown == "error: RuntimeError: boom"}
    # Facts about launches, and the hooks of FSDP, whose idle time is a part of theirs.
    assert {"launch_pace_idle_ms", "host_away_idle_ms", "short_kernel_idle_ms"} <= failed
    assert diagnosis.facts["step_ms"].value == 100
    assert diagnosis.facts["exposed_comm_ms"].value == 0
    verdicts = {one.rule_id: one.outcome for one in diagnosis.verdicts}
    assert (verdicts["host-bound-launches"], verdicts["blocking-syncs"]) == ("error", "pass")
    assert 'raise RuntimeError("boom")' in caplog.text


def test_every_fact_is_held_by_a_test_or_by_the_cases_of_a_rule(repository: Path) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("*.py"))
    rules = "".join(path.read_text(encoding="utf-8") for path in (repository / "rules").rglob("*.yaml"))
    held = set(re.findall(r"[a-z][a-z0-9_]+", tests + rules))
    assert [name for name in CATALOG if name not in held] == []


def test_a_value_that_is_no_number_is_a_fault_of_its_fact() -> None:
    for value in (math.nan, math.inf):
        definition = replace(CATALOG["stage"], compute=lambda run, value=value: {"0": 1.0, "1": value})
        values, _ = computed(definition, None)
        assert values == {"0": 1.0, "1": Failed("error: not a number")}
