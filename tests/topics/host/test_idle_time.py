"""Idle time of small traces by cause, and the host's own work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tracedoc
from tests.topics.small_runs import (
    facts_of_rank,
    idle_causes,
    steps,
    two_steps,
    values,
)
from tracedoc.testing import TraceBuilder


def test_idle_time_has_one_cause_a_nanosecond(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    # Step 1 is idle from 120 to 210; step 2 from 220 to 310: the next kernel is launched 1 ms before it.
    builder.loader(130, 150).runtime("cudaMalloc", 145, 160).runtime("cudaStreamSynchronize", 155, 170)
    builder.loader(230, 250).runtime("cudaMalloc", 245, 260).runtime("cudaStreamSynchronize", 255, 270)
    facts = facts_of_rank(tmp_path, builder)
    assert facts["input_idle_ms"] == 20
    assert facts["allocator_idle_ms"] == 10
    assert facts["sync_idle_ms"] == 10
    # The rest of 90: from the launch on, at most 50 us are the launch's own latency.
    assert facts["late_launch_idle_ms"] == pytest.approx(50 - 0.95)
    assert facts["unexplained_idle_ms"] == 0


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
    work = tracedoc.measure([tmp_path / "rank-0.json"]).measurements.run.digests[0].host_work
    assert work is not None
    assert work.of("operator") / 1e6 == pytest.approx(10, abs=0.06)
    # 90 less 10 + 5 + 10 of the ranges and the millisecond after the launch.
    assert work.of("python") / 1e6 == pytest.approx(64, abs=0.06)


def test_short_pauses_between_operators_on_cpus_are_no_pauses_of_the_script(tmp_path: Path) -> None:
    """Of each step of 100 ms 20 are quiet at once, and 90 us ten times."""
    builder = TraceBuilder(device=None)
    for number in range(3):
        begin = number * 100.0
        builder.step(number, begin, begin + 100)
        for part in range(10):
            builder.host("aten::mm", begin + 8 * part + 0.09, begin + 8 * part + 8)
    facts = facts_of_rank(tmp_path, builder)
    assert facts["script_pause_ms"] == pytest.approx(20)
    assert facts["between_operators_ms"] == pytest.approx(0.9)
    assert facts["operators_per_step"] == 10
    assert facts["unexplained_idle_ms"] == pytest.approx(20.9)


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


def test_the_hosts_floor_leaves_out_what_blocks_it(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    for start in (100, 200, 300):
        builder.loader(start + 25, start + 35).runtime("cudaStreamSynchronize", start + 30, start + 45)
    # 99 ms of host step, of which 25-45 is blocked once, however often it is covered.
    facts = facts_of_rank(tmp_path, builder)
    assert facts["host_floor_ms"] == 79


def test_a_full_launch_queue_is_not_the_host_s_work(tmp_path: Path) -> None:
    builder = steps(TraceBuilder(), 100, 200, 300)
    for start in (100, 200, 300):
        builder.kernel("blocked", start + 96, start + 96.1, launch_ms=start + 70)
        builder.kernel("slow", start + 97, start + 97.1, launch_ms=start + 95)
    document = json.loads(builder.to_json())
    calls = [one for one in document["traceEvents"] if one["name"] == "cudaLaunchKernel"]
    for call in calls:
        call["dur"] = {70: 20_000, 95: 190}.get(round(call["ts"] / 1000) % 100, call["dur"])
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(document))
    # The host's step is 99 ms long.
    (digest,) = tracedoc.measure([path]).measurements.run.digests
    assert digest.facts["host_floor_ms"] == 79
