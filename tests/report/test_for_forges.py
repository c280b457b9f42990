"""What a pull request shows: Markdown, SARIF, JUnit and annotations."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from msgspec.structs import replace
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as SarifLog

from tests.example_diagnoses import DIAGNOSES, HOSTILE, sharded
from tests.golden import HAND_MADE, REFRESH, for_forges
from tracedoc.diagnosis import BudgetCheck, Diagnosis, Finding
from tracedoc.errors import Limit
from tracedoc.report.forges import MARK, MAX_CHARACTERS, SHOWN_CAUSES, safe
from tracedoc.report.render import render
from tracedoc.report.view import build_view

FORMATS = ("markdown", "sarif", "junit", "github", "codequality")
GOLDEN = Path(__file__).parent / "golden"


def with_message(message: str) -> Diagnosis:
    diagnosis = sharded()
    first, *others = diagnosis.findings
    return replace(diagnosis, findings=(replace(first, message=message), *others))


def listed(diagnosis: Diagnosis) -> list[Finding]:
    """Return the findings about the job, in the order of every report."""
    return [item.finding for item in build_view(diagnosis).findings]


def with_budgets() -> Diagnosis:
    return replace(
        sharded(),
        budgets=(
            BudgetCheck("step_ms <= 420", "met", 420.0, "ms", 400.0),
            BudgetCheck("exposed_comm_frac <= 0.15", "broken", 0.15, "fraction", 0.325),
            BudgetCheck("comm_ms <= 9", "unknown", 9.0, "ms", None, "no communication was captured"),
        ),
    )


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
@pytest.mark.parametrize("report_format", FORMATS)
def test_every_diagnosis_has_every_format(name: str, report_format: str):
    text = render(DIAGNOSES[name](), report_format)
    assert text.endswith("\n")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


@pytest.mark.parametrize("name", HAND_MADE)
def test_forges_read_what_the_golden_files_say(name: str):
    for suffix, text in for_forges(DIAGNOSES[name]()):
        golden = (GOLDEN / f"{name}.{suffix}").read_text(encoding="utf-8")
        assert text == golden, REFRESH


# -- Markdown


def test_comment_begins_with_its_mark_and_the_answer():
    lines = render(sharded(), "markdown").split("\n")
    assert lines[0] == MARK
    assert lines[1].startswith("### ")


def test_at_most_ten_lines_and_a_small_table_stand_outside_of_what_is_folded():
    for name in DIAGNOSES:
        text = re.sub("(?s)<details>.*?</details>\n?", "", render(DIAGNOSES[name](), "markdown"))
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [line for line in lines if line.startswith("|")]
        assert len(rows) <= 2 + SHOWN_CAUSES + 1, name
        assert len(lines) - len(rows) <= 10, name


def test_findings_of_the_job_stand_in_order():
    text = render(sharded(), "markdown")
    titles = [safe(one.title) for one in listed(sharded())]
    places = [text.index(f"**{title}**") for title in titles]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "[click](https://example.org)",
        "![x](https://example.org/x.png)",
        "https://example.org and www.example.org",
        "@everyone see #1",
        "a | b `c` **d** _e_ ~~f~~",
        "</details>",
        "line\n# heading",
    ],
)
def test_text_stays_text(text: str):
    shown = safe(text)
    assert not re.search(r"(?<!\\)[`*_\[\]~|]", shown)
    assert not re.search(r"[<>@]|://|www\.|#1\b|\n", shown.replace("&#", "&"))
    # What a reader sees is what was written.
    assert html.unescape(re.sub(r"\\([\\`*_\[\]~|])", r"\1", shown)) == " ".join(text.split())


def test_long_comment_loses_its_last_parts_and_says_so():
    text = render(with_message("word " * 20_000), "markdown")
    assert len(text) <= MAX_CHARACTERS + 500
    assert "1 more part does not fit in a comment." in text


def huge() -> Diagnosis:
    """Return a diagnosis with everything that can be long or many."""
    diagnosis = sharded()
    findings = tuple(
        replace(diagnosis.findings[0], id=f"f{number}", title=f"Finding {number} " + "t" * 2_000)
        for number in range(500)
    )
    limits = tuple(Limit(f"limit-{number}", "m" * 500, "e" * 500) for number in range(3_000))
    checks = tuple(BudgetCheck(f"f{number} <= 1", "broken", 1.0, "ms", 2.0) for number in range(3_000))
    return replace(
        diagnosis, summary="Straggler: " + "s" * 50_000, findings=findings, limits=limits, budgets=checks
    )


def test_comment_of_a_huge_run_is_one_that_a_forge_accepts():
    text = render(huge(), "markdown")
    assert len(text) < 65_000
    assert text.count("<details>") == text.count("</details>") > 10
    assert "parts do not fit in a comment." in text


def test_fence_is_longer_than_backticks_in_the_code():
    diagnosis = sharded()
    first, *others = diagnosis.findings
    fix = replace(first.fixes[0], change="a\n````\nb")
    text = render(replace(diagnosis, findings=(replace(first, fixes=(fix,)), *others)), "markdown")
    assert "`````\na\n````\nb\n`````" in text


def test_budgets_are_counted_and_those_not_met_named():
    text = render(with_budgets(), "markdown")
    assert (
        "Budgets: 1 of 3 met; **exposed\\_comm\\_frac &lt;= 0.15: 32 %, broken**; "
        "**comm\\_ms &lt;= 9: not known (no communication was captured)**." in text
    )


# -- SARIF


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_sarif_fits_its_schema(name: str):
    SarifLog.model_validate_json(render(DIAGNOSES[name](), "sarif"))


def test_each_finding_is_a_result_at_its_trace():
    run = json.loads(render(sharded(), "sarif"))["runs"][0]
    assert [one["ruleId"] for one in run["results"]] == [one.rule_id for one in listed(sharded())]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    uris = [one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in run["results"]]
    assert all(re.fullmatch(r"rank-\d\.json\.gz", uri) for uri in uris), "redacted: the last part only"


@pytest.mark.parametrize("named", ["write_metrics (train.py:34)", "train.py(34): write_metrics"])
def test_result_points_at_the_line_that_the_message_names(named: str):
    results = json.loads(render(with_message(f"The host is in {named}."), "sarif"))["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"] for one in results]
    assert {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 34}} in places


# -- GitLab's code quality


def test_each_finding_has_what_gitlab_needs():
    found = json.loads(render(sharded(), "codequality"))
    assert [one["check_name"] for one in found] == [one.rule_id for one in listed(sharded())]
    assert len({one["fingerprint"] for one in found}) == len(found)
    for one in found:
        assert one["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert one["location"]["lines"]["begin"] >= 1
        assert not one["location"]["path"].startswith(("/", "./"))


# -- JUnit


# What a suite may hold, as the schema of the Jenkins xUnit plugin has it (junit-10.xsd): children of each
# element in their order, and attributes, those that must be there first.
JUNIT_CHILDREN = {
    "testsuites": ("testsuite",),
    "testsuite": ("testcase",),
    "testcase": ("skipped", "error", "failure", "system-out"),
    "skipped": (),
    "error": (),
    "failure": (),
    "system-out": (),
}
JUNIT_ATTRIBUTES: dict[str, tuple[set[str], set[str]]] = {
    "testsuites": (set(), set()),
    "testsuite": ({"name", "tests", "failures", "errors"}, {"skipped"}),
    "testcase": ({"name", "classname"}, set()),
    "skipped": (set(), {"message"}),
    "error": (set(), {"message", "type"}),
    "failure": (set(), {"message", "type"}),
    "system-out": (set(), set()),
}


@pytest.mark.parametrize("name", sorted(DIAGNOSES))
def test_junit_has_the_structure_of_its_schema(name: str):
    for element in ElementTree.fromstring(render(DIAGNOSES[name](), "junit")).iter():
        needed, optional = JUNIT_ATTRIBUTES[element.tag]
        assert needed <= set(element.attrib) <= needed | optional
        allowed = JUNIT_CHILDREN[element.tag]
        places = [allowed.index(child.tag) for child in element]
        assert places == sorted(places)
        if element.tag == "testcase":
            assert sum(child.tag in ("skipped", "error", "failure") for child in element) <= 1


def test_suite_counts_what_it_holds():
    suite = ElementTree.fromstring(render(with_budgets(), "junit")).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert int(suite.attrib["tests"]) == len(cases) == len(sharded().verdicts) + 3
    assert int(suite.attrib["failures"]) == sum(case.find("failure") is not None for case in cases)
    assert int(suite.attrib["skipped"]) == sum(case.find("skipped") is not None for case in cases)


def test_what_a_rule_says_of_the_capture_is_skipped_not_passed():
    said = {"rule_id": "few-steps", "topic": "capture", "gain": None, "message": "Two steps."}
    guard = replace(sharded().findings[0], **said)
    verdict = replace(sharded().verdicts[0], rule_id="few-steps", outcome="finding")
    diagnosis = replace(sharded(), findings=(guard,), verdicts=(verdict,))
    (case,) = ElementTree.fromstring(render(diagnosis, "junit")).iter("testcase")
    assert [(child.tag, child.attrib["message"]) for child in case] == [("skipped", "Two steps.")]


def test_broken_budget_fails_and_unknown_one_is_skipped():
    suite = ElementTree.fromstring(render(with_budgets(), "junit"))
    outcomes = {
        case.attrib["name"]: [child.tag for child in case]
        for case in suite.iter("testcase")
        if case.attrib["classname"] == "tracedoc.budgets"
    }
    assert outcomes == {
        "step_ms <= 420": [],
        "exposed_comm_frac <= 0.15": ["failure"],
        "comm_ms <= 9": ["skipped"],
    }


# -- annotations


def test_annotation_is_one_line_whatever_it_says():
    text = render(with_message("a%b\r\n::error::stolen, c:d"), "github")
    lines = text.rstrip("\n").split("\n")
    assert all(re.match(r"::(error|warning|notice) title=tracedoc", line) for line in lines)
    assert any("::a%25b\\x0d ::error::stolen, c:d" in line for line in lines)


def test_hostile_title_ends_no_property():
    diagnosis = sharded()
    first, *others = diagnosis.findings
    shown = render(
        replace(diagnosis, findings=(replace(first, title=f"x,line=1::{HOSTILE}"), *others)), "github"
    )
    assert "title=tracedoc%3A x%2Cline=1%3A%3A" in shown
