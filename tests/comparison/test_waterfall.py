"""Without ledgers the waterfall has each loss of a job in the part of the step that it is in, and adds up."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from msgspec.structs import replace

import tracedoc
from tests.example_diagnoses import DIAGNOSES
from tracedoc.comparison.compare import compare
from tracedoc.comparison.waterfall import Waterfall, waterfall
from tracedoc.diagnosis import Diagnosis
from tracedoc.tables import KernelRow
from tracedoc.testing import parse_lanes

EXACT_MS = 0.001


@cache
def job(
    kernels: float = 0, link: float = 0, late: float = 0, loader: float = 0, host: float = 0
) -> Diagnosis:
    """Return the diagnosis of 4 ranks whose step has 60 ms of compute, an all-reduce of 20, and 20 more.

    The amounts are ms: the kernels before the all-reduce take longer, the transfer does, rank 3 comes late to
    it, the loader keeps the GPU waiting longer than its 10 ms, the host launches the last kernels late.
    """
    computed = 60 + kernels
    arrived = computed + late
    reduced = arrived + 20 + link
    again = reduced + 10 + host
    ended = again + 10
    lanes = f"""
        step: {ended + 10 + loader}
        lead: 0.5
        compute    0-{computed} x20   {reduced}-{reduced + 10} x5   {again}-{ended} x5
        allreduce  {computed}-{reduced}  64MiB lead=30
        loader     {ended}-{ended + 9.5 + loader}
        rank 3:
          allreduce  {arrived}-{reduced}  64MiB lead={0.5 if late else 30}
    """
    with TemporaryDirectory() as folder:
        for rank, builder in enumerate(parse_lanes(lanes, ranks=4)):
            builder.write(Path(folder) / f"rank-{rank}.json")
        return tracedoc.diagnose(folder, tracedoc.Options(jobs=1, replay=False))


@cache
def alone(work: int = 1) -> Diagnosis:
    """Return the same step on one GPU, with ``work`` times the batch."""
    lanes = f"""
        step: {90 * work}
        lead: {0.5 * work}
        compute    0-{60 * work} x20   {60 * work}-{70 * work} x5   {70 * work}-{80 * work} x5
        loader     {80 * work}-{89.5 * work}
    """
    with TemporaryDirectory() as folder:
        for builder in parse_lanes(lanes, ranks=1):
            builder.write(Path(folder) / "rank-0.json")
        return tracedoc.diagnose(folder, tracedoc.Options(jobs=1, replay=False))


def changes(fall: Waterfall) -> dict[str, float]:
    return {part.key: part.change_ms for part in fall.parts}


MIXED = {"kernels": 5.0, "link": 9.0, "late": 7.0, "loader": 11.0, "host": 8.0}
PART_OF = {
    "kernels": "compute",
    "link": "communication",
    "late": "communication",
    "loader": "idle",
    "host": "idle",
}


def put_into(losses: dict[str, float]) -> dict[str, float]:
    """The ms that each part of the step grows by."""
    parts = dict.fromkeys(PART_OF.values(), 0.0)
    for name, ms in losses.items():
        parts[PART_OF[name]] += ms
    return parts


@pytest.mark.parametrize(
    "losses",
    [{"kernels": 10.0}, {"link": 8.0}, {"late": 12.0}, {"loader": 15.0}, {"host": 6.0}, MIXED],
    ids=lambda losses: "+".join(losses),
)
def test_each_loss_is_the_part_that_it_was_put_into(losses: dict[str, float]) -> None:
    found = compare(job(), job(**losses))
    assert found.verdict is not None
    assert found.verdict.word == "regressed"
    fall = found.waterfall
    within = 0.02 * fall.measured_ms
    put = put_into(losses)
    for key, change in changes(fall).items():
        assert change == pytest.approx(put.get(key, 0.0), abs=within), key
    assert fall.measured_ms - fall.ideal_ms == pytest.approx(sum(losses.values()), abs=EXACT_MS)
    assert sum(changes(fall).values()) == pytest.approx(fall.measured_ms - fall.ideal_ms, abs=EXACT_MS)


PAIRS = (
    ({"kernels": 5.0}, {"link": 9.0, "host": 8.0}),
    ({"late": 7.0, "loader": 11.0}, {"kernels": 5.0, "late": 12.0}),
    ({"link": 9.0, "host": 8.0}, {"loader": 11.0}),
    (MIXED, {"late": 12.0}),
    (MIXED, {}),
)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda losses: "+".join(losses) or "none")
def test_losses_of_both_sides_are_told_apart(before: dict[str, float], after: dict[str, float]) -> None:
    fall = compare(job(**before), job(**after)).waterfall
    old, new = put_into(before), put_into(after)
    for key in new:
        put = new[key] - old[key]
        assert changes(fall)[key] == pytest.approx(put, abs=0.02 * fall.measured_ms), key
    assert sum(changes(fall).values()) == pytest.approx(fall.measured_ms - fall.ideal_ms, abs=EXACT_MS)


@pytest.mark.parametrize(("scaling", "work"), [("weak", 1), ("strong", 4)])
@pytest.mark.parametrize("losses", [{}, {"link": 8.0}, {"late": 12.0}, MIXED], ids=lambda one: "+".join(one))
def test_each_loss_of_scaling_is_its_part(scaling: str, work: int, losses: dict[str, float]) -> None:
    """One GPU takes 90 ms for the work of each of four, which also need 20 ms of transfer."""
    found = compare(alone(work), job(**losses), scaling=scaling)
    fall = found.waterfall
    assert fall.ideal_ms == pytest.approx(90, abs=EXACT_MS)
    put = put_into(losses)
    put["communication"] += 20
    for key, change in changes(fall).items():
        assert change == pytest.approx(put.get(key, 0.0), abs=0.02 * fall.measured_ms), key
    assert sum(changes(fall).values()) == pytest.approx(20 + sum(losses.values()), abs=EXACT_MS)
    assert found.scaling is not None
    assert found.scaling.efficiency == pytest.approx(90 / (110 + sum(losses.values())))


def test_late_rank_of_two_is_waiting_whoever_stands_for_the_run() -> None:
    """Rank 1 of two sleeps 40 ms before it reduces: on rank 0 that is waiting, whichever step is analysed."""

    def two(late: int) -> Diagnosis:
        lanes = f"""
            step: {100 + late}
            lead: 0.5
            compute    0-60 x6   {80 + late}-{100 + late} x2
            allreduce  60-{80 + late}  64MiB lead=30
            rank 1:
              allreduce  {60 + late}-{80 + late}  64MiB lead=0.5
        """
        with TemporaryDirectory() as folder:
            for rank, builder in enumerate(parse_lanes(lanes, ranks=2)):
                builder.write(Path(folder) / f"rank-{rank}.json")
            return tracedoc.diagnose(folder, tracedoc.Options(jobs=1, replay=False))

    healthy, late = two(0), two(40)
    for own in (0, 1):
        seen = replace(late, budget=next(one.budget for one in late.ranks if one.rank == own))
        fall = compare(healthy, seen).waterfall
        assert fall.head_at is not None
        assert fall.head_at.rank == 0
        assert changes(fall)["communication"] == pytest.approx(40, abs=0.5)


def test_who_comes_late_is_the_evidence_of_waiting() -> None:
    parts = {part.key: part for part in compare(job(), job(late=12.0)).waterfall.parts}
    assert "; rank 3 arrives last in 100 %" in parts["communication"].evidence


def test_the_slower_kernel_is_named() -> None:
    parts = {part.key: part for part in compare(job(), job(kernels=10.0)).waterfall.parts}
    assert parts["compute"].evidence.startswith("most of it ")


def test_healed_job_is_improved_by_as_much() -> None:
    found = compare(job(late=12.0), job())
    assert found.verdict is not None
    assert found.verdict.word == "improved"
    assert found.realised_ms == pytest.approx(12, abs=EXACT_MS)
    assert {one.rule_id for one in found.findings if one.state == "fixed"} >= {"straggler-rank"}


@pytest.mark.parametrize("work", [1.0, 0.5, 0.125])
@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_any_two_budgets_add_up(name: str, work: float) -> None:
    head = DIAGNOSES[name]()
    fall = waterfall(job(), head, work)
    if head.budget is None:
        assert fall is None
        return
    assert fall is not None
    budget = head.budget
    parts = budget.compute_ms + budget.exposed_comm_ms + budget.exposed_copy_ms + budget.idle_ms
    if parts == pytest.approx(budget.step_ms):
        assert sum(changes(fall).values()) == pytest.approx(fall.measured_ms - fall.ideal_ms, abs=EXACT_MS)


def test_kernels_that_run_more_often_are_not_the_same_ones_slower() -> None:
    """10 calls of 3 ms become 20, which are others; 10 calls of 5 ms become 6 ms each."""

    def run(compute_ms: float, *kernels: KernelRow) -> Diagnosis:
        whole = DIAGNOSES["sharded"]()
        assert whole.budget is not None
        budget = replace(whole.budget, compute_ms=compute_ms)
        return replace(
            whole, budget=budget, detail=replace(whole.detail, kernels=kernels, phases=()), facts={}
        )

    base = run(80, KernelRow("gemm", "gemm", 10, 30.0), KernelRow("norm", "norm", 10, 50.0))
    head = run(120, KernelRow("gemm", "gemm", 20, 60.0), KernelRow("norm", "norm", 10, 60.0))
    fall = waterfall(base, head)
    assert fall is not None
    assert changes(fall)["compute"] == 40
    evidence = next(part.evidence for part in fall.parts if part.key == "compute")
    assert evidence == "most of it norm: 50 -> 60 ms; 10 -> 20 such kernels, most of it gemm"
