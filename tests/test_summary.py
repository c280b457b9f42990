"""The answer in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import sharded
from tests.known_runs import diagnosis_of
from tests.rules.concluding import finding, fix, measured
from tracedoc.diagnosis import Diagnosis, Fix, Gain
from tracedoc.judge.first_line import _step_then, outcome
from tracedoc.judge.replayed import is_worth_it
from tracedoc.judge.without_warning import cost_words, healthy
from tracedoc.ledger import Ledger, LedgerCause
from tracedoc.pipeline import Options, diagnose, measure
from tracedoc.predicted import PlanStep, Predicted
from tracedoc.report.words import gain_text
from tracedoc.testing.cases import write_job
from tracedoc.testing.lanes import parse_lanes

MS = 1_000_000


def lanes(tmp_path: Path, text: str, *, ranks: int, keep: int | None = None, steps: int = 5) -> Diagnosis:
    for builder in parse_lanes(text, ranks=ranks, steps=steps)[:keep]:
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    return diagnose([tmp_path], Options(replay=False))


def test_what_takes_no_time_has_no_answer(tmp_path: Path) -> None:
    memset = '{"ph": "X", "cat": "gpu_memset", "name": "Memset", "pid": 0, "tid": 7, "ts": 5, "dur": 0}'
    (tmp_path / "rank-0.json").write_text(f'{{"traceEvents": [{memset}]}}')
    assert diagnose([tmp_path]).summary == "No answer: what was recorded takes no time."


def test_a_healthy_run_is_compute_bound(tmp_path: Path) -> None:
    found = lanes(tmp_path, "compute 0-97\nallreduce 40-100 64MiB\nstep: 100", ranks=2)
    assert found.summary == (
        "Compute-bound: the GPUs are busy for 97 % of the 100 ms step, and communication is hidden "
        "(at most 3 % to gain)."
    )
    assert found.findings == ()


@pytest.mark.parametrize(("compute_ms", "bound"), [(80, True), (79, False)])
def test_compute_bound_begins_at_four_fifths(compute_ms: int, bound: bool, tmp_path: Path) -> None:
    # The rest is spread over gaps in which work is queued: no rule has anything to say.
    found = lanes(tmp_path, f"lead: 50\ncompute 0-{compute_ms}\nstep: 100", ranks=1)
    assert (f"Compute-bound: {compute_ms} %" in found.summary) == bound
    assert (f"Compute fills {compute_ms} % of the 100 ms step; no cause" in found.summary) == (not bound)


def test_the_largest_cause_comes_first_with_its_bound(tmp_path: Path) -> None:
    found = lanes(tmp_path, "compute 0-60\nallreduce 60-100 14336MiB", ranks=2)
    assert found.summary == (
        "Exposed communication (up to 40 ms of the 100 ms step): no compute runs beside it; the link reaches "
        "376 GB/s, 105 % of the 359 GB/s expected. Double the micro-batch (100 ms -> 60 ms at best)."
    )


@pytest.mark.parametrize(
    ("title", "says", "line"),
    [
        ("Slow: the GPU waits", "", "Slow (up to 40 ms of the 100 ms step): the GPU waits. "),
        ("Slow", "", "Slow (up to 40 ms of the 100 ms step). "),
        (
            "Slow: the GPU waits",
            "{kernels_per_step} times",
            "Slow (up to 40 ms of the 100 ms step): 1 times. ",
        ),
    ],
)
def test_a_rule_says_its_own_clause(title: str, says: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "own.yaml").write_text(
        f"{{id: own, title: '{title}', topic: communication, status: stable, since: '1.0', scope: run, "
        "needs: [kernels, collectives], when: exposed_comm_excluding_wait_ms > 0, "
        "message: Much., why: Physics., "
        + (f"says: '{says}', " if says else "")
        + "gain: {at_most: exposed_comm_ms, assuming: all of it hides}}"
    )
    for builder in parse_lanes("compute 0-60\nallreduce 60-100 14336MiB", ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    chosen = Options(rule_directories=(str(tmp_path / "pack"),), select=("own",))
    assert diagnose([tmp_path], chosen).summary == f"{line}Without it: 100 ms -> 60 ms at best."


def test_with_few_rules_nothing_is_called_healthy(tmp_path: Path) -> None:
    """Of all rules one looks, and finds nothing; what the others would find is open."""
    for builder in parse_lanes("compute 0-60\nallreduce 60-100 14336MiB", ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = diagnose([tmp_path], Options(select=("input-stall",)))
    total = 1 + found.rules_left_out
    assert found.summary == f"1 of {total} rules judged: no finding in the 100 ms step."


def test_a_step_that_was_cut_is_said_to_be_incomplete(tmp_path: Path) -> None:
    builder = parse_lanes("compute 0-60\nallreduce 60-100 64MiB", ranks=2, steps=1)[0]
    path = tmp_path / "rank-0.json"
    builder.write(path)
    only_step = path.read_text().replace("ProfilerStep#", "Step ")
    path.write_text(only_step)
    summary = diagnose([path]).summary
    assert summary.endswith("(Low confidence: no complete step was captured.)")


def test_a_preview_rule_is_named_like_others(tmp_path: Path) -> None:
    found = lanes(tmp_path, "lead: 0.01\nhost 62-99 name=aten::sort\ncompute 0-60 x100\nstep: 100", ranks=1)
    assert [one.rule_id for one in found.findings] == ["host-away"]
    assert found.summary == (
        "Long host gaps (up to 40 ms of the 100 ms step): 1 long gap a step in which the host launches "
        "nothing, above all in aten::sort (between two steps). Compute on the GPU what an operator computes "
        "on the CPU (100 ms -> 60 ms at best)."
    )


def test_a_step_of_one_thing_is_not_said_to_vanish(tmp_path: Path) -> None:
    found = lanes(tmp_path, "allreduce 0-100 64MiB", ranks=2, keep=1)
    assert found.summary.startswith(
        "1 of 2 ranks captured; compute fills 0 % of the 101 ms step, exposed communication 99 %; no cause is"
    )


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Gain(0.0, 5.0, "ceiling"), "up to 5 ms"),
        (Gain(0.0, 5.0, "replay", likely_ms=3.0), "about 3 ms"),
    ],
)
def test_only_a_bound_is_the_most(gain: Gain, words: str, tmp_path: Path) -> None:
    finding = lanes(tmp_path, "allreduce 0-100 64MiB", ranks=2, keep=1).findings[0]
    assert cost_words(replace(finding, gain=gain, cost_ms=None)) == words


def test_nothing_to_judge_is_no_idle_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mtia.json"
    path.write_text(
        '{"deviceProperties": [], "traceEvents": ['
        '{"ph": "X", "cat": "mtia_ccp_events", "name": "matmul", "pid": 0, "tid": 1, "ts": 10, "dur": 5},'
        '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 1, "dur": 50}]}'
    )
    found = diagnose([path])
    assert found.budget is None
    assert found.summary.startswith("No answer: ")
    assert "idle" not in found.summary
    assert found.findings == ()
    assert [limit.code for limit in found.limits] == ["unknown-device"]
    # Kernels and launches are missing for the same reason, which is told once.
    assert [verdict.reason for verdict in found.verdicts if verdict.rule_id == "tiny-kernels"] == [
        "no GPU activity was captured"
    ]


def test_a_cpu_trace_tells_what_preview_rules_find(tmp_path: Path) -> None:
    """Nothing is wrong in the steps, but every third step of the whole run takes twice as long."""
    for builder in parse_lanes("compute 0-100", ranks=1, device=None):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    write_job(tmp_path, [0], {}, "100 x2 200 " * 20)
    found = diagnose([tmp_path])
    # 55 steps count, 19 of them from the sixth on take 100 ms longer.
    assert [one.severity for one in found.findings if one.rule_id == "step-outliers"] == ["critical"]
    assert found.summary == (
        "Slow steps (up to 34.5 ms of 135 ms a step): a step takes 100 ms longer than the usual 100 ms every "
        "3 steps (the first is step 6); no captured step stands out. See what the loop does in those steps "
        "(135 ms -> 100 ms at best)."
    )


def test_a_cpu_step_that_compiles_for_most_of_it_says_so(tmp_path: Path) -> None:
    """70 ms of each 100 ms are compilation, with the operators that it traces; 20 ms are computed."""
    lanes = "step: 100\nhost 0-70 name=dynamo\nhost 10-60 name=aten::mm\ncompute 75-95 x20"
    for builder in parse_lanes(lanes, ranks=1, device=None):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = diagnose([tmp_path])
    assert found.budget is not None
    assert (found.budget.compute_ms, found.budget.idle_ms) == (20, 80)
    assert found.summary == (
        "Recompilation (70 ms of the 100 ms step): torch.compile compiles again in warm steps. Find out what "
        "changes (100 ms -> 30 ms at best)."
    )


def test_what_slow_steps_of_the_whole_run_cost_is_no_part_of_the_captured_step(tmp_path: Path) -> None:
    """Every tenth of 45 logged steps takes 1700 ms: 178 of a mean of 278, more than a captured one of 70."""
    for builder in parse_lanes("compute 0-60\nallreduce 60-70", ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    write_job(tmp_path, range(2), {}, "100 x9 1700 " * 5)
    found = diagnose([tmp_path])
    (slow,) = [one for one in found.findings if one.rule_id == "step-outliers"]
    assert slow.gain is not None
    assert slow.gain.mean_step_ms == pytest.approx((40 * 100 + 5 * 1700) / 45)
    assert slow.gain.high_ms == pytest.approx(5 * 1600 / 45)
    assert found.summary.endswith("See what the loop does in those steps (278 ms -> 100 ms at best).")
    assert found.summary.startswith("Slow steps (up to 178 ms of 278 ms a step): ")
    assert "of the mean step of 278 ms" in gain_text(slow.gain)


def test_slow_steps_behind_another_cause_are_a_share_of_their_own_mean_step(tmp_path: Path) -> None:
    """Rank 0 is 40 ms late in captured steps of 70; every tenth logged one takes 200 ms more than 100."""
    for builder in parse_lanes(
        "compute 0-60\nallreduce 60-70\nrank 1:\n  compute 0-20\n  allreduce 20-70", ranks=2
    ):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    write_job(tmp_path, range(2), {}, "100 x9 300 " * 5)
    summary = diagnose([tmp_path]).summary
    assert summary.startswith("Straggler (40 ms of the 70 ms step): ")
    assert "Slow steps (up to 18 % of a step): " in summary


PIPELINE = """
    step: 100
    lead: 10
    compute    0-15 80-100  x10
    send       15-16  16MiB  peer=1
    recv       16-80  16MiB  peer=1
    rank 1:
      compute    16-79 80-100  x10
      recv       0-16   16MiB  peer=0
      send       79-80  16MiB  peer=0
"""


def test_with_one_micro_batch_equal_stages_gain_nothing(tmp_path: Path) -> None:
    """Rank 1 computes 83 ms and rank 0 35, one after the other: as long if both had 59 ms."""
    for builder in parse_lanes(PIPELINE, ranks=2):
        builder.write(tmp_path / f"rank-{builder.rank}.json")
    found = diagnose([tmp_path])
    assert found.ledger is not None
    assert "pipeline.imbalance" not in {one.id for one in found.ledger.causes if one.alone_ms[2] > 0}
    assert {one.severity for one in found.findings} == {"note"}


def test_no_cause_is_named_over_a_gap_in_which_launched_work_did_not_run(tmp_path: Path) -> None:
    # Launched 60 ms ahead, the kernel at 90 does not start at 40: what ran in between is not in the trace.
    found = lanes(tmp_path, "lead: 60\nstep: 100\ncompute  0-40  90-100", ranks=1)
    assert found.summary == (
        "No diagnosis: for 50 % of the step work was queued and nothing ran; the capture shows no reason."
    )


@pytest.mark.parametrize(
    ("after_ms", "batch_ms", "worth"),
    [
        (90.0, None, False),  # 10 ms, where the first finding gives 50 at most
        (50.0, None, True),
        (90.0, 20.0, True),  # half of what a larger batch does
        (90.1, 20.0, False),
    ],
)
def test_a_plan_without_the_first_finding_stands_where_it_saves_as_much(
    after_ms: float, batch_ms: float | None, worth: bool
) -> None:
    run = sharded().run
    first = replace(sharded().findings[0], fixes=(), gain=Gain(0.0, 50.0, "ceiling", ()))
    if batch_ms is not None:
        left = 100.0 - batch_ms
        played = Predicted("double-batch", (left,) * 3, (batch_ms,) * 3, "compute", "high")
        batch = Fix("any", "Double the micro-batch", "", "none", replays="double-batch", predicted=played)
        first = replace(first, fixes=(batch,))
    plan = (PlanStep("other/0", "Do less", "", (after_ms,) * 3, (100 - after_ms,) * 3, "", 100.0),)
    assert is_worth_it(plan, [first], run) is worth
    mine = (replace(plan[0], fix=f"{first.id}/0"),)
    assert is_worth_it(mine, [first], run)


@pytest.mark.parametrize(
    ("share_ms", "said"),
    [
        (4.9, "CPU run: nothing found to change in the 100 ms step."),
        (
            5.0,
            "CPU run (times are indicative): at most 5 % of the step could go."
            " CPU contention: 5 ms of the 100 ms",
        ),
    ],
)
def test_a_note_of_a_cpu_run_is_named_by_what_its_cause_costs(
    sample_traces: Path, share_ms: float, said: str
) -> None:
    """Of a step of 100 ms; the rule's own bound does not count."""
    measurements = measure([sample_traces / "cpu_ddp_straggler"]).measurements
    diagnosis = diagnosis_of(sample_traces / "cpu_ddp_straggler")
    note = replace(diagnosis.findings[0], title="CPU contention: threads wait", topic="host", severity="note")
    note = replace(
        note, gain=Gain(0.0, 50.0, "ceiling"), cost_ms=share_ms, alone_ms=None, beyond_ms=None, fixes=()
    )
    cause = LedgerCause("link.slow", share_ms, (0.0, 0.0, 0.0), share_ms, told_by=(note.rule_id,))
    ledger = Ledger(100.0, 100.0 - share_ms, 0.0, (cause,))
    words = healthy(measurements, [note], diagnosis.run, 100.0, ledger)
    assert words.startswith(said)


def test_a_step_behind_others_has_the_unit_of_todays() -> None:
    assert _step_then((1500.0, 1680.0, 1900.0), 2250.0) == "about 1.7 s (1.5 to 1.9)"
    assert _step_then((500.0, 680.0, 900.0), 990.0) == "about 680 ms (500 to 900)"


@pytest.mark.parametrize(
    ("batch_ms", "also"),
    [(30.0, "; or double the micro-batch: about 70 ms for the same samples"), (10.5, "")],
)
def test_a_small_batch_is_the_alternative_to_what_costs_most(batch_ms: float, also: str) -> None:
    """The first finding's fix saves 10 ms of 100; twice the batch is named where it saves 1 % more."""
    first = finding("syncs", 12.0, fix("Read values rarely", (10.0,) * 3), severity="warning")
    double = fix("Double the micro-batch", (batch_ms,) * 3, replays="double-batch")
    small = finding("batch", batch_ms, double)
    said = outcome(
        measured(), [first, small], [first], (), run=sharded().run, ledger=None, step=100.0, small_batch=small
    )
    assert said == f"Read values rarely: 100 -> about 90 ms{also}."
