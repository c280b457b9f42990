"""A finding that yielded comes back where those it yielded to save far less than it does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from tests.rules.test_rule_engine import COMM_40, _places, measured, rule
from tests.simulated.draws import draw_capture, draw_job
from tests.simulated.traces import write_traces
from tests.simulated.truth import Truth
from tracedoc.diagnosis import Finding, Gain
from tracedoc.judge.findings import Judgement, evaluate
from tracedoc.judge.listing import with_restored_findings
from tracedoc.pipeline import Options, diagnose


def judged(**gains_ms: float | None) -> Judgement:
    """Judge a broad rule that yields to two sharper ones over the same time, with these bounds."""
    names = tuple(gains_ms)
    rules = [
        rule(name, evidence=name, gain=name if ms is not None else "", severity="" if ms else "note")
        for name, ms in gains_ms.items()
    ]
    rules[0] = replace(rules[0], yields_to=names[1:])
    found = {name: (lambda m, key, ms=ms or 0.0: Gain(0.0, ms, "ceiling")) for name, ms in gains_ms.items()}
    places = {name: (lambda m, key: _places((0, 40))) for name in names}
    return evaluate(rules, measured(COMM_40), gains=found, evidence=places)


def outcomes(judgement: Judgement) -> Mapping[str, str]:
    return {verdict.rule_id: verdict.outcome for verdict in judgement.verdicts}


def replayed(finding: Finding) -> Finding:
    """Return a finding whose replay gives all of its bound."""
    assert finding.gain is not None
    return replace(finding, gain=replace(finding.gain, basis="replay", likely_ms=finding.gain.high_ms))


def test_what_saves_far_more_than_the_sharper_finding_comes_back() -> None:
    found = with_restored_findings(judged(broad=28.0, sharp=3.0), replayed)
    assert outcomes(found) == {"broad": "finding", "sharp": "finding"}
    assert [one.id for one in found.findings] == ["broad", "sharp"]
    assert "broad" in found.times


def test_a_bound_comes_back_beside_less_than_a_tenth_of_it() -> None:
    for sharp, outcome in ((3.0, "yielded"), (2.0, "finding")):
        found = with_restored_findings(judged(broad=28.0, sharp=sharp), lambda one: one)
        assert outcomes(found)["broad"] == outcome


def test_a_third_is_enough_to_speak_for_it() -> None:
    found = with_restored_findings(judged(broad=28.0, sharp=10.0), replayed)
    assert outcomes(found) == {"broad": "yielded", "sharp": "finding"}


def test_of_several_sharper_findings_the_largest_counts() -> None:
    found = with_restored_findings(judged(broad=28.0, small=1.0, sharp=10.0), replayed)
    assert outcomes(found)["broad"] == "yielded"


def test_what_its_own_replay_makes_small_stays_away() -> None:
    found = with_restored_findings(
        judged(broad=28.0, sharp=3.0), lambda one: replace(one, gain=Gain(4.0, 6.0, "replay", (), 5.0))
    )
    assert outcomes(found)["broad"] == "yielded"


def test_a_sharper_finding_whose_gain_is_not_known_speaks_for_it() -> None:
    found = with_restored_findings(judged(broad=28.0, sharp=None), replayed)
    assert outcomes(found)["broad"] == "yielded"


def test_a_slow_link_is_told_beside_buckets_that_save_nothing(tmp_path: Path) -> None:
    """Eight ranks on a slow link: small buckets point at all exposed time, and larger ones save nothing."""
    job = draw_job(7_300_171, "straggler-host")
    write_traces(Truth(job).played, job.ranks, tmp_path, draw_capture(7_300_171, job))
    diagnosis = diagnose([tmp_path], Options(jobs=1))
    (exposed,) = [one for one in diagnosis.findings if one.rule_id == "exposed-communication"]
    assert exposed.gain is not None
    assert exposed.gain.size_ms > 20
