"""Write verdicts and performance budgets as JUnit XML, which every CI system shows as tests."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from tracedoc.report.texts import one_line
from tracedoc.report.view import FindingView, View, budget_words, is_guard

_FAILING = frozenset({"critical", "warning"})

# XML 1.0 has no way to write these, not even escaped (https://www.w3.org/TR/xml/#charsets).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(view: View) -> str:
    """Return a suite with a test for each rule and each budget.

    A critical finding, a warning, and a broken budget are failures; what could not be judged, and what a rule
    says of the capture, is skipped; a rule that failed itself is an error. A note passes, and stands in the
    test's output.
    """
    found = {item.finding.rule_id: item for item in view.findings}
    guards = {one.rule_id: one for one in view.diagnosis.findings if is_guard(one)}
    suite = ElementTree.Element("testsuite", name="tracedoc")
    for verdict in view.diagnosis.verdicts:
        case = _case(suite, "tracedoc.rules", verdict.rule_id)
        item = found.get(verdict.rule_id)
        if item is not None:
            _found(case, item)
        elif verdict.rule_id in guards:
            _child(case, "skipped", guards[verdict.rule_id].message)
        elif verdict.outcome == "error":
            _child(case, "error", verdict.reason)
        elif verdict.outcome in ("unknown", "not_applicable"):
            _child(case, "skipped", verdict.reason)
    for check in view.diagnosis.budgets:
        case = _case(suite, "tracedoc.budgets", check.text)
        if check.outcome != "met":
            _child(case, "failure" if check.outcome == "broken" else "skipped", budget_words(check))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"*/{tag}"))))
    suite.set("tests", str(len(suite)))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return (
        "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(suites, encoding="unicode") + "\n"
    )


def _found(case: ElementTree.Element, item: FindingView) -> None:
    finding = item.finding
    lines = [one_line(finding.message), item.place]
    lines += [f"gain: {item.gain}"] if item.gain else []
    for fix in item.fixes[:1]:
        lines += [f"fix: {one_line(fix.title)}", *filter(None, (one_line(fix.advice), fix.change))]
    text = "\n".join(lines)
    if finding.severity in _FAILING:
        _child(case, "failure", finding.title, text).set("type", finding.severity)
    else:
        ElementTree.SubElement(case, "system-out").text = _xml(f"{finding.severity}: {text}")


def _case(suite: ElementTree.Element, class_name: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=class_name, name=_xml(one_line(name)))


def _child(case: ElementTree.Element, tag: str, message: str, text: str = "") -> ElementTree.Element:
    child = ElementTree.SubElement(case, tag, message=_xml(one_line(message)))
    child.text = _xml(text) or None
    return child


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
