"""More GPUs: the ideal step, efficiency, and what is asked where nothing tells how the work is shared."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import sharded
from tracedoc.comparison.compare import compare
from tracedoc.diagnosis import Diagnosis, FactRecord
from tracedoc.errors import InputError


def on(gpus: int, step_ms: float, tflop: float | None = None) -> Diagnosis:
    """Return a run whose step is compute alone, and whose GPUs do ``tflop`` of arithmetic in it."""
    whole = sharded()
    assert whole.budget is not None
    nothing = dict.fromkeys(
        (
            "exposed_comm_ms",
            "exposed_copy_ms",
            "idle_ms",
            "exposed_transfer_ms",
            "exposed_wait_ms",
            "comm_ms",
        ),
        0.0,
    )
    budget = replace(whole.budget, step_ms=step_ms, compute_ms=step_ms, idle_causes_ms={}, **nothing)
    facts = {}
    if tflop is not None:
        facts["model_tflops"] = FactRecord("tflops", "rank", 1000 * tflop / step_ms)
        facts["step_ms"] = FactRecord("ms", "rank", step_ms)
    run = replace(whole.run, world_size=gpus, ranks_seen=tuple(range(gpus)))
    return replace(whole, run=run, budget=budget, facts=facts, ledger=None)


def test_same_arithmetic_is_weak_scaling() -> None:
    found = compare(on(1, 100, 2.0), on(8, 125, 2.05))
    assert found.scaling is not None
    assert found.verdict is None
    assert (found.scaling.kind, found.scaling.work_frac) == ("weak", 1.0)
    assert found.scaling.efficiency == pytest.approx(0.8)
    assert found.scaling.speed_up == pytest.approx(6.4)
    assert (found.waterfall.ideal_ms, found.waterfall.measured_ms) == (100, 125)


def test_an_eighth_of_the_arithmetic_is_strong_scaling() -> None:
    found = compare(on(1, 100, 2.0), on(8, 25, 0.25))
    assert found.scaling is not None
    assert found.scaling.kind == "strong"
    assert found.waterfall.ideal_ms == pytest.approx(12.5)
    assert found.scaling.efficiency == pytest.approx(0.5)
    assert found.scaling.speed_up == pytest.approx(4.0)


def test_what_is_told_goes_before_what_is_seen() -> None:
    found = compare(on(1, 100, 2.0), on(4, 100, 2.0), scaling="strong")
    assert found.scaling is not None
    assert (found.scaling.kind, found.scaling.work_frac) == ("strong", 0.25)


def test_samples_decide_and_give_rates() -> None:
    found = compare(on(1, 100), on(4, 50), samples_per_step=(32, 64))
    assert found.scaling is not None
    assert found.scaling.work_frac == 0.5
    assert found.scaling.kind == "other"
    assert (found.scaling.base_samples_per_s, found.scaling.head_samples_per_s) == (320, 1280)
    assert found.scaling.speed_up == pytest.approx(4.0)


def test_swapped_sides_are_an_error() -> None:
    with pytest.raises(InputError, match="the sides are swapped"):
        compare(on(8, 100, 1.0), on(1, 100, 1.0))


def test_without_evidence_the_kind_is_asked_for() -> None:
    with pytest.raises(InputError) as caught:
        compare(on(1, 100), on(8, 100))
    assert "--scaling weak" in caught.value.hint


def test_same_number_of_gpus_is_no_question_of_scaling() -> None:
    assert compare(on(8, 100), on(8, 90)).scaling is None


def test_side_without_a_step_is_an_error() -> None:
    with pytest.raises(InputError, match="HEAD has no step to compare"):
        compare(on(1, 100), replace(on(1, 100), budget=None))


def test_other_device_strategy_and_missing_ranks_are_limits() -> None:
    head = on(8, 90)
    run = replace(head.run, device="NVIDIA A100-SXM4-40GB", ranks_seen=(0, 1))
    run = replace(run, strategy=replace(run.strategy, name="DDP"))
    codes = {limit.code for limit in compare(on(8, 100), replace(head, run=run)).limits}
    assert codes == {"other-device", "other-strategy", "missing-ranks"}


def reading(run: Diagnosis, batch: int, micro_batches: int = 1) -> Diagnosis:
    """Return a run whose loader is known to give batches of so many samples."""
    facts = {**run.facts, "micro_batches": FactRecord("count", "rank", micro_batches)}
    return replace(run, facts=facts, run=replace(run.run, settings={"batch size of the loader": str(batch)}))


@pytest.mark.parametrize(
    ("batch", "micro_batches", "kind", "work"),
    [(32, 1, "weak", 1.0), (8, 1, "strong", 0.25), (8, 4, "weak", 1.0), (16, 1, "other", 0.5)],
)
def test_batches_of_the_loaders_are_evidence(batch: int, micro_batches: int, kind: str, work: float) -> None:
    found = compare(reading(on(1, 100), 32), reading(on(4, 100), batch, micro_batches)).scaling
    assert found is not None
    assert (found.kind, found.work_frac) == (kind, work)


def test_cost_of_a_sample_is_gpu_time() -> None:
    """1 GPU x 100 ms for 32 samples, 4 GPUs x 50 ms for 64: 3.125 ms of a GPU each, on both sides."""
    found = compare(on(1, 100), on(4, 50), samples_per_step=(32, 64)).scaling
    assert found is not None
    assert found.gpu_time_ratio == pytest.approx(1.0)
    assert found.base_gpu_hours == pytest.approx(3.125e-3 * 1e6 / 3600)
    assert found.head_gpu_hours == pytest.approx(3.125e-3 * 1e6 / 3600)
