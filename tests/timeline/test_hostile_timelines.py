"""Traces that contradict themselves are measured as far as they go, in time that grows with their size."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracedoc
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options
from tracedoc.spans import Spans
from tracedoc.testing import TraceBuilder
from tracedoc.trace.vocabulary import step_number


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}


def diagnose(folder: Path, events: list[dict[str, Any]], **header: object) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    path = folder / "rank-0.json"
    path.write_text(json.dumps({"schemaVersion": 1, **header, "traceEvents": events}))
    return tracedoc.diagnose([path], Options(jobs=1))


def test_transfers_of_a_gpu_job_without_gpu_events_are_not_taken_for_collectives(tmp_path: Path) -> None:
    """The job has a GPU, gloo beside it, and no GPU event was recorded."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 10, 20, tid=2),
        event("user_annotation", "gloo:all_reduce", 40, 20, tid=3),
        event("user_annotation", "ProfilerStep#2", 100, 100),
    ]
    diagnosis = diagnose(tmp_path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    assert [limit.code for limit in diagnosis.limits] == ["no-gpu-activity"]
    assert "neither kernels nor launches" in diagnosis.limits[0].message
    assert diagnosis.budget is None


def test_launches_without_kernels_are_told_from_a_gpu_that_was_not_recorded(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 10, 20), event("cuda_runtime", "cudaLaunchKernel", 15, 5)]
    diagnosis = diagnose(tmp_path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    assert [limit.code for limit in diagnosis.limits] == ["no-gpu-activity"]
    assert "kernels were launched" in diagnosis.limits[0].message


RESOLVES = event("cpu_op", "aten::resolve_conj", 11, 1)
WAITS = event("cuda_runtime", "cudaDeviceSynchronize", 31, 2)
PRODUCT = event("cpu_op", "aten::addmm", 10, 20)


@pytest.mark.parametrize(
    ("events", "device"),
    [
        ([PRODUCT, RESOLVES], "CPU"),
        ([PRODUCT, WAITS], "CPU"),  # calls of the runtime are recorded: no launch is missing
        ([PRODUCT], None),
        ([PRODUCT, event("cpu_op", "aten::mm", 40, 20), RESOLVES], None),  # a factor on a GPU was a conjugate
        ([event("cpu_op", "aten::empty", 10, 20), WAITS], None),
    ],
)
def test_linear_layers_show_that_they_run_on_the_cpu(
    tmp_path: Path, events: list[dict[str, Any]], device: str | None
) -> None:
    diagnosis = diagnose(tmp_path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    if device is None:
        assert [limit.code for limit in diagnosis.limits] == ["no-gpu-activity"]
        assert "pass ProfilerActivity.CUDA" in diagnosis.summary
        assert "model.to('cuda')" in diagnosis.summary
    else:
        assert diagnosis.run.device == device
        assert diagnosis.findings[0].rule_id == "model-on-cpu"


def test_in_a_file_that_is_cut_off_launches_may_be_missing(tmp_path: Path) -> None:
    header = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    later = event("cuda_runtime", "cudaLaunchKernel", 15, 5)
    text = json.dumps({**header, "traceEvents": [PRODUCT, WAITS, later]})
    path = tmp_path / "rank-0.json"
    path.write_text(text[: text.index("cudaLaunchKernel")])
    diagnosis = tracedoc.diagnose([path], Options(jobs=1))
    assert diagnosis.run.device != "CPU"
    assert "no-gpu-activity" in {limit.code for limit in diagnosis.limits}


def test_a_process_that_computes_on_several_gpus_is_said_to_be_seen_in_part(tmp_path: Path) -> None:
    """GPU 0 computes for 60 of 80 us, GPU 1 for 20; a third one that is listed does nothing."""
    events = [event("cpu_op", "aten::mm", 0, 10)]
    for at, device, dur in ((20, 0, 60), (100, 1, 20)):
        events.append(event("kernel", "sgemm", at, dur, tid=7, device=device, stream=7))
    listed = [{"id": number, "name": "NVIDIA H100 80GB HBM3"} for number in range(3)]
    limits = diagnose(tmp_path, events, deviceProperties=listed).limits
    (limit,) = (one for one in limits if one.code == "other-gpus")
    assert "computes on 2 GPUs; GPU 0 is analysed, 25 % of compute is elsewhere" in limit.message


def test_a_step_that_takes_no_time_has_no_shares(tmp_path: Path) -> None:
    events = [event("cpu_op", name, 10, 0, tid=n) for n, name in enumerate(("aten::mm", "c10d::allreduce_"))]
    events.append(event("user_annotation", "gloo:all_reduce", 10, 0, tid=3))
    facts = diagnose(tmp_path, events).facts
    failed = [name for name, fact in facts.items() if str(fact.unknown).startswith("error")]
    assert failed == []
    assert facts["exposed_comm_frac"].unknown == "the step takes no time"


@pytest.mark.parametrize("stretch", [0, 1])
def test_a_job_whose_steps_take_no_time_is_diagnosed(
    tmp_path: Path, sample_traces: Path, stretch: int
) -> None:
    """Each event of a DDP job lasts nothing; all begin at once, or when they began."""
    ranks = []
    for file in sorted((sample_traces / "synthetic_ddp_tiny_batch").glob("rank-*.json.gz")):
        document = json.loads(gzip.decompress(file.read_bytes()))
        for one in document["traceEvents"]:
            one |= {"ts": stretch * one.get("ts", 0), "dur": 0}
        ranks.append(tmp_path / file.stem)
        ranks[-1].write_text(json.dumps(document))
    diagnosis = tracedoc.diagnose(ranks, Options(jobs=1))
    failed = [name for name, fact in diagnosis.facts.items() if str(fact.unknown).startswith("error")]
    assert (failed, [limit for limit in diagnosis.limits if limit.code == "internal-error"]) == ([], [])


def test_a_gap_of_a_host_that_launches_copies_alone_loads_no_kernel(tmp_path: Path) -> None:
    """The kernels have no launch in the file; the host does nothing from 10 to 60 ms."""
    builder = TraceBuilder().copy("HtoD", 1, 2, 4, launch_ms=0.5)
    builder.kernel("early", 2, 4, linked=False).runtime("cudaDeviceSynchronize", 9, 10)
    builder.runtime("cudaDeviceSynchronize", 60, 61)
    timeline = tracedoc.build_timeline(tracedoc.load(builder.write(tmp_path / "rank-0.json")))
    assert timeline.idle is None or timeline.idle.spans["loading"].total_ns == 0


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ProfilerStep#999999999", 999_999_999),
        ("ProfilerStep#1000000000", None),
        ("ProfilerStep#" + "9" * 30, None),
    ],
)
def test_a_step_of_an_absurd_number_is_none(name: str, number: int | None) -> None:
    assert step_number(name) == number


def test_an_absurd_step_costs_itself(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 10 + 100 * n, 50) for n in range(4)]
    events += [event("user_annotation", f"ProfilerStep#{n}", 100 * n, 100) for n in range(4)]
    events += [event("user_annotation", f"gloo:all_reduce {10**18}", 70, 10, tid=3)]
    events += [event("user_annotation", f"ProfilerStep#{10**18}", 400, 100)]
    diagnosis = diagnose(tmp_path, events)
    assert diagnosis.budget is not None
    assert diagnosis.budget.step_ms == 0.1


def test_an_event_without_a_time_among_those_read_exactly_is_left_out(tmp_path: Path) -> None:
    """Times of more digits than a float has are read as text; one event has none."""
    begin = 1_700_000_000_000_000
    text = json.dumps([event("cpu_op", "aten::mm", 0, 50) for _ in range(3)])
    for number in range(3):
        text = text.replace('"ts": 0,', f'"ts": {begin + 100 * number}.125,', 1)
    timeless = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 9, "tid": 1, "dur": 3})
    path = tmp_path / "rank-0.json"
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": {text[:-1]}, {timeless}]}}')
    trace = tracedoc.load(path)
    assert [trace.row_name(row) for row in range(len(trace))] == ["aten::mm"] * 3
    assert (trace.ts_ns - trace.ts_ns[0]).tolist() == [0, 100_000, 200_000]


def test_many_windows_over_one_set_are_measured_alike_one_by_one_and_together() -> None:
    spans = Spans.of(np.arange(0, 1000, 10), np.arange(4, 1004, 10))
    starts, ends = np.arange(-20, 900, 7), np.arange(30, 950, 7)
    together = spans.covered_ns(starts, ends).tolist()
    assert [int(spans.covered_ns(a, b)) for a, b in zip(starts, ends, strict=True)] == together
    assert together[0] == 12  # 0-4, 10-14, 20-24


def test_a_table_of_very_many_kinds_keeps_those_with_most_time(tmp_path: Path) -> None:
    from tracedoc.detail.tables import MAX_ROWS

    events = [event("user_annotation", f"ProfilerStep#{n}", 10_000 * n, 10_000) for n in range(2)]
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    for number in range(MAX_ROWS + 50):
        about = {"Collective name": "allreduce", "Process Group Name": str(number), "Group size": 2}
        place = {"device": 0, "stream": 7, "correlation": number}
        events.append(event("cuda_runtime", "cudaLaunchKernel", 20 * number + 1, 1, correlation=number))
        events.append(event("kernel", kernel, 20 * number + 5, 1 + number / 100, tid=7, **place, **about))
    rows = diagnose(tmp_path, events, distributedInfo={"rank": 0, "world_size": 2}).detail.collectives
    assert len(rows) == MAX_ROWS
    assert [row.group for row in rows[:2]] == [str(MAX_ROWS + 49), str(MAX_ROWS + 48)]
