"""What all ranks do in a second, and the GPU-hours that a plan gives back, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import tracedoc
from tests.example_diagnoses import sharded
from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.judge.compose import _given_back
from tracedoc.predicted import PlanStep, Predicted
from tracedoc.report.view import build_view
from tracedoc.run.job import BATCH_SAMPLES, SEQUENCE, training_settings
from tracedoc.testing import TraceBuilder, parse_lanes


def run(folder: Path, ranks: int, *, strategy: str = "DDP", write: int | None = None) -> Diagnosis:
    """Ranks that train on 8 samples of 1,024 tokens in steps of 100 ms."""
    range_name = {"DDP": "DistributedDataParallel.forward", "": "forward"}[strategy]
    for rank in range(ranks if write is None else write):
        builder = TraceBuilder(rank=rank, world_size=ranks)
        for index in (1, 2, 3, 4):
            start = 100 * index
            builder.step(index, start, start + 100).backward(start + 50, start + 90)
            builder.host(range_name, start + 5, start + 40, category="user_annotation")
            builder.kernel(
                "indexSelectLargeIndex", start + 10, start + 48, launch_ms=start + 8,
                op="aten::embedding", dims=[[1000, 64], [8, 1024], []], types=["float", "long int", ""],
            )  # fmt: skip
            builder.collective("allreduce", start + 60, start + 80, nbytes=1 << 26)
        builder.write(folder / f"rank-{rank}.json")
    return tracedoc.diagnose([folder])


def test_all_ranks_together_do_what_each_does_in_a_step(tmp_path: Path) -> None:
    """4 ranks, 8 samples and 8,192 tokens a step of 100 ms each: 320 and 327,680 a second."""
    found = run(tmp_path, 4)
    assert found.run.strategy.family == "ddp"
    assert (found.number("samples_per_step"), found.number("tokens_per_step")) == (32, 32768)
    assert found.run.samples_per_s == pytest.approx(320)
    assert found.run.tokens_per_s == pytest.approx(327_680)
    assert build_view(found).throughput.startswith("320 samples/s, 328k tokens/s")


def test_of_some_ranks_it_is_said_of_how_many_it_is(tmp_path: Path) -> None:
    found = run(tmp_path, 4, write=1)
    assert found.run.samples_per_s == pytest.approx(80)
    rates = "80.0 samples/s, 81.9k tokens/s (8 samples a step) on 1 captured rank"
    assert rates in build_view(found).throughput


def test_of_ranks_that_may_share_their_samples_nothing_is_said(tmp_path: Path) -> None:
    for builder in parse_lanes("compute 0-60\nallgather 60-100 1MiB", ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = tracedoc.diagnose([tmp_path])
    assert (found.run.samples_per_s, found.run.tokens_per_s) == (None, None)
    assert "samples" not in build_view(found).throughput


@pytest.mark.parametrize(
    ("shapes", "samples"),
    [([[16, 3, 224, 224], [16]], "16"), ([[16, 128], [4]], None), ([[]], None), (["16"], None)],
)
def test_a_batch_has_as_many_samples_as_all_its_tensors_have_entries(
    shapes: list[object], samples: str | None
) -> None:
    part = {"batch": [{"shape": shape, "dtype": "torch.float32"} for shape in shapes]}
    settings = training_settings(part)
    assert settings.get(BATCH_SAMPLES) == samples
    assert SEQUENCE not in settings


def test_a_plan_gives_gpu_hours_back(tmp_path: Path, sample_traces: Path) -> None:
    """4 GPUs work 96 hours a day; a step of 60 to 90 ms, likely 75, instead of 100 needs 57.6 to 86.4."""
    found = diagnosis_of(sample_traces / "synthetic_ddp_tiny_batch")
    assert found.gpu_hours is not None
    change = found.plan[-1] if found.plan else PlanStep("", "", "", (60.0, 75.0, 90.0), (0.0,) * 3, "", 100.0)
    view = build_view(replace(found, plan=(change,), gpu_hours=(9.6, 24.0, 38.4)))
    assert view.throughput == "The predicted step saves about 24 of 96 GPU-hours a day (9.6 to 38)"
    assert build_view(replace(found, gpu_hours=None)).throughput == ""


def test_a_run_on_cpus_has_no_gpu_hours(sample_traces: Path) -> None:
    assert diagnosis_of(sample_traces / "cpu_ddp_straggler").gpu_hours is None


def test_gpu_hours_are_those_of_the_plan_or_of_a_first_fix_that_saves_more() -> None:
    """Of 192 GPU-hours a day a plan from 100 to 95 ms saves 9.6, a first fix to 50 ms 96."""
    found = sharded()
    predicted = Predicted("double-batch", (40.0, 50.0, 60.0), (40.0, 50.0, 60.0), "compute", "high")
    fix = replace(found.findings[0].fixes[0], framework="any", predicted=predicted, replays="double-batch")
    first = replace(found.findings[0], fixes=(fix,))
    plan = (PlanStep("", "", "", (90.0, 95.0, 99.0), (0.0,) * 3, "", 100.0),)
    run = replace(found.run, world_size=8)
    assert _given_back(plan, (), run) == pytest.approx((1.92, 9.6, 19.2))
    assert _given_back(plan, (first,), run) == pytest.approx((76.8, 96.0, 115.2))
    assert _given_back((), (), run) is None
    assert _given_back(plan, (), replace(run, device="CPU")) is None
