"""What every report shows: its order, its words, and what redaction hides."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.example_diagnoses import cpu, healthy, hostile, sharded
from tracedoc.diagnosis import Comparison, Evidence, FactRecord, Fix, Gain, Instance, Verdict
from tracedoc.errors import Limit
from tracedoc.ledger import Ledger, LedgerCause, Range
from tracedoc.predicted import Predicted
from tracedoc.report.texts import redacted
from tracedoc.report.view import EVIDENCE_SHOWN, build_view, holds_text, instances_text
from tracedoc.report.words import gain_text, predicted_words


def test_segments_add_up_to_the_step():
    view = build_view(sharded())
    assert [(part.key, part.ms) for part in view.segments] == [
        ("compute", 250.0),
        ("transfer", 40.0),
        ("wait", 90.0),
        ("copy", 2.0),
        ("idle", 18.0),
    ]
    assert sum(part.share for part in view.segments) == pytest.approx(1.0)


def test_unsplit_communication_names_both_readings():
    assert build_view(cpu()).segments[1].label == "communication (transfer or waiting)"


def test_without_a_ledger_the_worst_finding_comes_first_whatever_the_order():
    diagnosis = sharded()
    found = build_view(replace(diagnosis, ledger=None, findings=diagnosis.findings[::-1])).findings
    assert [(item.number, item.finding.rule_id) for item in found] == [
        (1, "straggler-rank"),
        (2, "exposed-communication"),
    ]


@pytest.mark.parametrize(
    ("strategy", "best"),
    [
        ("fsdp2", "fsdp2"),
        ("FSDP2", "fsdp2"),
        ("ddp", "ddp"),
        ("deepspeed-zero3", "deepspeed"),
        ("unknown", "any"),
    ],
)
def test_fix_for_the_framework_of_the_run_comes_first(strategy: str, best: str):
    fixes = tuple(Fix(name, "", "", "") for name in ("megatron", "any", "deepspeed", "ddp", "fsdp2"))
    diagnosis = sharded()
    run = replace(diagnosis.run, strategy=replace(diagnosis.run.strategy, name=strategy))
    finding = replace(diagnosis.findings[0], fixes=fixes)
    view = build_view(replace(diagnosis, run=run, findings=(finding,)))
    assert view.findings[0].fixes[0].framework == best


def test_fixes_of_other_frameworks_are_left_out_of_a_known_job() -> None:
    diagnosis = sharded()
    finding = replace(diagnosis.findings[0], fixes=(Fix("ddp", "no_sync", "", ""),))
    strategy = replace(diagnosis.run.strategy, name="ZeRO-2", family="zero-2")
    known = replace(diagnosis, findings=(finding,), run=replace(diagnosis.run, strategy=strategy))
    assert build_view(known).findings[0].fixes == ()
    strategy = replace(strategy, name="unknown", family="unknown")
    unknown = replace(known, run=replace(known.run, strategy=strategy))
    assert len(build_view(unknown).findings[0].fixes) == 1


def test_fix_for_the_trainer_around_the_wrapper_comes_first():
    diagnosis = sharded()
    fixes = tuple(Fix(name, "", "", "") for name in ("any", "ddp", "accelerate", "trainer", "lightning"))
    strategy = replace(diagnosis.run.strategy, name="DDP")
    run = replace(diagnosis.run, strategy=strategy, frameworks=("DDP", "Trainer", "Accelerate"))
    finding = replace(diagnosis.findings[0], fixes=fixes)
    view = build_view(replace(diagnosis, run=run, findings=(finding,)))
    assert [fix.framework for fix in view.findings[0].fixes][:2] == ["trainer", "ddp"]


def test_gain_is_a_bound_unless_a_low_end_is_known():
    assert gain_text(Gain(0.0, 31.0, "ceiling")) == "saves up to 31 ms a step"
    assert gain_text(Gain(19.68, 19.71, "ceiling")) == "saves about 19.7 ms a step"
    assert gain_text(Gain(0.05, 0.09, "ceiling")) == "saves 50 to 90 us a step"
    assert gain_text(Gain(0.05, 9.0, "ceiling")) == "saves 50 us to 9 ms a step"
    assert gain_text(None) == ""


def test_a_gain_that_was_played_reads_as_a_change_of_the_step():
    assert gain_text(Gain(10.0, 90.0, "replay", (), 30.0), 100.0) == "100 -> about 70 ms (10 to 90)"
    assert gain_text(Gain(9.0, 50.0, "ledger", (), 40.0), 100.0) == "100 -> about 60 ms (50 to 91) without it"
    assert gain_text(Gain(0.0, 9.0, "ledger", (), 0.9), 100.0) == "saves nothing alone"


@pytest.mark.parametrize(
    ("gain_ms", "after_plan_ms", "words"),
    [
        (30.0, None, "100 -> about 70 ms, then mostly compute"),
        (0.0, None, "saves nothing alone: compute sets the pace"),
        (0.0, (40.0, 50.0, 60.0), "100 -> about 50 ms (40 to 60) with the plan; alone it saves nothing"),
    ],
)
def test_a_fix_is_told_with_its_step_and_what_most_of_that_is(
    gain_ms: float, after_plan_ms: Range | None, words: str
) -> None:
    left = 100.0 - gain_ms
    predicted = Predicted("no-sync", (left,) * 3, (gain_ms,) * 3, "compute", "high")
    assert predicted_words(predicted, after_plan_ms) == words


def test_control_characters_and_direction_marks_are_written_out():
    summary = build_view(hostile()).diagnosis.summary
    assert "\\x1b[31m\\x00\\u202egnp.exe" in summary
    assert not {"\x1b", "\x00", "\u202e"} & set(summary)


def test_redaction_numbers_hosts_and_shortens_absolute_paths():
    diagnosis = redacted(sharded())
    assert [rank.host for rank in diagnosis.ranks] == ["host-1"] * 3 + ["host-2"] * 4
    assert diagnosis.run.sources[0] == "rank-0.json.gz"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/home/anna/runs/a.json ends early", "a.json ends early"),
        ("(see /srv/x/b.json)", "(see b.json)"),
        ("file:///home/anna/a.json", "a.json"),
        ("~/runs/a.json", "a.json"),
        (r"C:\Users\anna\a.json ends", "a.json ends"),
        (r"\\server\share\a.json", "a.json"),
        ("runs/a.json stays", "runs/a.json stays"),
        ("../runs/a.json stays", "../runs/a.json stays"),
        ("400 ms/step at 52 GB/s, a / b", "400 ms/step at 52 GB/s, a / b"),
        ("https://docs.pytorch.org/docs/stable", "https://docs.pytorch.org/docs/stable"),
        ("<b>bold</b>", "<b>bold</b>"),
        ("gpu-node-a is late", "host-1 is late"),
        ("gpu-node-a2 is another", "gpu-node-a2 is another"),
    ],
)
def test_redaction_of_text(text: str, hidden: str):
    diagnosis = replace(sharded(), limits=(Limit("code", text),))
    assert redacted(diagnosis).limits[0].message == hidden


def test_sources_with_blanks_are_shortened_in_text_too():
    diagnosis = healthy()
    file = "/data/my runs/rank 0.json"
    run = replace(diagnosis.run, sources=(file,))
    shown = redacted(replace(diagnosis, run=run, summary=f"{file}: 100 ms/step."))
    assert shown.summary == "rank 0.json: 100 ms/step."


def test_redaction_leaves_rules_and_conditions_alone():
    before, after = sharded(), redacted(sharded())
    assert after.verdicts == before.verdicts
    assert after.findings == before.findings
    assert list(after.facts) == list(before.facts)


def test_limits_that_many_ranks_share_are_counted():
    limits = tuple(Limit("truncated-trace", f"rank {rank} ends early", "x") for rank in range(64))
    view = build_view(replace(sharded(), limits=(*limits, Limit("cpu-trace", "no GPU"))))
    assert [limit.text for limit in view.limits] == [
        "rank 0 ends early; x",
        "rank 1 ends early; x",
        "rank 2 ends early; x",
        "61 more of this kind",
        "no GPU",
    ]


def test_guard_and_limit_of_one_name_are_told_once():
    diagnosis = sharded()
    guard = replace(
        diagnosis.findings[0], rule_id="missing-ranks", topic="capture", severity="note", gain=None
    )
    view = build_view(replace(diagnosis, findings=(guard,), limits=(Limit("missing-ranks", "rank 3", "x"),)))
    assert view.findings == ()
    (limit,) = view.limits
    assert (limit.code, limit.text, limit.severity) == ("missing-ranks", "rank 3; x", "")
    assert limit.fix in guard.fixes


def test_a_guard_and_the_limit_that_it_names_are_one():
    diagnosis = sharded()
    named = {"rule_id": "few-steps", "limit": "no-complete-step", "topic": "capture", "gain": None}
    guard = replace(diagnosis.findings[1], **named)
    limits = (Limit("no-complete-step", "cut off", "x"),)
    (limit,) = build_view(replace(diagnosis, findings=(guard,), limits=limits)).limits
    assert (limit.code, limit.text, limit.severity) == ("no-complete-step", "cut off; x", "warning")


def test_guard_without_a_limit_stands_among_the_limits_with_its_severity():
    diagnosis = sharded()
    guard = replace(diagnosis.findings[1], rule_id="few-steps", topic="capture", gain=None)
    view = build_view(replace(diagnosis, findings=(guard,), limits=()))
    (limit,) = view.limits
    assert (limit.code, limit.severity) == ("few-steps", "warning")
    assert limit.text == guard.message.removesuffix(".")


def test_instances_are_grouped_by_outcome():
    verdict = Verdict(
        "x", "finding", instances=tuple(Instance(str(n), "pass" if n == 3 else "finding") for n in range(5))
    )
    assert instances_text(verdict) == "finding: ranks 0-2, 4; pass: rank 3"
    assert instances_text(Verdict("x", "pass")) == ""


def test_comparisons_of_a_rank_rule_name_the_rank_where_there_are_several():
    comparison = Comparison("late_ms > 1", 0.5, 1.0, False)
    one, two = Instance("2", "pass"), Instance("3", "pass")
    assert holds_text(comparison, Verdict("x", "pass", (comparison,))) == "does not hold"
    alone = Verdict("x", "pass", (comparison,), instances=(one,), compared="2")
    assert holds_text(comparison, alone) == "does not hold"
    several = replace(alone, instances=(one, two))
    assert holds_text(comparison, several) == "does not hold on rank 2"
    assert holds_text(replace(comparison, holds=True), several) == "holds on rank 2"


def test_rules_are_counted_that_no_finding_and_no_limit_shows():
    diagnosis = sharded()
    guard = replace(diagnosis.findings[1], rule_id="few-steps", topic="capture", gain=None)
    verdicts = (
        Verdict("few-steps", "finding"),
        Verdict("tiny-batch", "pass"),
        Verdict("gc-pauses", "unknown"),
    )
    view = build_view(replace(diagnosis, findings=(guard,), verdicts=verdicts, limits=()))
    assert (len(view.findings), len(view.limits)) == (0, 1)
    assert view.outcomes == "3 rules: 1 passed, 1 not judged from this trace"


def test_longest_places_are_shown_in_order_of_time():
    places = tuple(Evidence(0, 1, 100 * i, 100 * i + i, "gap") for i in range(20))
    diagnosis = sharded()
    finding = replace(diagnosis.findings[0], evidence=places)
    shown = build_view(replace(diagnosis, findings=(finding,))).findings[0].evidence
    assert shown == places[-EVIDENCE_SHOWN:]


@pytest.mark.parametrize(
    ("copy_ms", "host_ms", "note"),
    [
        (10.0, 4.0, "4 ms between host and device, the rest within it"),
        (10.0, 0.1, "within the device"),
        (10.0, 10.0, "between host and device"),
        (1.0, 0.5, ""),
    ],
)
def test_exposed_copies_say_where_they_run(copy_ms: float, host_ms: float, note: str):
    diagnosis = sharded()
    assert diagnosis.budget is not None
    budget = replace(diagnosis.budget, step_ms=100.0, exposed_copy_ms=copy_ms)
    facts = {"exposed_host_copy_ms": FactRecord("ms", "rank", host_ms)}
    parts = build_view(replace(diagnosis, budget=budget, facts=facts)).segments
    assert [part.note for part in parts if part.key == "copy"] == [note]


def test_idle_causes_below_two_percent_are_left_out():
    diagnosis = cpu()
    assert diagnosis.budget is not None
    budget = replace(diagnosis.budget, idle_ms=10.0, idle_causes_ms={"sync": 9.9, "input": 0.1})
    assert (
        build_view(replace(diagnosis, budget=budget)).segments[-1].note == "the host blocks on the GPU 9.9 ms"
    )


def test_a_fix_of_one_name_in_several_frameworks_is_shown_for_each() -> None:
    """As larger buckets: for DDP, whose job it is, and in the words of trainers beside it."""
    diagnosis = sharded()
    names = ("fsdp2", "ddp", "lightning")
    fixes = tuple(Fix(name, "Fewer, larger buckets", "", "") for name in names)
    run = replace(diagnosis.run, strategy=replace(diagnosis.run.strategy, name="ddp", family="ddp"))
    finding = replace(diagnosis.findings[0], fixes=fixes)
    (shown,) = build_view(replace(diagnosis, run=run, findings=(finding,))).findings
    assert [fix.framework for fix in shown.fixes] == ["ddp"]
    assert [fix.framework for fix in shown.foreign] == ["fsdp2", "lightning"]


def test_what_the_profiler_makes_longer_is_told_of_the_host_only() -> None:
    diagnosis = sharded()
    host, other = (one.rule_id for one in diagnosis.findings[:2])
    causes = (
        LedgerCause("host.launch", 30.0, (30.0,) * 3, 30.0, told_by=(host,)),
        LedgerCause("link.transfer", 20.0, (20.0,) * 3, 20.0, told_by=(other,)),
    )
    profiled = replace(
        diagnosis,
        ledger=Ledger(400.0, 350.0, causes=causes),
        limits=(Limit("host-profiled", "no step is timed without it"),),
    )
    places = {one.finding.rule_id: one.place for one in build_view(profiled).findings}
    assert "perhaps less without the profiler" in places[host]
    assert "profiler" not in places[other]
    assert "profiler" not in build_view(replace(profiled, limits=())).findings[0].place
