"""Every difference from HolisticTraceAnalysis is explained by a definition, and the command says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tracedoc
from tracedoc.cli import main
from tracedoc.crosscheck.agreement import stages
from tracedoc.diagnosis import CaptureBudget

MI300 = "ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz"
DLRM = "dlrm_v100_2rank_r1/test.json.gz"


@pytest.fixture
def with_hta(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (repository / ".venv-hta" / "ready").exists():
        pytest.skip("hta is not installed in .venv-hta (make peers)")
    monkeypatch.setenv("TRACEDOC_HTA_PYTHON", str(repository / ".venv-hta" / "bin" / "python"))


def cross_check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["facts", "--cross-check", *arguments])


def gpu(category: str, name: str, stream: int, start: int, end: int, correlation: int) -> dict[str, Any]:
    """Return an event of GPU 0, from ``start`` to ``end`` in milliseconds."""
    args = {"device": 0, "stream": stream, "correlation": correlation}
    times = {"ts": 1000.0 * start, "dur": 1000.0 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "args": args} | times


def host(category: str, name: str, start: int, end: int, **args: int) -> dict[str, Any]:
    times = {"ts": 1000.0 * start, "dur": 1000.0 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "pid": 42, "tid": 42, "args": args} | times


def capture() -> dict[str, Any]:
    """Return two steps in which each definition that differs concerns a time of its own.

    Compute 10-40 ms, a collective of another library 40-60, a memset 60-65, a stream that waits 70-80, and
    a kernel of 90-100 that nobody launched.
    """
    launches = [host("cuda_runtime", "cudaLaunchKernel", 5 + i, 6 + i, correlation=i) for i in range(1, 5)]
    events = [
        host("user_annotation", "ProfilerStep#1", 0, 50),
        host("user_annotation", "ProfilerStep#2", 50, 110),
        host("cpu_op", "aten::mm", 1, 2),
        *launches,
        gpu("kernel", "sgemm_128x64", 7, 10, 40, 1),
        gpu("kernel", "rcclGenericKernel", 20, 40, 60, 2),
        gpu("gpu_memset", "Memset (Device)", 7, 60, 65, 3),
        gpu("cuda_sync", "Stream Sync", 7, 70, 80, 4),
        gpu("kernel", "elementwise_kernel", 7, 90, 100, 99),
    ]
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}


def test_each_definition_changes_what_it_says(tmp_path: Path):
    file = tmp_path / "rank-0.json"
    file.write_text(json.dumps(capture()))
    found = list(stages(tracedoc.load(str(file))))
    assert [stage.reason.split(":")[0].split(" (")[0] for stage in found] == [
        "",
        "memsets",
        "HTA classes 1 events differently, by names such as rcclGenericKernel",
        "HTA counts 1 records of waiting",
        "HTA leaves out 1 of 5 GPU events",
    ]
    split = [(s.split.span_ms, s.split.compute_ms, s.split.non_compute_ms, s.split.idle_ms) for s in found]
    # From 10 to 100 ms: compute 30 + 5 + 10, the collective 20, idle 25 + 10 - 10.
    assert split[0] == (90, 45, 20, 25)
    assert split[1] == (90, 40, 25, 25)
    assert split[2] == (90, 60, 5, 25)
    assert split[3] == (90, 60, 15, 15)
    assert split[4] == (70, 50, 15, 5)


@pytest.mark.parametrize("run", ["synthetic_fsdp2_healthy", "synthetic_ddp_tiny_batch"])
def test_first_stage_is_the_capture_budget(run: str, sample_traces: Path):
    file = sample_traces / run / "rank-0.json.gz"
    split = next(stages(tracedoc.load(str(file)))).split
    budget = tracedoc.diagnose(file, tracedoc.Options(jobs=1, replay=False)).ranks[0].capture
    assert isinstance(budget, CaptureBudget)
    assert split.span_ms == pytest.approx(budget.span_ms)
    assert split.compute_ms == pytest.approx(budget.compute_ms)
    assert split.non_compute_ms == pytest.approx(budget.exposed_comm_ms + budget.exposed_copy_ms)
    assert split.idle_ms == pytest.approx(budget.idle_ms)
    assert split.overlap_frac == pytest.approx(budget.overlap_frac)


@pytest.mark.usefixtures("with_hta")
def test_all_differences_of_a_drawn_capture_are_explained(tmp_path: Path):
    file = tmp_path / "rank-0.json"
    file.write_text(json.dumps(capture(), indent=1))
    result = cross_check(str(file), "-f", "json")
    assert result.exit_code == 0, result.stderr
    (rank,) = json.loads(result.stdout)["ranks"]
    assert rank["error"] == ""
    assert len(rank["reasons"]) == 4
    assert rank["unexplained"] == {}
    assert rank["hta"]["span_ms"] == pytest.approx(70)


@pytest.mark.usefixtures("with_hta")
@pytest.mark.parametrize(
    "trace",
    [pytest.param(MI300, marks=pytest.mark.soak, id="mi300"), pytest.param(DLRM, id="dlrm")],
)
def test_all_differences_of_a_real_capture_are_explained(trace: str, shared_traces: Path):
    result = cross_check(str(shared_traces / trace), "-f", "json")
    (rank,) = json.loads(result.stdout)["ranks"]
    assert abs(rank["ours"]["compute_ms"] - rank["hta"]["compute_ms"]) > 1
    assert rank["reasons"]
    assert rank["unexplained"] == {}


@pytest.mark.usefixtures("with_hta")
def test_what_hta_cannot_read_is_said(sample_traces: Path, tmp_path: Path):
    (tmp_path / "rank-0.json").write_text(json.dumps(capture()["traceEvents"]))
    assert "HTA does not read this file: " in cross_check(str(tmp_path)).stdout
    assert cross_check(str(sample_traces / "cpu_ddp_straggler")).stdout.count("no GPU activity") == 2


def test_without_hta_it_says_how_to_get_it(
    sample_traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"No module named 'hta'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("TRACEDOC_HTA_PYTHON", str(python))
    result = cross_check(str(sample_traces / "synthetic_fsdp2_healthy" / "rank-0.json.gz"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: HolisticTraceAnalysis is not installed: No module named 'hta'")
    assert "pip install '.[hta]'" in result.stderr
