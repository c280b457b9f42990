"""Compare budgets and steps with a brute-force oracle, to the nanosecond, and hold that they add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle
from tracedoc.testing.lanes import parse_lanes
from tracedoc.timeline.activity import Budget
from tracedoc.timeline.build import RankTimeline, build_timeline
from tracedoc.trace.kineto import read_trace

GPU_TRACES = [
    "ddp_resnet_a100_2rank_r0/nccl_data.json.gz",
    "ddp_resnet_v100_ws1_healthy/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz",
    pytest.param("dlrm_v100_2rank_r1/test.json.gz", marks=pytest.mark.soak),
    pytest.param(
        "resnet50_v100_dataloader_bound_2021/worker0.1623143089861.pt.trace.json.gz", marks=pytest.mark.soak
    ),
    pytest.param(
        "resnet50_v100_workers4_2021/worker0.1623212756351.pt.trace.json.gz", marks=pytest.mark.soak
    ),
    pytest.param("resnet50_2020_array_toplevel/worker0.pt.trace.json.gz", marks=pytest.mark.soak),
    "format_variants/gpu_only_trace.json.gz",
    "format_variants/h100_bert-small.json.gz",
    "format_variants/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "format_variants/event_sync_trace.json.gz",
    "format_variants/step_based_trace_2543932.json.gz",
    "format_variants/torch_compile_triton.json.gz",
    "format_variants/sglang_Qwen3-8B_decode.json.gz",
]
DLRM_RANKS = range(8)
CPU_RUNS = [
    "ddp",
    "fsdp2",
    "fsdp1",
    "hsdp",
    "ds3",
    "tp",
    "pp",
    "comp",
    "gan",
    "patho_straggler",
    "patho_slowloader",
]


def parts(budget: Budget) -> dict[str, int]:
    return {
        "step": budget.window_ns,
        "compute": budget.compute_ns,
        "exposed_comm": budget.exposed_comm_ns,
        "exposed_copy": budget.exposed_copy_ns,
        "idle": budget.idle_ns,
        "comm": budget.comm_ns,
    }


def assert_adds_up(split: dict[str, int]) -> None:
    assert split["compute"] + split["exposed_comm"] + split["exposed_copy"] + split["idle"] == split["step"]
    assert all(part >= 0 for part in split.values())


def assert_same(timeline: RankTimeline, answer: oracle.Answer) -> None:
    """Assert that device, capture budget, complete steps and their budgets are the oracle's."""
    activity = timeline.activity
    assert activity is not None
    if answer.capture is not None:
        capture = parts(activity.budget(activity.start_ns, activity.end_ns))
        assert timeline.device == answer.device
        assert capture == answer.capture
        assert_adds_up(capture)
    if answer.steps is None:
        return
    ours = {window.index: window for window in timeline.complete_windows}
    theirs = {window.index: window for window in answer.steps if window.complete}
    assert sorted(ours) == sorted(theirs)
    for index, window in ours.items():
        assert window.end_ns - window.start_ns == theirs[index].end_ns - theirs[index].start_ns
        split = parts(activity.budget(window.start_ns, window.end_ns))
        assert split == theirs[index].budget
        assert_adds_up(split)


@pytest.mark.parametrize("trace", GPU_TRACES)
def test_real_gpu_traces(trace: str, shared_traces: Path) -> None:
    assert_same(build_timeline(read_trace(shared_traces / trace)), oracle.solve(shared_traces / trace))


@pytest.mark.parametrize("rank", DLRM_RANKS)
def test_every_rank_of_a_run(rank: int, shared_traces: Path) -> None:
    path = next((shared_traces / "dlrm_8rank_v100").glob(f"worker{rank}_*"))
    timeline = build_timeline(read_trace(path))
    activity, answer = timeline.activity, oracle.solve(path)
    assert activity is not None
    assert parts(activity.budget(activity.start_ns, activity.end_ns)) == answer.capture


@pytest.mark.parametrize("run", CPU_RUNS)
def test_real_cpu_traces(run: str, shared_traces: Path) -> None:
    path = shared_traces / "cpu_gloo" / run / "rank0.json.gz"
    assert_same(build_timeline(read_trace(path)), oracle.solve(path))


@pytest.mark.parametrize(
    ("trace", "step_ms"),
    [
        ("ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz", [18.98, 18.98]),
        ("ddp_resnet_a100_2rank_r0/nccl_data.json.gz", [222.05, 219.73]),
        ("dlrm_v100_2rank_r1/test.json.gz", [118.13, 117.13, 116.31, 121.60, 116.69]),
    ],
)
def test_gpu_steps_are_steady_where_the_host_runs_ahead(
    trace: str, step_ms: list[float], shared_traces: Path
) -> None:
    windows = build_timeline(read_trace(shared_traces / trace)).complete_windows
    assert [(w.end_ns - w.start_ns) / 1e6 for w in windows] == pytest.approx(step_ms, abs=0.005)


@st.composite
def lanes(draw: st.DrawFn) -> str:
    """Draw lanes of a step of 60 ms: disjoint intervals on each, in tenths of a millisecond."""
    lines = ["step: 60", "steps: 3"]
    for lane, fewest in (("compute", 1), ("allreduce", 0), ("copy", 0), ("memset", 0)):
        gaps = draw(st.lists(st.integers(1, 120), min_size=2 * fewest, max_size=8))
        now, intervals = 0, []
        for gap, length in zip(gaps[::2], gaps[1::2], strict=False):
            start, end = now + gap, now + gap + length
            if end > 600:
                break
            intervals.append(f"{start / 10}-{end / 10}")
            now = end
        if intervals:
            size = " 1MiB" if lane != "compute" else ""
            lines.append(f"{lane}  " + "  ".join(interval + size for interval in intervals))
    return "\n".join(lines)


@given(drawing=lanes())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_generated_traces(drawing: str, tmp_path: Path) -> None:
    path = parse_lanes(drawing, ranks=2)[0].write(tmp_path / "trace.json")
    assert_same(build_timeline(read_trace(path)), oracle.solve(path))
