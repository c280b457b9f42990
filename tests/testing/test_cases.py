"""Case files are read strictly, and differences are told in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracedoc.diagnosis import (
    Comparison,
    Diagnosis,
    Finding,
    Gain,
    RunInfo,
    Strategy,
    Verdict,
)
from tracedoc.errors import RuleError
from tracedoc.testing.cases import Case, Expectation, compare, load_cases, write_traces


def _file(folder: Path, text: str) -> Path:
    path = folder / "cases.yaml"
    path.write_text(text)
    return path


def _diagnosis(outcome: str, *findings: Finding, reason: str = "") -> Diagnosis:
    comparison = Comparison("share > 0.1", 0.05, 0.1, holds=False)
    return Diagnosis(
        summary="",
        run=RunInfo(2, (0, 1), "", "", Strategy("unknown", "low"), ()),
        budget=None,
        ranks=(),
        findings=findings,
        verdicts=(Verdict("r", outcome, (comparison,), reason),),
        facts={},
        limits=(),
    )


def _finding(**changes: Any) -> Finding:
    values: dict[str, Any] = dict.fromkeys(("ranks", "steps", "evidence", "fixes"), ()) | {
        "id": "r-1", "rule_id": "r", "severity": "warning", "confidence": "high", "title": "",
        "message": "40 ms of the 100 ms step", "why": "", "topic": "host", "gain": Gain(0, 40, "ceiling"),
    } | changes  # fmt: skip
    known = Finding.__struct_fields__
    return Finding(**{name: value for name, value in values.items() if name in known})


def test_case_takes_its_defaults(tmp_path: Path) -> None:
    loaded = load_cases(_file(tmp_path, "rule: r\ncases:\n  - name: a\n    expect: {outcome: pass}\n"))
    (case,) = loaded.cases
    assert loaded.rule == "r"
    assert (case.ranks, case.steps, case.lead, case.world_size) == (2, 5, 1.0, None)
    assert case.expect == Expectation("pass")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("rule: r\ncases:\n  - nam: a\n", "3:5", "did you mean 'name'"),
        ("rule: r\nrule: s\n", "2:1", "stands here twice"),
        ("rule: r\ncases: []\n", "2:8", "no case in it"),
        ("cases:\n  - name: a\n", "1:1", "a case file has no rule"),
        ("rule: r\ncases:\n  - name: a\n", "3:5", "a case has no expect"),
        ("rule: r\ncases:\n  - name: a\n    expect: {outcome: find}\n", "4:23", "did you mean 'finding'"),
        (
            "rule: r\ncases:\n  - name: a\n    ranks: two\n    expect: {outcome: pass}\n",
            "4:12",
            "a whole number",
        ),
        (
            "rule: r\ncases:\n  - name: a\n    expect: {outcome: pass, gain_ms: [0, 1]}\n",
            "4:38",
            "only a finding",
        ),
        (
            "rule: r\ncases:\n  - name: a\n    expect: {outcome: finding, gain_ms: [5]}\n",
            "4:41",
            "a list of 2",
        ),
        (
            "rule: r\ncases:\n  - name: a\n    expect: {outcome: finding, gain_ms: [5, 4]}\n",
            "4:41",
            "[low, high]",
        ),
        ("rule: [r\n", "2:1", "not YAML"),
        ("", "1:1", "empty"),
    ],
)
def test_wrong_file_says_where(tmp_path: Path, text: str, place: str, message: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(RuleError) as raised:
        load_cases(path)
    assert raised.value.message.startswith(f"{path}:{place}: ")
    assert message in raised.value.message


def test_wrong_lane_says_its_line_in_the_file(tmp_path: Path) -> None:
    lanes = "lanes: |\n      compute 0-1\n      compte 0-1\n"
    text = f"rule: r\ncases:\n  - name: a\n    {lanes}    expect: {{outcome: pass}}\n"
    path = _file(tmp_path, text)
    with pytest.raises(RuleError, match=r":6:1: unknown lane 'compte'"):
        write_traces(load_cases(path).cases[0], tmp_path)


def test_missing_ranks_are_not_written(tmp_path: Path) -> None:
    case = Case("a", Expectation("pass"), ranks=3, missing_ranks=(1,))
    assert [path.name for path in write_traces(case, tmp_path)] == ["rank-0.json", "rank-2.json"]


def test_truncated_files_end_in_the_middle(tmp_path: Path) -> None:
    (path,) = write_traces(Case("a", Expectation("pass"), ranks=1, truncate=0.5), tmp_path)
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())


def test_other_outcome_is_told_with_its_comparisons() -> None:
    (complaint,) = compare(_diagnosis("pass"), "r", Expectation("finding"))
    assert complaint == "expected finding, got pass (share > 0.1: 0.05 against 0.1)"


def test_gain_is_met_within_two_percent() -> None:
    diagnosis = _diagnosis("finding", _finding(gain=Gain(0, 40.7, "ceiling")))
    assert compare(diagnosis, "r", Expectation("finding", gain_ms=(0, 40))) == []
    assert compare(diagnosis, "r", Expectation("finding", gain_ms=(0, 39))) == [
        "expected a gain of 0 to 39 ms, got 0 to 40.7 ms"
    ]


def test_one_of_several_findings_must_meet_it_all() -> None:
    diagnosis = _diagnosis("finding", _finding(severity="note"), _finding(message="other"))
    assert compare(diagnosis, "r", Expectation("finding", message="40 ms")) == []
    assert compare(diagnosis, "r", Expectation("finding", severity="warning", message="40 ms")) != []


def test_reason_is_looked_for_in_the_verdict() -> None:
    diagnosis = _diagnosis("unknown", reason="one rank cannot tell")
    assert compare(diagnosis, "r", Expectation("unknown", reason="one rank")) == []
    assert compare(diagnosis, "r", Expectation("unknown", reason="no launches")) != []


def test_rule_that_was_not_evaluated_is_named() -> None:
    assert compare(_diagnosis("pass"), "other", Expectation("pass")) == ["no rule 'other' was evaluated"]
