"""A finding gains what its first fix does; the plan takes fixes in the order in which they pay."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import tracedoc
from tests.known_runs import diagnosis_of
from tracedoc.diagnosis import Diagnosis
from tracedoc.errors import RuleError
from tracedoc.judge.load import load_rules
from tracedoc.pipeline import Options
from tracedoc.play.run_replay import Refusal
from tracedoc.whatif import ledger, predictions


@pytest.fixture(scope="module")
def stalled(sample_traces: Path) -> Diagnosis:
    return diagnosis_of(sample_traces / "synthetic_zero3_gather_stall")


def test_each_fix_is_predicted_with_its_range(stalled: Diagnosis):
    (finding,) = [one for one in stalled.findings if one.rule_id == "sharded-gather-stall"]
    found = [fix.predicted for fix in finding.fixes if fix.predicted is not None]
    assert found
    for one in found:
        low, likely, high = one.step_ms
        assert low <= likely <= high
        assert one.gain_ms[1] == pytest.approx(124.7 - likely, abs=0.1)


def test_a_finding_gains_what_the_fix_that_stands_first_does(stalled: Diagnosis):
    """At most what its causes cost. One block ahead, in words of FSDP1, gives as much."""
    (finding,) = [one for one in stalled.findings if one.rule_id == "sharded-gather-stall"]
    first, *others = [fix for fix in finding.fixes if fix.predicted is not None]
    assert (first.framework, first.title) == ("deepspeed", "Gather two blocks ahead, beside compute")
    assert first.predicted is not None
    assert finding.gain is not None
    assert finding.gain.basis == "replay"
    assert stalled.ledger is not None
    gain = finding.gain
    assert (gain.low_ms, gain.likely_ms) == first.predicted.gain_ms[:2]
    causes = [one for one in stalled.ledger.causes if "sharded-gather-stall" in one.told_by]
    assert first.predicted.gain_ms[2] < gain.high_ms <= sum(one.alone_ms[2] for one in causes) * 1.1
    best = max(fix.predicted.gain_ms[1] for fix in others if fix.predicted is not None)
    assert best == pytest.approx(first.predicted.gain_ms[1], abs=0.2)
    assert all(fix.framework != "deepspeed" for fix in others)


def test_the_plan_names_fixes_that_fit_the_job(stalled: Diagnosis):
    (first, *_) = stalled.plan
    finding, number = first.fix.rsplit("/", 1)
    fixes = {one.id: one.fixes for one in stalled.findings}[finding]
    assert fixes[int(number)].framework == "deepspeed"
    assert "Gather two blocks ahead, beside compute: 125 -> about" in stalled.summary


def test_steps_of_a_plan_never_grow(sample_traces: Path):
    plan = diagnosis_of(sample_traces / "synthetic_ddp_tiny_batch").plan
    likely = [9.45, *(one.step_ms[1] for one in plan)]
    assert plan
    assert likely == sorted(likely, reverse=True)


def test_without_a_replay_gains_are_bounds(sample_traces: Path):
    found = diagnosis_of(sample_traces / "synthetic_zero3_gather_stall", Options(replay=False))
    assert found.replay is None
    assert {one.gain.basis for one in found.findings if one.gain is not None} == {"ceiling"}


def test_gains_are_bounds_without_a_replay(sample_traces: Path, monkeypatch: pytest.MonkeyPatch):
    for module, name in ((predictions, "replay_run"), (ledger, "replay_closest")):
        monkeypatch.setattr(module, name, lambda run: Refusal("kernels are missing"))
    found = tracedoc.diagnose([sample_traces / "cpu_ddp_slow_loader"])
    assert found.replay is not None
    assert found.replay.state == "refused"
    (stall,) = [one for one in found.findings if one.rule_id == "input-stall"]
    assert stall.gain is not None
    assert stall.gain.basis == "ceiling"


def test_a_wrong_prediction_is_an_error_of_its_rule(tmp_path: Path, repository: Path):
    rule = yaml.safe_load((repository / "rules/input/input-stall.yaml").read_text())
    rule["id"], rule["fixes"][0]["predict"] = "own", {"change": "feed-inputs"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(rule))
    with pytest.raises(RuleError) as caught:
        load_rules([str(tmp_path)])
    assert "did you mean 'feed-input'" in caught.value.message


def test_a_doubtful_prediction_does_not_lessen_what_is_sure(sample_traces: Path):
    """On CPUs predictions have low confidence; their low end is still most of the step."""
    found = diagnosis_of(sample_traces / "cpu_ddp_slow_loader").findings[0]
    predicted = found.fixes[0].predicted
    assert found.rule_id == "input-stall"
    assert predicted is not None
    assert predicted.confidence == "low"
    assert found.gain is not None
    assert found.gain.low_ms > 0.15 * 111
    assert found.severity == "critical"
