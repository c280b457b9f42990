"""Simulated jobs with one fault: the right rank and rule, and a gain as large as the fault costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulated.draws import draw_capture, draw_job
from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture, write_traces
from tests.simulated.truth import Truth
from tracedoc.diagnosis import Diagnosis
from tracedoc.pipeline import Options, diagnose
from tracedoc.report.words import cost_text

DDP = {"kind": "ddp", "ranks": 4, "layers": 6}
FSDP = {"kind": "fsdp", "ranks": 4, "layers": 6}
TENSOR = {"kind": "tensor", "ranks": 4, "tensor": 2, "layers": 6}
PIPELINE = {"kind": "pipeline", "ranks": 8, "stages": 4, "layers": 4, "micro_batches": 8, "kernels": 4}
CLOCKS = Capture({rank: 700.0 * (rank // 2) for rank in range(8)}, ranks_a_host=2)


def simulated(folder: Path, job: Job, capture: Capture | None = None) -> tuple[Truth, Diagnosis]:
    truth = Truth(job)
    write_traces(truth.played, job.ranks, folder, capture or Capture())
    return truth, diagnose([folder], Options(jobs=1))


def cost_ms(diagnosis: Diagnosis, rank: int, rule: str = "straggler-rank") -> float:
    """Return what a late rank, or the heavy stage, costs a step."""
    if rule == "stage-imbalance":
        assert diagnosis.ledger is not None
        (cost,) = (one.alone_ms[1] for one in diagnosis.ledger.causes if one.id == "pipeline.imbalance")
    else:
        cost = diagnosis.facts["straggler_cost_ms"].values[str(rank)]
    assert isinstance(cost, float)
    return cost


@pytest.mark.parametrize(
    ("kind", "fault", "rule", "ranks"),
    [
        (DDP, Fault("straggler-compute", 2, 1.4), "straggler-rank", (2,)),
        (FSDP, Fault("straggler-host", 1, 15.0), "straggler-rank", (1,)),
        (TENSOR, Fault("straggler-compute", 3, 1.4), "straggler-rank", (3,)),
        (PIPELINE, Fault("heavy-stage", 3, 1.6), "stage-imbalance", (6, 7)),
        (PIPELINE, Fault("heavy-stage", 0, 1.6), "stage-imbalance", (0, 1)),
        (PIPELINE, Fault("slow-worker", 4, 1.6), "straggler-rank", (4,)),
    ],
    ids=lambda one: one.name if isinstance(one, Fault) else None,
)
@pytest.mark.parametrize("capture", [None, CLOCKS], ids=["one clock", "clocks apart"])
def test_the_fault_comes_first_with_what_it_costs(
    tmp_path: Path,
    kind: dict[str, object],
    fault: Fault,
    rule: str,
    ranks: tuple[int, ...],
    capture: Capture | None,
) -> None:
    job = Job(3, steps=3, faults=(fault,), **kind)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job, capture)
    # With a host that waits once a step, not waiting hides what one rank's host does as well.
    found = [one for one in diagnosis.findings if one.rule_id != "blocking-syncs"]
    assert (found[0].rule_id, found[0].ranks) == (rule, ranks)
    cost = cost_ms(diagnosis, ranks[0], rule)
    assert cost == pytest.approx(truth.gain_of_fault(fault.name), rel=0.15)


@pytest.mark.parametrize(
    ("fault", "rule", "ranks"),
    [
        (Fault("heavy-stage", 1, 1.6), "stage-imbalance", (2, 3)),
        (Fault("heavy-stage", 3, 1.6), "stage-imbalance", (6,)),
        (Fault("slow-worker", 4, 1.6), "straggler-rank", (4,)),
    ],
    ids=lambda one: f"{one.name} {one.rank}" if isinstance(one, Fault) else None,
)
def test_a_pipeline_with_a_missing_rank_names_its_slow_stage(
    tmp_path: Path, fault: Fault, rule: str, ranks: tuple[int, ...]
) -> None:
    job = Job(3, steps=3, faults=(fault,), **PIPELINE)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job, Capture(missing=(7,)))
    assert (diagnosis.findings[0].rule_id, diagnosis.findings[0].ranks) == (rule, ranks)
    assert cost_ms(diagnosis, ranks[0], rule) == pytest.approx(truth.gain_of_fault(fault.name), rel=0.2)


@pytest.mark.parametrize(
    ("fault", "rule", "ranks"),
    [
        (Fault("slow-worker", 9, 1.6), "straggler-rank", (9,)),
        (Fault("heavy-stage", 2, 1.4), "stage-imbalance", (8, 9, 10)),
    ],
    ids=lambda one: one.name if isinstance(one, Fault) else None,
)
def test_a_rank_missing_from_the_stage_at_fault_is_as_late_as_its_peers(
    tmp_path: Path, fault: Fault, rule: str, ranks: tuple[int, ...]
) -> None:
    """Rank 7 waits for rank 11, which is late where rank 10 is: for rank 9, or for its own layers."""
    job = Job(3, steps=3, faults=(fault,), **{**PIPELINE, "ranks": 16})  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job, Capture(missing=(11,)))
    found = diagnosis.findings[0]
    assert (found.rule_id, found.ranks) == (rule, ranks)
    assert found.told_ms == pytest.approx(truth.gain_of_fault(fault.name), rel=0.1)


def test_a_stage_waits_for_a_neighbour_that_is_missing(tmp_path: Path) -> None:
    """Its receives are split by what those of the same size take between captured stages."""
    _, diagnosis = simulated(tmp_path, Job(4, steps=3, **PIPELINE), Capture(missing=(7,)))  # type: ignore[arg-type]
    assert "exposed-communication" not in {one.rule_id for one in diagnosis.findings}
    whole = simulated(tmp_path / "whole", Job(4, steps=3, **PIPELINE))[1]  # type: ignore[arg-type]
    found, expected = (one.facts["pipeline_wait_ms"].values["5"] for one in (diagnosis, whole))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind", [DDP, FSDP, TENSOR, PIPELINE], ids=lambda one: str(one["kind"]))
def test_a_healthy_job_gets_no_warning(tmp_path: Path, kind: dict[str, object]) -> None:
    _, diagnosis = simulated(tmp_path, Job(4, steps=3, **kind))  # type: ignore[arg-type]
    assert [one.rule_id for one in diagnosis.findings if one.severity != "note"] == []


def test_one_step_is_enough_to_name_a_rank_that_is_late_at_its_start(tmp_path: Path) -> None:
    job = Job(5, steps=1, faults=(Fault("straggler-host", 2, 20.0),), **DDP)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job)
    late = next(one for one in diagnosis.findings if one.rule_id == "straggler-rank")
    assert late.ranks == (2,)
    assert cost_ms(diagnosis, 2) == pytest.approx(truth.gain_of_fault("straggler-host"), rel=0.15)


def test_hosts_that_are_equally_slow_have_no_straggler(tmp_path: Path) -> None:
    bound = Fault("launch-bound", -1, 90.0)
    late = Fault("straggler-host", 1, 0.5)
    job = Job(6, steps=3, faults=(bound, late), **FSDP)  # type: ignore[arg-type]
    _, diagnosis = simulated(tmp_path, job)
    assert diagnosis.findings[0].rule_id == "host-bound-launches"
    assert cost_ms(diagnosis, 1) < 2.0


def test_a_group_of_one_rank_is_no_neighbour_of_a_pipeline(tmp_path: Path) -> None:
    job = Job(4, steps=3, **PIPELINE)  # type: ignore[arg-type]
    write_traces(Truth(job).played, job.ranks, tmp_path, Capture())
    path = tmp_path / "rank-0.json"
    content = json.loads(path.read_text())
    sent = next(event for event in content["traceEvents"] if "Collective name" in event.get("args", {}))
    alone = {
        "Collective name": "allreduce",
        "Process Group Name": "9",
        "Process Group Ranks": "[0]",
        "Group size": 1,
    }
    content["traceEvents"].append({**sent, "ts": sent["ts"] + 1e6, "args": {**sent["args"], **alone}})
    path.write_text(json.dumps(content))
    facts = diagnose([tmp_path], Options(jobs=1)).facts
    assert facts["pipeline_stages"].value == 4
    assert facts["pipeline_micro_batches"].value == 8


def test_stages_on_hosts_of_their_own_are_aligned_by_their_sends(tmp_path: Path) -> None:
    """Stages that hold no replicas have no symmetric operation in common."""
    lone = {**PIPELINE, "ranks": 4}
    job = Job(7, steps=3, faults=(Fault("heavy-stage", 3, 1.6),), **lone)  # type: ignore[arg-type]
    _, diagnosis = simulated(tmp_path, job, CLOCKS)
    assert (diagnosis.findings[0].rule_id, diagnosis.findings[0].ranks) == ("stage-imbalance", (3,))
    assert "clocks-not-aligned" not in {limit.code for limit in diagnosis.limits}


def test_a_lone_step_begins_when_the_steps_before_it_are_done(tmp_path: Path) -> None:
    """The host launched it while the GPU still ran two steps that the profiler did not see."""
    two = {**PIPELINE, "ranks": 2, "stages": 2}
    heavy = Fault("heavy-stage", 0, 1.6)
    job = Job(8, steps=1, logs=False, faults=(heavy,), **two)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job)
    assert diagnosis.facts["step_ms"].value == pytest.approx(truth.step_ms, rel=0.15)
    assert diagnosis.findings[0].rule_id == "stage-imbalance"


def test_a_rank_that_takes_turns_costs_what_it_does_on_average(tmp_path: Path) -> None:
    """The step that is replayed shows no pause: what it gains is nothing, which is no bound."""
    job = Job(13, steps=6, faults=(Fault("pauses", 1, 30.0),), **FSDP)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job)
    found = next(one for one in diagnosis.findings if one.rule_id == "rotating-straggler")
    assert found.gain is not None
    assert found.gain.high_ms >= truth.gain_of_fault("pauses") > 5.0


def test_what_comes_before_a_lone_step_s_first_kernel_counts(tmp_path: Path) -> None:
    job = Job(5, steps=1, faults=(Fault("straggler-host", 2, 20.0),), **DDP)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job)
    late = next(one for one in diagnosis.findings if one.rule_id == "straggler-rank")
    assert late.gain is not None
    assert late.gain.high_ms >= 0.99 * truth.gain_of_fault("straggler-host") > 15.0


def test_launches_that_come_late_come_before_the_bubble(tmp_path: Path) -> None:
    job = Job(10, steps=3, faults=(Fault("launch-bound", -1, 130.0),), **PIPELINE)  # type: ignore[arg-type]
    _, diagnosis = simulated(tmp_path, job)
    bubble = next(one for one in diagnosis.findings if one.rule_id == "pipeline-bubble")
    assert (bubble.severity, diagnosis.findings[0].rule_id) == ("note", "host-bound-launches")


@pytest.mark.parametrize("job", [{**DDP, "bucket_mib": 100.0, "layer_mib": 200.0}, FSDP])
@pytest.mark.parametrize("fault", ["pause-in-forward", "straggler-host"])
def test_a_host_that_pauses_is_not_told_of_its_kernels_or_waits(
    tmp_path: Path, job: dict[str, object], fault: str
) -> None:
    # The queue of its GPU covers some of the pause, and behind .item() all ranks are idle for a moment.
    paused = Job(3, steps=4, logs=True, faults=(Fault(fault, 2, 30.0),), **job)  # type: ignore[arg-type]
    _, diagnosis = simulated(tmp_path, paused)
    assert diagnosis.facts["straggler_cause"].values["2"] == "python"
    excess = diagnosis.facts["straggler_excess_ms"].values["2"]
    assert isinstance(excess, float)
    assert excess == pytest.approx(cost_ms(diagnosis, 2), rel=0.2)  # each is the median of its own


def test_what_came_before_the_first_captured_collective_is_no_lack_of_a_cause(tmp_path: Path) -> None:
    """Rank 0 pauses in the first and the last of three captured steps."""
    job = draw_job(7_300_189, "pauses")
    pauses = job.fault("pauses")
    facts = simulated(tmp_path, job, draw_capture(7_300_189, job))[1].facts
    assert pauses is not None
    assert facts["straggler_cause"].values["0"] == "python"
    assert facts["straggler_excess_ms"].values["0"] == pytest.approx(pauses.amount, rel=0.02)


BAD_CLOCKS = {
    "one rank of a host is moved": Capture({2: 5.0}, jitter_ms={2: 0.05}),
    "one rank wanders": Capture({2: 500.0}, wander={2: (1.0, 60.0)}, ranks_a_host=1),
    "all ranks wander": Capture(
        {1: -40.0, 2: 500.0}, wander={rank: (2.0, 80.0 + 17 * rank) for rank in range(4)}, ranks_a_host=1
    ),
    "all ranks jitter": Capture({1: -40.0}, jitter_ms=dict.fromkeys(range(4), 0.1), ranks_a_host=1),
}


@pytest.mark.parametrize("clocks", BAD_CLOCKS.values(), ids=BAD_CLOCKS.keys())
def test_clocks_that_cannot_be_trusted_show_the_late_rank_all_the_same(
    tmp_path: Path, clocks: Capture
) -> None:
    job = Job(3, steps=4, faults=(Fault("straggler-compute", 2, 1.4),), **DDP)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job, clocks)
    first = diagnosis.findings[0]
    assert (first.rule_id, first.ranks) == ("straggler-rank", (2,))
    assert first.gain is not None
    assert first.gain.low_ms <= truth.gain_of_fault("straggler-compute") <= first.gain.high_ms


def test_the_gain_is_as_uncertain_as_the_clocks(tmp_path: Path) -> None:
    job = Job(3, steps=4, faults=(Fault("straggler-compute", 2, 1.4),), **DDP)  # type: ignore[arg-type]

    def width_ms(name: str, capture: Capture) -> float:
        gain = simulated(tmp_path / name, job, capture)[1].findings[0].gain
        assert gain is not None
        return gain.high_ms - gain.low_ms

    assert width_ms("bad", BAD_CLOCKS["all ranks wander"]) > 2 * width_ms("good", CLOCKS)


def test_reductions_that_queue_behind_one_that_waits_are_not_late(tmp_path: Path) -> None:
    # On the early ranks the backward pass is over when rank 2 comes to the first of 12 reductions.
    job = {**DDP, "layer_mib": 200.0, "bucket_mib": 100.0}
    late = Job(4, steps=4, logs=True, faults=(Fault("straggler-host", 2, 60.0),), **job)  # type: ignore[arg-type]
    _, diagnosis = simulated(tmp_path, late)
    assert "late-gradient-reduction" not in {one.rule_id for one in diagnosis.findings}
    for rank in ("0", "2"):
        assert diagnosis.facts["late_reductions_frac"].values[rank] < 0.5  # type: ignore[operator]


@pytest.mark.parametrize(("fault", "who"), [("pauses", "one rank at times"), ("rotating", "several ranks")])
def test_who_is_late_in_some_steps_and_of_which_step_the_gain_is(
    tmp_path: Path, fault: str, who: str
) -> None:
    job = Job(10, steps=5, logs=True, faults=(Fault(fault, 1, 25.0),), **DDP)  # type: ignore[arg-type]
    truth, diagnosis = simulated(tmp_path, job)
    found = next(one for one in diagnosis.findings if one.rule_id == "rotating-straggler")
    assert ("the late rank changes" in found.message) == (who == "several ranks")
    assert diagnosis.facts["straggler_pattern"].value == who
    assert found.gain is not None
    if fault == "pauses":  # the analysed step has none
        assert diagnosis.today_ms == pytest.approx(truth.step_ms, rel=0.05)
        assert found.alone_ms == pytest.approx(found.gain.likely_ms)
        assert cost_text(found, diagnosis.today_ms).startswith("costs 11")
