"""Steps inferred from repetition, where nothing marks them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from tracedoc import load
from tracedoc.testing import TraceBuilder
from tracedoc.timeline.build import build_timeline
from tracedoc.timeline.steps import period_marks, whole_periods

EMBED, LAYER, NORM, LOSS, BACK, ADAM = range(6)
STEP = [EMBED, *[LAYER, NORM] * 12, LOSS, *[BACK, NORM] * 12, ADAM, ADAM]


def marks(sequence: list[int]) -> list[int] | None:
    found = period_marks(np.array(sequence))
    return None if found is None else found.tolist()


def test_a_kernel_that_runs_once_a_step_marks_the_steps() -> None:
    assert marks(STEP * 4) == [0, len(STEP), 2 * len(STEP), 3 * len(STEP)]


def test_a_capture_that_begins_inside_a_step_loses_that_part_only() -> None:
    assert marks(STEP[30:] + STEP * 3) == [len(STEP) - 30 + i * len(STEP) for i in range(3)]


def test_micro_batches_are_not_steps() -> None:
    micro = [EMBED, *[LAYER, NORM] * 6, LOSS, *[BACK, NORM] * 6]
    step = [*micro, *micro, *micro, ADAM]
    found = marks(step * 4)
    assert found is not None
    assert np.diff(found).tolist() == [len(step)] * 3


@pytest.mark.parametrize(
    "sequence",
    [[], STEP, STEP * 2, [LAYER] * 500, [EMBED, *[LAYER, NORM] * 40, LOSS], list(range(400))],
    ids=["nothing", "one step", "two steps", "one kernel", "layers", "no repetition"],
)
def test_nothing_is_made_up(sequence: list[int]) -> None:
    assert marks(sequence) is None


def test_layers_of_one_step_are_not_steps() -> None:
    assert (
        marks([EMBED, *[LAYER, NORM, 7, 8, 9, 10, 11, 12] * 16, LOSS, *[BACK, 13, 14, 15] * 16, ADAM]) is None
    )


def test_the_shortest_whole_repetition_is_a_period() -> None:
    """Twelve calls of a model with four equal layers and a head; one of two kernels is benchmarked often."""
    call = [EMBED, *[LAYER, NORM] * 4, LOSS]
    found = whole_periods(np.array(call * 12))
    assert found is not None
    assert found.tolist() == [10 * place for place in range(12)]
    assert whole_periods(np.array(call * 12 + [LOSS])) is None
    assert whole_periods(np.array(call * 2)) is None
    assert whole_periods(np.array([LAYER, NORM] * 7)) is None
    benchmark = whole_periods(np.array([LAYER, NORM] * 8))
    assert benchmark is not None
    assert benchmark.tolist() == [*range(0, 16, 2)]


def test_random_kernels_repeat_nothing() -> None:
    random = np.random.default_rng(5)
    assert period_marks(random.integers(0, 40, 2000)) is None


def unmarked(
    builder: TraceBuilder, *, linked: bool = True, trains: bool = True, head: str = ""
) -> TraceBuilder:
    """Draw four steps of 10 ms: nine kernels of 1 ms, the host 2 ms ahead, and nothing that marks a step."""
    if head:
        builder.kernel(head, 39.0, 40.0, launch_ms=37.0)
    for step in range(4):
        if trains:
            builder.backward(10.0 * step + 2.5, 10.0 * step + 4.5)
        for place, name in enumerate(["embed", *["gemm", "norm"] * 3, "loss", "adam"]):
            start = 10.0 * step + place
            builder.kernel(name, start, start + 1.0, launch_ms=start - 2.0, linked=linked)
    return builder


def test_repetitions_become_steps_and_the_limit_says_so(tmp_path: Path) -> None:
    timeline = build_timeline(load(unmarked(TraceBuilder()).write(tmp_path / "rank-0.json")))
    assert [(w.end_ns - w.start_ns, w.complete) for w in timeline.windows] == [
        (10_000_000, True), (10_000_000, True), (10_000_000, True), (9_000_000, False),
    ]  # fmt: skip
    assert [limit.code for limit in timeline.limits] == ["steps-inferred"]


def test_a_trace_without_launches_is_cut_by_the_gpus_own_clock(tmp_path: Path) -> None:
    timeline = build_timeline(load(unmarked(TraceBuilder(), linked=False).write(tmp_path / "rank-0.json")))
    assert [w.end_ns - w.start_ns for w in timeline.complete_windows] == [10_000_000] * 3


@pytest.mark.parametrize(("head", "source"), [("", "inferred"), ("head", "none"), ("gemm", "none")])
def test_forward_passes_are_told_from_the_layers_of_one(tmp_path: Path, head: str, source: str) -> None:
    """Four times the same kernels and nothing else are four passes; with a head they are layers of one."""
    drawn = unmarked(TraceBuilder(), trains=False, head=head)
    assert build_timeline(load(drawn.write(tmp_path / "rank-0.json"))).host.source == source


@pytest.mark.parametrize(
    ("folder", "tolerance_ms"),
    [
        ("ddp_resnet_a100_2rank_r0", 4.0),
        ("ddp_resnet_mi300_8rank_r0", 0.1),
        ("ddp_resnet_v100_ws1_healthy", 0.1),
    ],
)
def test_real_traces_without_their_marks_give_the_same_steps(
    shared_traces: Path, tmp_path: Path, folder: str, tolerance_ms: float
) -> None:
    (source,) = (shared_traces / folder).glob("*.json.gz")
    marked = build_timeline(load(source))
    text = re.sub(
        rb"ProfilerStep|Optimizer\.(step|zero_grad)#|enumerate\(Data",
        b"x",
        gzip.decompress(source.read_bytes()),
    )
    plain = tmp_path / "rank-0.json"
    plain.write_bytes(text)
    inferred = build_timeline(load(plain))
    assert inferred.host.source == "inferred"
    ours = [(w.end_ns - w.start_ns) / 1e6 for w in inferred.complete_windows]
    theirs = [(w.end_ns - w.start_ns) / 1e6 for w in marked.complete_windows]
    assert len(ours) >= len(theirs) - 1
    assert ours == pytest.approx(theirs[: len(ours)], abs=tolerance_ms)
