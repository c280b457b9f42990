"""MFU, samples and tokens of small traces, against the peaks of data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracedoc
from tests.topics.small_runs import (
    facts_of_rank,
    two_steps,
)
from tracedoc.testing import TraceBuilder
from tracedoc.values import Unknown


def test_mfu_counts_two_m_n_k_against_the_dense_peak(tmp_path: Path) -> None:
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
    facts = facts_of_rank(tmp_path, builder)
    flops = 2 * 8192**3  # 1.0995e12 in 100 ms
    assert facts["model_tflops"] == pytest.approx(flops / 0.1 / 1e12)
    assert facts["mfu_frac"] == pytest.approx(flops / 0.1 / 989e12)


def test_mfu_is_unknown_where_matrix_kernels_come_from_elsewhere(tmp_path: Path) -> None:
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
    mfu = facts_of_rank(tmp_path, builder)["mfu_frac"]
    assert isinstance(mfu, Unknown)
    assert "12 % of the matrix kernels' time" in mfu.reason


def test_samples_and_tokens_come_from_the_first_embedding(tmp_path: Path) -> None:
    builder = two_steps(TraceBuilder())
    for start in (100, 200, 300):
        builder.host("DistributedDataParallel.forward", start + 1, start + 40, category="user_annotation")
        builder.kernel(
            "indexSelectLargeIndex", start + 21, start + 22, launch_ms=start + 3, op="aten::embedding",
            dims=[[50257, 768], [8, 1024], [], [], []], types=["float", "long int", "Scalar", "", ""],
        )  # fmt: skip
    facts = facts_of_rank(tmp_path, builder)
    assert facts["micro_batch_samples"] == 8
    assert facts["samples_per_s"] == pytest.approx(80)
    assert facts["tokens_per_s"] == pytest.approx(81920)


def test_what_is_recomputed_is_no_work_of_the_model(shared_traces: Path) -> None:
    """Of a checkpointed ResNet four parts run: forward, again, and two of backward; its stem is not."""
    facts = tracedoc.measure([shared_traces / "ddp_resnet_mi300_8rank_r0"]).measurements.facts
    mfu, hfu = (facts[name].value for name in ("mfu_frac", "hfu_frac"))
    assert isinstance(mfu, float)
    assert isinstance(hfu, float)
    assert mfu / hfu == pytest.approx(0.75, abs=0.02)
