"""What the ledger makes of simulated pipelines: a slow rank, a heavy stage and the bubble keep apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tracedoc
from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture, write_traces
from tests.simulated.truth import Truth
from tracedoc.whatif.changes.stages import _meeting

JOB = Job(
    7, "pipeline", ranks=4, stages=4, layers=8, micro_batches=8, steps=4, kernels=4, layer_ms=4.0,
    activation_mib=8.0, jitter=0.0,
)  # fmt: skip
"""Each stage computes 24 ms on a micro-batch: 8 ms forward, 16 ms backward."""

NEAR = 0.03
"""Gains agree with those of the job without its fault within this share of the step."""


def written(truth: Truth, folder: Path, change: Callable[[list[dict]], None] | None = None) -> Path:
    """Write the traces of a job, changed event by event if asked for."""
    write_traces(truth.played, truth.job.ranks, folder, Capture())
    return folder if change is None else changed(folder, change)


def changed(folder: Path, change: Callable[[list[dict]], None]) -> Path:
    """Change traces that were written, event by event."""
    for path in folder.glob("*.json"):
        document = json.loads(path.read_text())
        change(document["traceEvents"])
        path.write_text(json.dumps(document))
    return folder


def causes(diagnosis: tracedoc.Diagnosis) -> dict[str, tracedoc.ledger.LedgerCause]:
    return {one.id: one for one in diagnosis.ledger.causes}


CASES = {
    "a slow replica": (replace(JOB, ranks=8), "slow-worker", 5, 1.5, "ranks.compute", (5,)),
    "a slow replica of one of eight stages": (
        replace(JOB, ranks=16, stages=8, micro_batches=16), "slow-worker", 9, 1.4, "ranks.compute", (9,),
    ),
    "a slow replica under an interleaved schedule": (
        replace(JOB, ranks=8, chunks=2), "slow-worker", 5, 1.5, "ranks.compute", (5,),
    ),
    "a host that pauses, alone in its stage": (JOB, "straggler-host", 1, 60.0, "ranks.host", (1,)),
    "a slow loader, alone in its stage": (JOB, "straggler-input", 0, 60.0, "ranks.input", (0,)),
    "a heavy stage": (JOB, "heavy-stage", 3, 1.5, "pipeline.imbalance", (3,)),
    "a heavy stage of four replicas": (
        replace(JOB, ranks=16), "heavy-stage", 1, 1.5, "pipeline.imbalance", (4, 5, 6, 7),
    ),
    "a heavy stage under an interleaved schedule": (
        replace(JOB, chunks=2), "heavy-stage", 2, 1.6, "pipeline.imbalance", (2,),
    ),
    "two stages of one rank": (
        replace(JOB, ranks=2, stages=2), "heavy-stage", 0, 1.5, "pipeline.imbalance", (0,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_fault_of_a_pipeline_has_its_cause_its_ranks_and_its_gain(case: str, tmp_path: Path) -> None:
    job, fault, rank, amount, cause, ranks = CASES[case]
    truth = Truth(replace(job, faults=(Fault(fault, rank, amount),)))
    diagnosis = tracedoc.diagnose(written(truth, tmp_path))
    found = causes(diagnosis)
    true = truth.gain_of_fault(fault)
    assert true > 0.05 * truth.step_ms
    assert found[cause].alone_ms[1] == pytest.approx(true, abs=NEAR * truth.step_ms)
    assert found[cause].ranks == ranks
    others = [one for name, one in found.items() if name not in (cause, "pipeline.bubble", "host.sync")]
    assert sum(one.share_ms for one in others) < NEAR * truth.step_ms
    if cause.startswith("ranks"):
        tellers = ("straggler-rank", "rank-zero-work", "input-stall")
        (late,) = [one for one in diagnosis.findings if one.rule_id in tellers]
        assert late.ranks == ranks


@pytest.mark.parametrize(("steps", "missing"), [(1, ()), (2, ()), (3, (3,))])
def test_a_heavy_stage_costs_the_same_in_short_captures_and_without_a_rank(
    steps: int, missing: tuple[int, ...], tmp_path: Path
) -> None:
    """Hosts run ahead: the GPUs still have work from before the capture when its first step is launched."""
    job = replace(JOB, stages=2, steps=steps, faults=(Fault("heavy-stage", 0, 1.5),))
    truth = Truth(job)
    write_traces(truth.played, job.ranks, tmp_path, Capture(missing=missing))
    found = causes(tracedoc.diagnose(tmp_path))["pipeline.imbalance"]
    true = truth.gain_of_fault("heavy-stage")
    assert true > 0.05 * truth.step_ms
    assert found.alone_ms[1] == pytest.approx(true, abs=NEAR * truth.step_ms)
    assert found.ranks == (0, 1)


@pytest.mark.parametrize(("missing", "mib"), [(0, 8), (1, 8), (2, 8), (3, 8), (1, 1024)])
def test_a_bubble_before_a_stage_that_is_missing_is_the_schedule_s(
    missing: int, mib: int, tmp_path: Path
) -> None:
    """Its neighbours wait for a stage of which nothing was captured no longer than equal stages wait.

    A large activation takes every stage as long, those that are missing as well.
    """
    truth = Truth(replace(JOB, micro_batches=4, jitter=0.02, activation_mib=float(mib)))
    write_traces(truth.played, truth.job.ranks, tmp_path, Capture(missing=(missing,)))
    uneven = causes(tracedoc.diagnose(tmp_path)).get("pipeline.imbalance")
    assert uneven is None or uneven.share_ms < NEAR * truth.step_ms


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (3,), (0, 1), (1, 2, 3)])
def test_a_host_that_waits_costs_no_more_where_ranks_are_missing(
    missing: tuple[int, ...], tmp_path: Path
) -> None:
    """A stage that was not captured sends no sooner because the others read their loss later.

    Where stages at an end are missing it is not known how many there are, and what the schedule lets idle.
    """
    truth = Truth(replace(JOB, micro_batches=4, jitter=0.02))
    write_traces(truth.played, truth.job.ranks, tmp_path, Capture(missing=missing))
    diagnosis = tracedoc.diagnose(tmp_path)
    found = causes(diagnosis)
    assert truth.step_ms - Truth(replace(truth.job, logs=False)).step_ms < 1
    assert "host.sync" not in found or found["host.sync"].share_ms < 1
    waits = "pipeline.unseen" if len(missing) > 1 else "pipeline.bubble"
    assert found[waits].alone_ms[1] == pytest.approx(72, rel=NEAR)
    assert not [one for one in diagnosis.findings if one.severity != "note"]
    if waits == "pipeline.unseen":
        assert "Waiting for pipeline stages that were not captured: 7" in diagnosis.summary


@pytest.mark.parametrize("missing", [(), (1,)])
def test_a_host_that_waits_costs_no_more_where_nothing_names_who_sends(
    missing: tuple[int, ...], tmp_path: Path
) -> None:
    """As in traces of torch 1.13, whose sends have neither records nor metadata."""

    def unnamed(events: list[dict]) -> None:
        events[:] = [one for one in events if not one["name"].startswith(("nccl:", "record_param"))]
        for one in events:
            if one.get("cat") == "kernel" and "SendRecv" in one["name"]:
                one["args"] = {name: one["args"][name] for name in ("device", "stream", "correlation")}

    truth = Truth(replace(JOB, micro_batches=4, jitter=0.02))
    write_traces(truth.played, truth.job.ranks, tmp_path, Capture(missing=missing))
    found = causes(tracedoc.diagnose(changed(tmp_path, unnamed)))
    assert "host.sync" not in found or found["host.sync"].share_ms < 1
    assert found["link.unsplit"].alone_ms[1] == pytest.approx(72, rel=NEAR)


def test_what_a_slow_host_holds_up_is_known_where_what_it_sends_is_answered(tmp_path: Path) -> None:
    truth = Truth(replace(JOB, jitter=0.02, faults=(Fault("straggler-host", 1, 60.0),)))
    write_traces(truth.played, truth.job.ranks, tmp_path, Capture(missing=(2, 3)))
    found = causes(tracedoc.diagnose(tmp_path))["ranks.host"]
    true = truth.gain_of_fault("straggler-host")
    assert found.alone_ms[1] == pytest.approx(true, abs=NEAR * truth.step_ms)
    assert found.ranks == (1,)


def test_a_heavy_first_stage_that_works_while_the_others_fill_costs_nothing(tmp_path: Path) -> None:
    """Its forward passes are long while it would wait for a gradient: shared out, the step is longer."""
    job = replace(JOB, micro_batches=4, faults=(Fault("heavy-stage", 0, 1.7),))
    truth = Truth(job)
    assert truth.gain_of_fault("heavy-stage") < 0
    found = causes(tracedoc.diagnose(written(truth, tmp_path)))
    assert "pipeline.imbalance" not in found or found["pipeline.imbalance"].alone_ms[1] < 1


@pytest.mark.parametrize(("stages", "chunks", "bubble_ms"), [(4, 1, 72), (4, 2, 36), (2, 2, 24)])
def test_the_bubble_is_what_the_schedule_leaves_idle(
    stages: int, chunks: int, bubble_ms: float, tmp_path: Path
) -> None:
    """All stages but one wait for a pass of 96 ms over stages and chunks; each rank sees 8 passes a chunk."""
    truth = Truth(replace(JOB, ranks=stages, stages=stages, chunks=chunks))
    diagnosis = tracedoc.diagnose(written(truth, tmp_path))
    assert causes(diagnosis)["pipeline.bubble"].alone_ms[1] == pytest.approx(bubble_ms, rel=NEAR)
    assert not [one for one in diagnosis.findings if one.severity != "note"]
    facts = diagnosis.facts
    assert [facts[f"pipeline_{name}"].value for name in ("micro_batches", "chunks")] == [8, chunks]
    shape = "8 micro-batches" if chunks == 1 else "8 micro-batches through 2 chunks a rank"
    assert diagnosis.run.strategy.name == f"pipeline parallel (1F1B, {shape})"
    schedules = [fix.change or "" for one in diagnosis.findings for fix in one.fixes]
    assert any(one.startswith("ScheduleInterleaved1F1B(") for one in schedules) == (chunks > 1)


def test_a_gpu_that_is_slow_at_the_products_of_all_stages_is_no_heavy_stage(tmp_path: Path) -> None:
    def three_kinds(events: list[dict]) -> None:
        products = [one for one in events if one.get("cat") == "kernel" and one["name"].startswith("nvjet")]
        for number, one in enumerate(sorted(products, key=lambda one: one["ts"])):
            one["args"]["grid"] = [1056 + number % 3, 1, 1]

    job = replace(JOB, faults=(Fault("slow-worker", 2, 1.4),))
    truth = Truth(job)
    diagnosis = tracedoc.diagnose(written(truth, tmp_path, three_kinds))
    found = causes(diagnosis)
    true = truth.step_ms - Truth(replace(job, faults=())).step_ms
    assert found["ranks.compute"].alone_ms[1] == pytest.approx(true, abs=NEAR * truth.step_ms)
    assert found["ranks.compute"].ranks == (2,)
    assert [one.ranks for one in diagnosis.findings if one.rule_id == "straggler-rank"] == [(2,)]
    assert "stage-imbalance" not in [one.rule_id for one in diagnosis.findings]


def test_batches_of_sends_are_read_as_single_ones_are(tmp_path: Path) -> None:
    """Their kernels are launched after the records of what they consist of, and carry no metadata."""

    def batched(events: list[dict]) -> None:
        calls = [one for one in events if one["name"] in ("c10d::send", "c10d::recv_")]
        launches = {one["args"]["correlation"]: one for one in events if one.get("cat") == "cuda_runtime"}
        for kernel in events:
            if kernel.get("cat") != "kernel" or "SendRecv" not in kernel["name"]:
                continue
            launch = launches[kernel["args"]["correlation"]]
            (call,) = [one for one in calls if one["ts"] <= launch["ts"] < one["ts"] + one["dur"]]
            launch["ts"] = round(call["ts"] + call["dur"] + 0.001, 3)
            kept = ("device", "context", "stream", "correlation", "grid", "block")
            kernel["args"] = {name: kernel["args"][name] for name in kept if name in kernel["args"]}
            launch["args"].pop("External id", None)

    truth = Truth(replace(JOB, ranks=8, faults=(Fault("slow-worker", 5, 1.5),)))
    single = tracedoc.diagnose(written(truth, tmp_path / "single"))
    batches = tracedoc.diagnose(written(truth, tmp_path / "batches", batched))
    assert batches.summary == single.summary
    assert {name: one.share_ms for name, one in causes(batches).items()} == pytest.approx(
        {name: one.share_ms for name, one in causes(single).items()}, abs=0.1
    )


LONG = replace(JOB, layer_ms=40.0, activation_mib=80.0)
"""Kernels of 10 ms, which take half as long for half the work."""

MORE = {
    "four stages": LONG,
    "four replicas each": replace(LONG, ranks=16),
    "an interleaved schedule": replace(LONG, chunks=2),
    "a heavy stage": replace(LONG, faults=(Fault("heavy-stage", 2, 1.5),)),
}


@pytest.mark.parametrize("case", MORE)
def test_twice_the_micro_batches_take_what_a_job_with_so_many_takes(case: str, tmp_path: Path) -> None:
    job = MORE[case]
    run = written(Truth(job), tmp_path)
    whole, halved = tracedoc.predict(run, ["more-micro-batches", "halve-micro-batches"]).alone
    twice = Truth(replace(job, micro_batches=16)).step_ms / 2
    halves = Truth(replace(job, micro_batches=16, layer_ms=20.0, activation_mib=40.0)).step_ms
    for predicted, true in ((whole, twice), (halved, halves)):
        low, likely, high = predicted.step_ms
        assert low <= 1.01 * true
        assert true <= high
        assert likely == pytest.approx(true, rel=0.05)


def test_balanced_stages_take_what_a_job_takes_whose_stages_are_the_mean_one(tmp_path: Path) -> None:
    heavy = replace(JOB, faults=(Fault("heavy-stage", 2, 1.5),))
    (balanced,) = tracedoc.predict(written(Truth(heavy), tmp_path), ["balance-stages"]).alone
    even = Truth(replace(JOB, layer_ms=4.0 * (3 + 1.5) / 4))
    assert balanced.step_ms[1] == pytest.approx(even.step_ms, rel=0.02)


@pytest.mark.parametrize(("joined", "meets"), [(True, [0, 0, 0, 0]), (False, [0, 1, 0, 1])])
def test_pipelines_side_by_side_meet_where_a_reduction_joins_them(joined: bool, meets: list[int]) -> None:
    """Ranks 0 and 2 send to each other, 1 and 3 do, and 2 and 3 reduce together, if that is known."""
    joins = SimpleNamespace(event=np.arange(6), op=np.array([0, 1, 0, 2, 1, 2]), operations=3)
    rank = np.array([0, 1, 2, 2, 3, 3])
    layout = SimpleNamespace(ranks=range(4), joins=joins, rank_of_event=lambda events: rank[events])
    known = np.array([True, True, True, joined, True, joined])
    assert _meeting(cast(Any, SimpleNamespace(layout=layout, joined=known))).tolist() == meets
