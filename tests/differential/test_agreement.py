"""Compare capture budgets with HolisticTraceAnalysis where the two define the same thing.

Both split the time from the first to the last GPU event: its ``compute`` is ours, its ``non_compute`` our
exposed communication plus exposed copies, its overlap ratio our ``overlap_frac``. Three definitions differ,
and each comparison takes its cause out of the file for both tools: memset is compute for us and memory for
HTA; HTA drops GPU events without a launch in the captured steps, unless the file names no step; and it
takes a file without an outer object for damaged.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[[str, Path], dict[str, Any]]
REAL = [
    "ddp_resnet_a100_2rank_r0/nccl_data.json.gz",
    "dlrm_8rank_v100/worker0_step_12.1694128201545.pt.trace.json.gz",
    *(
        pytest.param(path, marks=pytest.mark.soak)
        for path in (
            "ddp_resnet_v100_ws1_healthy/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
            "ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz",
            "dlrm_v100_2rank_r1/test.json.gz",
            "resnet50_v100_dataloader_bound_2021/worker0.1623143089861.pt.trace.json.gz",
            "resnet50_2020_array_toplevel/worker0.pt.trace.json.gz",
        )
    ),
]
TOLERANCE_MS = 0.002  # HTA keeps time as float64 microseconds since 1970 in some files: 0.25 us a timestamp


def read_document(path: Path) -> Any:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)


def write_comparable(source: Path, target: Path) -> Path:
    """Write a copy without what the two tools define differently."""
    document = read_document(source)
    if isinstance(document, list):
        document = {"traceEvents": document}
    document["traceEvents"] = [
        event
        for event in document["traceEvents"]
        if event.get("cat") not in ("gpu_memset", "Memset")
        and not str(event.get("name", "")).startswith("ProfilerStep")
    ]
    target.write_text(json.dumps(document))
    return target


@pytest.mark.parametrize("trace", REAL, ids=lambda path: path.split("/")[0])
def test_capture_budget_is_that_of_hta(
    trace: str,
    shared_traces: Path,
    tmp_path: Path,
    hta: Ask,
    diagnosis_of: Callable[[Path], dict[str, Any]],
) -> None:
    path = write_comparable(shared_traces / trace, tmp_path / "trace.json")
    theirs = hta("breakdown", path)
    ours = diagnosis_of(path)["ranks"][0]["capture"]

    def close(microseconds: float) -> Any:
        return pytest.approx(microseconds / 1000, abs=TOLERANCE_MS, rel=1e-5)

    assert ours["span_ms"] == close(theirs["kernel_time(us)"])
    assert ours["compute_ms"] == close(theirs["compute_time(us)"])
    assert ours["idle_ms"] == close(theirs["idle_time(us)"])
    assert ours["exposed_comm_ms"] + ours["exposed_copy_ms"] == close(theirs["non_compute_time(us)"])
    if ours["overlap_frac"] is None:
        assert theirs["overlap_pctg"] != theirs["overlap_pctg"]  # NaN: no communication
    else:
        assert 100 * ours["overlap_frac"] == pytest.approx(theirs["overlap_pctg"], abs=0.006)


@pytest.mark.soak
def test_hta_leaves_out_kernels_that_were_launched_before_the_capture(
    shared_traces: Path, hta: Ask, diagnosis_of: Callable[[Path], dict[str, Any]]
) -> None:
    """968 of the 3,653 GPU events of this file have no launch in it; they took time all the same."""
    path = shared_traces / "ddp_resnet_mi300_8rank_r0" / "resnet_act_checkpoint.json.gz"
    assert hta("breakdown", path)["kernel_time(us)"] == pytest.approx(56_517.6, abs=1)
    assert diagnosis_of(path)["ranks"][0]["capture"]["span_ms"] == pytest.approx(86.5677, abs=0.001)
