"""Kernels of a step against what the device reaches, worked out by hand."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from click.testing import CliRunner

import tracedoc
from tracedoc.cli import main
from tracedoc.step.kernel_times import OUTSIDE, find_layers, kernel_groups, repeated
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline

BF16 = "c10::BFloat16"
ADD = "void at::native::vectorized_elementwise_kernel<4, add>"


@pytest.fixture
def run_of_three_steps(tmp_path: Path) -> Path:
    """Steps of 100 ms on an H100: a product, an addition, and a kernel of which no shapes are known."""
    builder = TraceBuilder(device="NVIDIA H100 80GB HBM3")
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 2, start + 97).backward(start + 50, start + 60)
        # 2 x 4096 x 4096 x 65536 operations at 801 of 989 TFLOPS: 2.776 ms of the 10.
        builder.kernel(
            "nvjet_tst_128x128_gemm", start, start + 10, launch_ms=start - 1, op="aten::mm",
            dims=[[4096, 4096], [4096, 65536]], types=[BF16, BF16],
        )  # fmt: skip
        # 3 tensors of 512 MiB at 90 % of 3350 GB/s: 0.534 ms of the 2.
        builder.kernel(
            ADD, start + 10, start + 12, launch_ms=start - 0.9, op="aten::add",
            dims=[[4096, 65536], [4096, 65536], []], types=[BF16, BF16, "Scalar"],
        )  # fmt: skip
        builder.kernel(ADD, start + 12, start + 15, launch_ms=start - 0.8, op="my::op")
    builder.write(tmp_path / "rank-0.json")
    return tmp_path


def timeline_of(run: Path) -> RankTimeline:
    return tracedoc.build_timeline(tracedoc.load(run / "rank-0.json"))


def test_operators_lose_what_they_take_beyond_what_the_device_reaches(run_of_three_steps: Path) -> None:
    product, addition, unknown = kernel_groups(timeline_of(run_of_three_steps), "operator")
    assert product.name == "aten::mm [4096,4096] [4096,65536]"
    assert product.tflops == pytest.approx(2 * 4096 * 4096 * 65536 / 0.01 / 1e12)
    assert product.lost_least_ms == product.lost_most_ms == pytest.approx(10 - 2.776, abs=0.001)
    assert product.reached_least_frac == product.reached_most_frac == pytest.approx(0.2776, abs=0.0001)
    assert addition.gbps == pytest.approx(3 * 2 * 4096 * 65536 / 0.002 / 1e9)
    assert addition.lost_most_ms == pytest.approx(2 - 0.534, abs=0.001)
    assert (unknown.name, unknown.time_ms, unknown.known_ms) == ("(elementwise, no shapes)", 3.0, 0.0)
    assert (unknown.tflops, unknown.gbps, unknown.reached_most_frac, unknown.lost_most_ms) == (None,) * 4


def test_what_an_unlisted_gpu_reaches_is_a_range(tmp_path: Path) -> None:
    """RTX 3060: 28 multiprocessors, 512 operations a clock, 1.2 to 1.86 GHz; 60.1 to 85.9 % are reached.

    2 x 4096^3 operations take 6.00 to 13.29 ms.
    """
    builder = TraceBuilder(device="NVIDIA GeForce RTX 3060")
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 2, start + 97)
        builder.kernel(
            "ampere_bf16_s16816gemm_bf16_128x128", start, start + 20, launch_ms=start - 1, op="aten::mm",
            dims=[[4096, 4096], [4096, 4096]], types=[BF16, BF16],
        )  # fmt: skip
    builder.write(tmp_path / "rank-0.json")
    (product,) = kernel_groups(timeline_of(tmp_path), "operator")
    assert product.lost_least_ms == pytest.approx(20 - 13.29, abs=0.01)
    assert product.lost_most_ms == pytest.approx(20 - 6.00, abs=0.01)
    assert product.reached_least_frac == pytest.approx(0.300, abs=0.001)
    assert product.reached_most_frac == pytest.approx(0.664, abs=0.001)
    shown = CliRunner().invoke(main, ["kernels", str(tmp_path)]).stdout
    assert "30 to 66 %  6.71 to 14 ms" in shown
    facts = tracedoc.measure([tmp_path]).measurements.facts
    assert facts["reached_frac"].value == pytest.approx(0.300, abs=0.001)
    assert facts["reached_most_frac"].value == pytest.approx(0.664, abs=0.001)


def test_kernels_of_one_name_are_known_in_part(run_of_three_steps: Path) -> None:
    product, addition = kernel_groups(timeline_of(run_of_three_steps), "kernel")
    assert (product.calls, product.time_ms) == (1, 10.0)
    assert (addition.calls, addition.time_ms, addition.known_ms) == (2, 5.0, 2.0)


@pytest.mark.parametrize("by", ["operator", "module", "kernel", "phase"])
def test_lines_add_up_to_the_kernels_of_the_step(by: str, run_of_three_steps: Path) -> None:
    rows = kernel_groups(timeline_of(run_of_three_steps), by)
    assert sum(row.calls for row in rows) == 3
    assert sum(row.time_ms for row in rows) == pytest.approx(15.0)


GPU_TRACES = (
    "ddp_resnet_a100_2rank_r0 ddp_resnet_mi300_8rank_r0 ddp_resnet_v100_ws1_healthy dlrm_8rank_v100 "
    "dlrm_v100_2rank_r1 fsdp2_h100_4rank published_pipeline_8rank resnet50_2020_array_toplevel "
    "resnet50_v100_dataloader_bound_2021 resnet50_v100_workers4_2021 "
    "format_variants/event_sync_trace.json.gz format_variants/gpu_only_trace.json.gz "
    "format_variants/h100_bert-small.json.gz format_variants/sglang_Qwen3-8B_decode.json.gz "
    "format_variants/mi250_minitoy_train_ROCm6_2_kineto.json.gz "
    "format_variants/step_based_trace_2543932.json.gz format_variants/torch_compile_triton.json.gz"
)


@pytest.mark.parametrize("of", GPU_TRACES.split())
def test_lines_of_real_traces_add_up_to_the_compute_of_the_budget(of: str, shared_traces: Path) -> None:
    """Memsets among them, kernels beside each other, and those that reach over the end of the step."""
    file = shared_traces / of
    timeline = tracedoc.build_timeline(tracedoc.load(min(file.glob("*.json.gz")) if file.is_dir() else file))
    assert timeline.judged_budget is not None
    rows = kernel_groups(timeline, "operator")
    compute_ms = timeline.judged_budget.compute_ns / 1e6
    assert sum(row.time_ms for row in rows) == pytest.approx(compute_ms, abs=1e-6)


def test_time_of_two_kernels_is_that_of_the_first(tmp_path: Path) -> None:
    """Two kernels of 10 ms of which 4 are common: 16 ms of compute, of which the second has 6."""
    builder = TraceBuilder(device="NVIDIA H100 80GB HBM3")
    for index in (1, 2, 3):
        start = 100 * index
        builder.step(index, start - 2, start + 97)
        builder.kernel("first_kernel", start, start + 10, launch_ms=start - 1)
        builder.kernel("second_kernel", start + 6, start + 16, launch_ms=start - 0.9, stream=9)
    builder.write(tmp_path / "rank-0.json")
    rows = kernel_groups(timeline_of(tmp_path), "kernel")
    assert {row.name: row.time_ms for row in rows} == {"first_kernel": 10.0, "second_kernel": 6.0}


@pytest.mark.parametrize(
    ("what", "numbers"),
    [
        ("a bc bc bc d", "-001122-"),
        ("bc bc bc a bc bc bc", "001122-001122"),
        ("bbbb bbbb", "00112233"),
        ("bc bc a bc bc", "---------"),
    ],
)
def test_layers_are_what_repeats(what: str, numbers: str) -> None:
    """Stretches of two and more, three times and more; they begin anew behind what interrupts them."""
    found = repeated(np.array([ord(one) for one in what.replace(" ", "")]))
    assert "".join("-" if one < 0 else str(one) for one in found.tolist()) == numbers


def test_layers_of_a_real_model(shared_traces: Path) -> None:
    """Six layers, of which every second one is computed again: by its backward pass, the last one first.

    The ranges of FSDP2's units name them.
    """
    file = min((shared_traces / "fsdp2_h100_4rank").glob("*.json.gz"))
    timeline = tracedoc.build_timeline(tracedoc.load(file))
    calls = {row.name: row.calls for row in kernel_groups(timeline, "module")}
    layers = [f"layers.{one}" for one in range(6)]
    assert calls.keys() == {*layers, "tok_embeddings", "norm, output", "(in no module)"}
    assert min(calls[one] for one in layers[1::2]) > max(calls[one] for one in layers[::2])
    assert timeline.judged is not None
    events = timeline.events
    mine = (events.start_ns >= timeline.judged.start_ns) & (events.start_ns < timeline.judged.end_ns)
    places = np.flatnonzero(mine & (events.classes == COMPUTE) & (events.device == timeline.device))
    numbers = find_layers(timeline, places)
    assert set(numbers.tolist()) == {OUTSIDE, 0, 1, 2, 3, 4, 5}


def test_csv_has_all_columns(run_of_three_steps: Path) -> None:
    result = CliRunner().invoke(main, ["kernels", str(run_of_three_steps), "-f", "csv"])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["calls"] for row in rows] == ["1", "1", "1"]
    assert float(rows[0]["lost_most_ms"]) == pytest.approx(7.224, abs=0.001)
    assert rows[2]["lost_most_ms"] == ""


def test_parquet_has_what_csv_has(run_of_three_steps: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    result = CliRunner().invoke(main, ["kernels", str(run_of_three_steps), "-f", "parquet"])
    assert result.exit_code == 0, result.output
    table = pandas.read_parquet(io.BytesIO(result.stdout_bytes))
    assert list(table["calls"]) == [1, 1, 1]
    assert table["lost_most_ms"][0] == pytest.approx(7.224, abs=0.001)


def test_parquet_names_the_package_that_it_needs(
    run_of_three_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = CliRunner().invoke(main, ["kernels", str(run_of_three_steps), "-f", "parquet"])
    assert result.exit_code == 2
    assert 'pip install ".[parquet]"' in result.output


def test_text_says_what_is_lost(run_of_three_steps: Path) -> None:
    result = CliRunner().invoke(main, ["kernels", str(run_of_three_steps)])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["operator", "calls", "time", "share", "TFLOP/s", "GB/s", "reached", "lost"]
    assert lines[1].endswith("28 %  7.22 ms")


def test_a_rank_that_is_not_there_is_an_error(run_of_three_steps: Path) -> None:
    result = CliRunner().invoke(main, ["kernels", str(run_of_three_steps), "--rank", "5"])
    assert result.exit_code == 2
    assert "has no rank 5" in result.output
