"""Hold what goes wrong in other tools, and that tracedoc is right on the same input.

Each input is 4 steps of 100 ms on a GPU: compute from 1 to 60 ms, an all-reduce up to 90 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[[str, Path], dict[str, Any]]
Diagnose = Callable[[Path], dict[str, Any]]
OLD_KERNEL = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
NEW_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def trace(
    rank: int, *, kernel: str = NEW_KERNEL, late_us: int = 0, with_sync: bool = False
) -> dict[str, Any]:
    """Return a trace; with ``with_sync`` the host waits for the stream from 60 to 99 ms of each step."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, tid: int, ts: float, dur: float, **args: object) -> None:
        pid = 0 if category in ("kernel", "cuda_sync") else 4242
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    correlation = 0
    for step in range(4):
        begin = 100_000.0 * step
        add("user_annotation", f"ProfilerStep#{step}", 4242, begin, 99_999.0)
        add("cpu_op", "aten::mm", 4242, begin + 10, 100.0)
        add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 4242, begin + 120, 100.0)
        for name, stream, start, end in (
            ("sgemm_128x64", 7, 1_000, 60_000),
            (kernel, 20, 60_000 + late_us, 90_000),
        ):
            correlation += 1
            add("cuda_runtime", "cudaLaunchKernel", 4242, begin + 20, 5.0, correlation=correlation)
            add("kernel", name, stream, begin + start, float(end - start))
            events[-1]["args"] = {"device": 0, "stream": stream, "correlation": correlation}
        if with_sync:
            correlation += 1
            add(
                "cuda_runtime",
                "cudaStreamSynchronize",
                4242,
                begin + 60_000,
                39_000.0,
                correlation=correlation,
            )
            add("cuda_sync", "Stream Sync", 7, begin + 60_000, 39_000.0)
            events[-1]["args"] = {"device": 0, "stream": 7, "correlation": correlation}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }


def write_run(folder: Path, **options: Any) -> Path:
    """Write two ranks, the second of which reaches every all-reduce 10 ms late."""
    for rank in (0, 1):
        text = json.dumps(trace(rank, late_us=10_000 * rank, **options))
        (folder / f"rank{rank}.json").write_text(text)
    return folder


@pytest.mark.soak
def test_waiting_for_a_stream_is_not_work(tmp_path: Path, either_peer: Ask, diagnosis_of: Diagnose) -> None:
    plain, with_sync = tmp_path / "plain.json", tmp_path / "with_sync.json"
    plain.write_text(json.dumps(trace(0)))
    with_sync.write_text(json.dumps(trace(0, with_sync=True)))

    # 33 ms of 389 ms are idle; the peers call all but 3 ms of the between-step time busy once told of syncs.
    assert either_peer("breakdown", plain)["idle_time(us)"] == 33_000
    assert either_peer("breakdown", with_sync)["idle_time(us)"] == 6_000
    for path in (plain, with_sync):
        capture = diagnosis_of(path)["ranks"][0]["capture"]
        assert capture["span_ms"] == 389
        assert capture["idle_ms"] == 33


@pytest.mark.soak
def test_straggler_search_survives_todays_kernel_names(
    tmp_path: Path, either_peer: Ask, diagnosis_of: Diagnose
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, kernel in ((old, OLD_KERNEL), (new, NEW_KERNEL)):
        folder.mkdir()
        write_run(folder, kernel=kernel)

    assert either_peer("stragglers", old)["stragglers"]
    assert either_peer("stragglers", new)["error"].startswith("ValueError: attempt to get argmax")
    for folder in (old, new):
        ranks = diagnosis_of(folder)["ranks"]
        assert [rank["capture"]["comm_ms"] for rank in ranks] == [120, 80]


@pytest.mark.soak
def test_compact_json_loses_no_rank(tmp_path: Path, either_peer: Ask, diagnosis_of: Diagnose) -> None:
    for path in write_run(tmp_path).iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")))

    assert either_peer("ranks", tmp_path)["ranks"] == [0]
    assert diagnosis_of(tmp_path)["run"]["ranks_seen"] == [0, 1]


@pytest.mark.soak
def test_one_truncated_file_stops_no_other_rank(
    tmp_path: Path, either_peer: Ask, diagnosis_of: Diagnose
) -> None:
    write_run(tmp_path)
    cut = tmp_path / "rank1.json"
    cut.write_text(cut.read_text()[:-700])

    assert either_peer("ranks", tmp_path)["error"].startswith("JSONDecodeError")
    diagnosis = diagnosis_of(tmp_path)
    assert diagnosis["run"]["ranks_seen"] == [0, 1]
    assert diagnosis["ranks"][0]["capture"]["span_ms"] == 389
    assert "truncated" in " ".join(limit["code"] for limit in diagnosis["limits"])


@pytest.mark.parametrize("kernel", [OLD_KERNEL, NEW_KERNEL], ids=["old name", "new name"])
def test_both_kernel_names_are_communication(kernel: str, tmp_path: Path, diagnosis_of: Diagnose) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(0, kernel=kernel)))
    assert diagnosis_of(path)["ranks"][0]["capture"]["comm_ms"] == 120
