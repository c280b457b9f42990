"""A launch call that lasts long beside an idle GPU: a kernel is loaded, or the host is held up."""

from __future__ import annotations

import json
from pathlib import Path

import tracedoc
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import RankTimeline

KERNELS = ((110, "a"), (130, "b"), (210, "a"), (230, "b"), (310, "a"))


def timeline_with(tmp_path: Path, *, launched_ms: float, first_ms: float) -> RankTimeline:
    """Return three steps of 100 ms with two kernels of 10 ms; the launch at ``launched_ms`` lasts 12 ms.

    ``first_ms`` is when kernel "c" runs, which the long launch brings; it ends 13 ms after the launch.
    """
    builder = TraceBuilder()
    for index in range(1, 4):
        builder.step(index, 100 * index, 100 * index + 99).backward(100 * index + 50, 100 * index + 60)
    for start_ms, name in KERNELS:
        builder.kernel(name, start_ms, start_ms + 10)
    builder.kernel(
        "c" if first_ms == launched_ms else "b", launched_ms + 12.01, launched_ms + 20, launch_ms=launched_ms
    )
    trace = json.loads(builder.to_json())
    base = min(event["ts"] for event in trace["traceEvents"] if event.get("name") == "ProfilerStep#1")
    for event in trace["traceEvents"]:
        if (
            event.get("name") == "cudaLaunchKernel"
            and abs(event["ts"] - base - (launched_ms - 100) * 1e3) < 1
        ):
            event["dur"] = 12_000
    file = tmp_path / "rank-0.json"
    file.write_text(json.dumps(trace))
    return tracedoc.build_timeline(tracedoc.load(file))


def idle_ms(timeline: RankTimeline, cause: str) -> float:
    assert timeline.idle is not None
    return timeline.idle.spans[cause].total_ns / 1e6


def test_loading_a_kernel_that_runs_for_the_first_time_is_a_cold_start(tmp_path: Path) -> None:
    timeline = timeline_with(tmp_path, launched_ms=250, first_ms=250)
    assert round(idle_ms(timeline, "loading"), 2) == 12.0
    assert idle_ms(timeline, "dependency") < 0.1


def test_a_long_launch_of_a_known_kernel_is_a_late_launch(tmp_path: Path) -> None:
    timeline = timeline_with(tmp_path, launched_ms=250, first_ms=0)
    assert idle_ms(timeline, "loading") == 0
    assert idle_ms(timeline, "dependency") < 0.1


def test_what_an_operator_does_before_it_launches_a_new_kernel_is_loading(tmp_path: Path) -> None:
    timeline = launched_after(tmp_path, "aten::cudnn_convolution", "xmma_fprop", known=False)
    assert idle_ms(timeline, "loading") == 30
    assert idle_ms(timeline, "operator") == 0


def test_what_an_operator_does_before_it_launches_a_known_kernel_is_its_own(tmp_path: Path) -> None:
    timeline = launched_after(tmp_path, "aten::cudnn_convolution", "xmma_fprop", known=True)
    assert idle_ms(timeline, "loading") == 0
    assert idle_ms(timeline, "operator") == 30


def test_what_precedes_the_first_launch_of_a_generated_kernel_is_compiling(tmp_path: Path) -> None:
    timeline = launched_after(tmp_path, "scripted", "fused_mul_add_123", known=False)
    assert idle_ms(timeline, "compile") == 30
    assert idle_ms(timeline, "loading") == 0


def test_a_range_of_a_script_that_launches_nothing_is_no_operator(tmp_path: Path) -> None:
    timeline = launched_after(tmp_path, "scripted", "xmma_fprop", known=False)
    assert idle_ms(timeline, "loading") == idle_ms(timeline, "operator") == 0


def launched_after(tmp_path: Path, operator: str, kernel: str, *, known: bool) -> RankTimeline:
    """A rank that launches a kernel 30 ms after an operator began, of which the GPU has no work."""
    builder = TraceBuilder()
    builder.kernel(kernel if known else "other", 1, 2, launch_ms=0.5)
    builder.kernel("plain", 9, 10, launch_ms=8.5)
    builder.host(operator, 20, 51)
    builder.kernel(kernel, 50.02, 52, launch_ms=50)
    return tracedoc.build_timeline(tracedoc.load(builder.write(tmp_path / "rank-0.json")))
