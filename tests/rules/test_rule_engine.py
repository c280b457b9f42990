"""The engine: outcomes, severity and confidence, and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from tracedoc.diagnosis import Evidence, Finding, Gain, Verdict
from tracedoc.facts.catalog import NEEDS, Fact, Measurement, Scope
from tracedoc.facts.measure_run import Availability, Measurements
from tracedoc.judge.findings import Judgement, evaluate
from tracedoc.judge.rule import AtMost, Param, Rule, RuleFix, Words
from tracedoc.ranks.run_view import build_run_view
from tracedoc.values import Failed, Unknown, Value

MS = 1_000_000
HIDE = AtMost("bound_ms", "all of it hides")


def fact(name: str, unit: str, value: Value, scope: Scope = "run", **by_rank: Value) -> Measurement:
    definition = Fact(name, unit, scope, frozenset(), "run", lambda view: value)
    return Measurement(definition, value, {key.removeprefix("r"): one for key, one in by_rank.items()})


BOUND_40 = fact("bound_ms", "ms", 40.0)


def bounded(ms: Value) -> Measurement:
    return fact("bound_ms", "ms", ms)


def gain(high_ms: float) -> Gain:
    return Gain(0.0, high_ms, "ceiling", ("all of it hides",))


def measured(
    *facts: Measurement,
    step_ms: Value = 100.0,
    confidence: str = "high",
    is_cpu: bool = False,
    absent: Mapping[str, Availability] | None = None,
    ranks: tuple[int, ...] = (0, 1),
) -> Measurements:
    given = (fact("step_ms", "ms", step_ms), BOUND_40, *facts)
    table = {one.definition.name: one for one in given}
    available = {need: Availability("present") for need in NEEDS} | dict(absent or {})
    return Measurements(table, available, confidence, is_cpu, ranks, (3, 4), build_run_view((), None))


def rule(rule_id: str = "exposed", **changes: object) -> Rule:
    fields: dict[str, object] = {
        "id": rule_id,
        "title": "Exposed communication",
        "topic": "communication",
        "status": "stable",
        "since": "0.1",
        "scope": "run",
        "needs": frozenset(),
        "when": "comm_ms / step_ms > min_share",
        "message": "{comm_ms} of the {step_ms} step is exposed.",
        "why": "Overlap exists to hide it.",
        "params": {"min_share": Param(0.1, "fraction", "noise")},
        "gain": HIDE,
        "evidence": "",
    }
    return Rule(**(fields | changes))  # type: ignore[arg-type]


def judge(*rules: Rule, of: Measurements) -> Judgement:
    return evaluate(rules, of, evidence={})


def only(judgement: Judgement) -> tuple[Verdict, Finding | None]:
    (verdict,) = judgement.verdicts
    return verdict, judgement.findings[0] if judgement.findings else None


COMM_40 = fact("comm_ms", "ms", 40.0)


# -- outcomes


def test_a_condition_that_holds_is_a_finding_with_its_comparison() -> None:
    fix = RuleFix("ddp", "Hide {comm_ms}", "none", change="x = {'a': {comm_ms}}")
    verdict, finding = only(judge(rule(fixes=(fix,)), of=measured(COMM_40)))
    assert verdict.outcome == "finding"
    (comparison,) = verdict.comparisons
    assert (comparison.text, comparison.left, comparison.right, comparison.holds) == (
        "comm_ms / step_ms > min_share",
        0.4,
        0.1,
        True,
    )
    assert finding is not None
    assert finding.id == finding.rule_id == "exposed"
    assert finding.message == "40 ms of the 100 ms step is exposed."
    assert (finding.ranks, finding.steps) == ((0, 1), (3, 4))
    assert finding.gain == gain(40.0)
    assert (finding.fixes[0].title, finding.fixes[0].change) == ("Hide 40 ms", "x = {'a': 40 ms}")


def test_a_fix_with_a_condition_is_shown_only_where_it_holds() -> None:
    conditions = {"always": "", "much": "comm_ms > 20", "little": "comm_ms <= 20", "untold": "lost_ms > 0"}
    fixes = tuple(RuleFix("any", title, "none", when=when) for title, when in conditions.items())
    _, finding = only(judge(rule(fixes=fixes), of=measured(COMM_40)))
    assert finding is not None
    assert [fix.title for fix in finding.fixes] == ["always", "much"]


def test_a_fix_is_left_out_only_where_its_exception_is_known_to_hold() -> None:
    exceptions = {"has it": "comm_ms > 20", "has not": "comm_ms <= 20", "untold": "lost_ms > 0"}
    fixes = tuple(RuleFix("any", title, "none", unless=one) for title, one in exceptions.items())
    _, finding = only(judge(rule(fixes=fixes), of=measured(COMM_40)))
    assert finding is not None
    assert [fix.title for fix in finding.fixes] == ["has not", "untold"]


def test_a_condition_that_does_not_hold_passes() -> None:
    verdict, finding = only(judge(rule(), of=measured(fact("comm_ms", "ms", 5.0))))
    assert (verdict.outcome, verdict.comparisons[0].holds, finding) == ("pass", False, None)


def test_a_missing_measurement_is_unknown_with_its_reason() -> None:
    verdict, finding = only(judge(rule(), of=measured(fact("comm_ms", "ms", Unknown("no kernels")))))
    assert (verdict.outcome, verdict.reason, finding) == ("unknown", "no kernels", None)
    verdict, _ = only(judge(rule(), of=measured()))
    assert (verdict.outcome, verdict.reason) == ("unknown", "comm_ms was not measured")


@pytest.mark.parametrize(
    ("split", "said"),
    [("all", "40 ms in 100 ms."), ("none", "40 ms of nothing."), (Unknown("not seen"), "40 ms unknown.")],
)
def test_a_fact_chooses_the_words_of_the_message(split: Value, said: str) -> None:
    words = {"kind": Words("split", {"all": "in {step_ms}", "none": "of nothing"})}
    worded = rule(words=words, message="{comm_ms} {kind}.")
    _, finding = only(judge(worded, of=measured(COMM_40, fact("split", "text", split))))
    assert finding is not None
    assert finding.message == said


def test_a_fact_that_failed_is_an_error_unless_it_does_not_matter() -> None:
    failed = fact("comm_ms", "ms", Failed("error: ZeroDivisionError in comm_ms"))
    verdict, _ = only(judge(rule(), of=measured(failed)))
    assert (verdict.outcome, verdict.reason) == ("error", "error: ZeroDivisionError in comm_ms")
    verdict, _ = only(judge(rule(when="comm_ms > 0 and step_ms < 0"), of=measured(failed)))
    assert verdict.outcome == "pass"


def test_division_by_zero_is_unknown() -> None:
    verdict, _ = only(judge(rule(), of=measured(COMM_40, step_ms=0.0)))
    assert (verdict.outcome, verdict.reason) == ("unknown", "division by zero: comm_ms / step_ms")


def test_needs_absent_by_nature_and_not_captured_are_told_apart() -> None:
    one_gpu = {"multi_rank": Availability("by_nature", "one GPU")}
    no_shapes = {"shapes": Availability("not_captured", "record_shapes was off")}
    needy = rule(needs=frozenset({"multi_rank", "shapes"}))
    verdict, _ = only(judge(needy, of=measured(COMM_40, absent=no_shapes)))
    assert (verdict.outcome, verdict.reason) == ("unknown", "record_shapes was off")
    verdict, _ = only(judge(needy, of=measured(COMM_40, absent=one_gpu | no_shapes)))
    assert (verdict.outcome, verdict.reason) == ("not_applicable", "one GPU")


def test_a_condition_that_holds_is_a_finding_even_where_a_fix_gives_back_nothing() -> None:
    verdict, finding = only(judge(rule(), of=measured(COMM_40, bounded(0.0))))
    assert verdict.outcome == "finding"
    assert finding is not None
    assert finding.severity == "note"


def test_one_rule_never_stops_another() -> None:
    judgement = judge(
        rule("broken", when="lost > 0"),
        rule("unnamed", gain=AtMost("nowhere_ms", "it is measured")),
        rule("whole"),
        of=measured(COMM_40),
    )
    assert [verdict.outcome for verdict in judgement.verdicts] == ["unknown", "finding", "finding"]


# -- severity and confidence


@pytest.mark.parametrize(
    ("high_ms", "confidence", "severity"),
    [
        (15.0, "high", "critical"),
        (14.9, "high", "warning"),
        (5.0, "high", "warning"),
        (4.9, "high", "note"),
        (40.0, "medium", "warning"),
        (4.0, "medium", "note"),
        (40.0, "low", "note"),
    ],
)
def test_severity_is_the_share_given_back_capped_by_confidence(
    high_ms: float, confidence: str, severity: str
) -> None:
    of = measured(COMM_40, bounded(high_ms), confidence=confidence)
    _, finding = only(judge(rule(), of=of))
    assert finding is not None
    assert (finding.severity, finding.confidence) == (severity, confidence)


def test_a_cpu_trace_caps_time_shares_at_note_but_not_counts() -> None:
    of = measured(COMM_40, is_cpu=True)
    judgement = judge(rule("share"), rule("counted", on_cpu="as_usual"), of=of)
    assert {one.id: one.severity for one in judgement.findings} == {"share": "note", "counted": "critical"}


def test_a_guard_keeps_its_severity() -> None:
    of = measured(COMM_40, confidence="low")
    _, finding = only(judge(rule(gain=None, severity="warning"), of=of))
    assert finding is not None
    assert (finding.severity, finding.gain) == ("warning", None)


def test_an_unknown_gain_is_a_note_that_says_so() -> None:
    of = measured(COMM_40, bounded(Unknown("the host was not captured")))
    verdict, finding = only(judge(rule(), of=of))
    assert finding is not None
    assert (finding.severity, finding.gain) == ("note", None)
    assert finding.message.endswith(" What a fix would save is unknown: the host was not captured.")
    assert verdict.reason == "the gain is unknown: the host was not captured"


def test_without_a_step_time_a_gain_is_a_note() -> None:
    of = measured(COMM_40, step_ms=Unknown("no complete step was captured"))
    _, finding = only(judge(rule(when="comm_ms > 0", params={}), of=of))
    assert finding is not None
    assert finding.severity == "note"
    assert finding.gain is not None
    assert finding.gain.assumptions[-1] == "the length of a step is unknown: severity is note"
    assert finding.message == "40 ms of the unknown step is exposed."


def test_a_gain_that_is_not_finite_is_unknown() -> None:
    _, finding = only(judge(rule(), of=measured(COMM_40, bounded(float("nan")))))
    assert finding is not None
    assert finding.gain is None


def test_findings_come_from_worst_to_mildest() -> None:
    bounds = {"a": 6.0, "b": 40.0, "c": 40.0, "d": 7.0}
    of = measured(COMM_40, *(fact(f"{name}_ms", "ms", high) for name, high in bounds.items()))
    rules = [rule(name, gain=AtMost(f"{name}_ms", "it is gone")) for name in bounds]
    judgement = judge(*rules, rule("g", gain=None, severity="warning"), of=of)
    assert [one.id for one in judgement.findings] == ["b", "c", "d", "a", "g"]
    assert [one.rule_id for one in judgement.verdicts] == ["a", "b", "c", "d", "g"]


# -- ranks


def _late(**by_rank: Value) -> Measurement:
    return fact("late_ms", "ms", Unknown("by rank only"), "rank", **by_rank)


def _straggler(**changes: object) -> Rule:
    by_rank: dict[str, object] = {
        "scope": "rank",
        "when": "late_ms / step_ms > min_share",
        "message": "A rank is {late_ms} late.",
        "gain": AtMost("late_ms", "it comes in time"),
    }
    return rule("straggler-rank", **(by_rank | changes))


def test_a_rank_rule_is_judged_for_each_rank_and_told_once() -> None:
    of = measured(_late(r0=1.0, r1=20.0, r2=30.0, r3=15.0, r10=2.0))
    places = (Evidence(2, 3, 0, 5 * MS, "late"),)
    judgement = evaluate(
        [_straggler(evidence="late")], of, evidence={"late": lambda m, key: places if key == "2" else ()}
    )
    verdict, finding = only(judgement)
    assert [(one.key, one.outcome) for one in verdict.instances] == [
        ("0", "pass"),
        ("1", "finding"),
        ("2", "finding"),
        ("3", "finding"),
        ("10", "pass"),
    ]
    assert finding is not None
    assert finding.id == "straggler-rank/ranks-1-3"
    assert finding.message == "A rank is 30 ms late (rank 2, the worst of ranks 1-3)."
    assert (finding.ranks, finding.steps) == ((1, 2, 3), (3,))
    assert finding.gain == replace(gain(30.0), assumptions=("it comes in time",))
    assert finding.evidence == places
    assert (verdict.comparisons[0].left, verdict.compared) == (0.3, "2")


def test_a_rank_rule_that_passes_says_whose_numbers_it_shows() -> None:
    verdict, _ = only(judge(_straggler(), of=measured(_late(r0=1.0, r1=2.0))))
    assert (verdict.outcome, verdict.comparisons[0].left, verdict.compared) == ("pass", 0.01, "0")


def test_a_finding_on_every_rank_has_the_rules_id() -> None:
    judgement = judge(_straggler(), of=measured(_late(r0=20.0, r1=20.0)))
    assert [one.id for one in judgement.findings] == ["straggler-rank"]
    assert judgement.findings[0].message == "A rank is 20 ms late (rank 0, the worst of ranks 0, 1)."


def test_a_rank_that_cannot_be_judged_keeps_the_others_from_passing() -> None:
    verdict, _ = only(judge(_straggler(), of=measured(_late(r0=1.0, r1=Unknown("rank 1 is cut off")))))
    assert (verdict.outcome, verdict.reason) == ("unknown", "rank 1 is cut off")
    verdict, finding = only(judge(_straggler(), of=measured(_late(r0=30.0, r1=Unknown("cut off")))))
    assert verdict.outcome == "finding"
    assert finding is not None
    assert finding.ranks == (0,)


def test_different_reasons_name_their_ranks() -> None:
    of = measured(_late(r0=Unknown("cut off"), r1=Unknown("no steps"), r2=Unknown("cut off")))
    verdict, _ = only(judge(_straggler(), of=of))
    assert verdict.reason == "ranks 0, 2: cut off; rank 1: no steps"


def test_a_rank_rule_without_ranks_is_unknown() -> None:
    verdict, _ = only(judge(_straggler(), of=measured(_late())))
    assert (verdict.outcome, verdict.reason) == ("unknown", "by rank only")


def test_the_id_of_many_scattered_ranks_stays_short() -> None:
    by_rank = {f"r{rank}": 30.0 if rank % 2 else 0.0 for rank in range(200)}
    (finding,) = judge(_straggler(), of=measured(_late(**by_rank))).findings
    assert len(finding.id) < 60
    assert finding.id.startswith("straggler-rank/ranks-")
