"""Write the pages of the site that are made from rules and facts.

``.venv/bin/python docs/rule_pages.py build/pages``; ``make docs`` does it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from docs.facts_page import facts_page  # noqa: E402
from docs.glossary_page import glossary_page  # noqa: E402
from docs.rule_drawings import drawing  # noqa: E402
from tracedoc.judge.expression import parse  # noqa: E402
from tracedoc.judge.load import load_rules  # noqa: E402
from tracedoc.judge.rule import TOPICS  # noqa: E402
from tracedoc.testing.cases import Case, load_cases  # noqa: E402
from tracedoc.topics import load_facts  # noqa: E402
from tracedoc.units import format_quantity  # noqa: E402

if TYPE_CHECKING:
    from tracedoc.judge.rule import Rule

SYMPTOMS = REPOSITORY / "docs" / "symptoms.yaml"
SEEN = REPOSITORY / "docs" / "seen_on.yaml"
DRAWN = "compute 0-100"  # what a case without lanes draws: nothing to show


def pages() -> dict[str, str]:
    """The text of every page and drawing, by its place in the site."""
    found = {"facts.md": facts_page(), "glossary.md": glossary_page()}
    rules = load_rules()
    cases = {rule.id: _cases(rule.id) for rule in rules}
    for rule in rules:
        picture = _picture(cases[rule.id])
        if picture:
            found[f"rules/{rule.id}.svg"] = picture
        found[f"rules/{rule.id}.md"] = "\n".join(_page(rule, cases[rule.id], bool(picture))) + "\n"
    found["rules/README.md"] = "\n".join(_index(rules)) + "\n"
    found["rules/seen.md"] = "\n".join(_seen(rules, cases)) + "\n"
    return found


def _cases(rule_id: str) -> tuple[Case, ...]:
    path = REPOSITORY / "tests" / "rules" / f"{rule_id}.yaml"
    return load_cases(path).cases if path.exists() else ()


def _first(cases: Sequence[Case], *outcomes: str) -> Case | None:
    return next((case for case in cases if case.expect.outcome in outcomes), None)


def _picture(cases: Sequence[Case]) -> str:
    faulty = _first(cases, "finding")
    return drawing(faulty) if faulty is not None and faulty.lanes.strip() != DRAWN else ""


def _page(rule: Rule, cases: Sequence[Case], drawn: bool) -> Iterator[str]:
    yield f"# {rule.title}"
    yield ""
    yield f"`{rule.id}` · {rule.topic} · {rule.status} · judged for {_scope(rule)}"
    yield ""
    faulty = _first(cases, "finding")
    if faulty is not None:
        yield "## What it looks like"
        yield ""
        yield f"{_sentence(faulty.name)}"
        yield ""
        if drawn:
            yield f"![The step of the case: {faulty.name}]({rule.id}.svg)"
            yield ""
    yield "## Why it hurts"
    yield ""
    yield from (rule.why.strip(), "")
    yield "## How it is measured"
    yield ""
    yield from ("```text", *_wrapped(rule.when), "```", "")
    yield from (f"- {_fact(name)}" for name in parse(rule.when).names if name in load_facts())
    yield ""
    yield f"Gain: {_gain(rule)}"
    if rule.needs:
        needs = ", ".join(f"`{need}`" for need in sorted(rule.needs))
        yield ""
        yield f"The capture must hold {needs}; without them the rule is not judged."
    if rule.params:
        yield from ("", "## Thresholds", "", "| name | value | why |", "|---|---|---|")
        for name, param in rule.params.items():
            yield f"| `{name}` | {format_quantity(param.value, param.unit)} | {param.why} |"
    if rule.fixes:
        yield from ("", "## Fixes", "")
        yield from _fixes(rule)
    quiet = [case for case in cases if case.expect.outcome in ("pass", "yielded")]
    if quiet:
        yield from ("## What looks like it and is not", "")
        yield from (f"- {_sentence(case.name)}" for case in quiet)
        yield ""
    unsure = [case for case in cases if case.expect.outcome in ("unknown", "not_applicable")]
    if unsure:
        yield from ("## When it is not judged", "")
        yield from (f"- {_sentence(case.name)} ({case.expect.outcome.replace('_', ' ')})" for case in unsure)
        yield ""
    references = list(dict.fromkeys(fix.url for fix in rule.fixes if fix.url))
    if references:
        yield from ("## References", "")
        yield from (f"- <{url}>" for url in references)
        yield ""
    yield "[All rules](README.md)"


def _scope(rule: Rule) -> str:
    return "each rank" if rule.scope == "rank" else "the run"


def _fact(name: str) -> str:
    return f"[`{name}`](../facts.md#{name}): {load_facts()[name].doc.splitlines()[0].replace('``', '`')}"


def _gain(rule: Rule) -> str:
    if rule.gain is not None:
        return f"at most `{rule.gain.fact}`, if {rule.gain.assuming}."
    return f"none; it is always a {rule.severity}."


def _fixes(rule: Rule) -> Iterator[str]:
    for fix in rule.fixes:
        when = f", where `{fix.when}`" if fix.when else ""
        yield f"**{fix.title}** ({fix.framework}{when})"
        yield ""
        if fix.change:
            yield from ("```text", fix.change, "```", "")
        if fix.advice:
            yield from (fix.advice, "")
        replayed = f" Replayed as `{fix.replays}`." if fix.replays else ""
        yield f"Risk: {fix.risk}.{replayed}"
        yield ""


def _index(rules: Sequence[Rule]) -> Iterator[str]:
    titles = {rule.id: rule.title for rule in rules}
    yield from ("# The rules", "", "What slows training down, by what you see, then by topic.", "")
    yield from ("[What each rule has been seen on](seen.md) · [how a rule is written](../rules.md)", "")
    yield from ("## By symptom", "")
    for symptom, answers in symptoms(rules).items():
        yield from (f"**{symptom}**", "")
        yield from (f"- [{titles[one]}]({one}.md)" for one in answers)
        yield ""
    yield from ("## By topic", "")
    for topic in TOPICS:
        yield from (f"**{topic.capitalize()}**", "")
        yield from (f"- [`{rule.id}`]({rule.id}.md): {rule.title}" for rule in rules if rule.topic == topic)
        yield ""


def symptoms(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """The rules that may explain each symptom; one that no symptom names stands under that of its topic."""
    entries = yaml.safe_load(SYMPTOMS.read_text(encoding="utf-8"))
    named = {rule for entry in entries for rule in entry["rules"]}
    found = {entry["symptom"]: list(entry["rules"]) for entry in entries}
    of_topic = {entry["topic"]: entry["symptom"] for entry in entries if "topic" in entry}
    for rule in rules:
        if rule.id not in named:
            found[of_topic[rule.topic]].append(rule.id)
    return found


def _seen(rules: Sequence[Rule], cases: Mapping[str, Sequence[Case]]) -> Iterator[str]:
    seen = yaml.safe_load(SEEN.read_text(encoding="utf-8"))
    yield from ("# What each rule has been seen on", "")
    yield "Each rule is tested on drawn steps that it must flag, and on healthy ones that look alike"
    yield "(`tests/rules`). The last column names samples and captures of real jobs that it flagged."
    yield "A rule is stable, and counts for `--fail-on`, once a real run is among them (of CPUs, where the"
    yield "mechanism is the same there). Until then it is a preview. `synthetic_` samples are no real runs."
    yield ""
    yield from (
        "| rule | status | a step that fires it | a look-alike that stays quiet | captures that fire it |",
        "|---|---|---|---|---|",
    )
    for rule in rules:
        faulty, alike = _first(cases[rule.id], "finding"), _first(cases[rule.id], "pass", "yielded")
        captures = ", ".join(seen.get(rule.id, ())) or "none yet"
        names = [case.name if case else "in a test of its own" for case in (faulty, alike)]
        yield f"| [{rule.id}]({rule.id}.md) | {rule.status} | {names[0]} | {names[1]} | {captures} |"


def _wrapped(condition: str) -> Iterator[str]:
    words = " ".join(condition.split())
    yield from words.replace(" and ", "\nand ").split("\n")


def _sentence(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}."


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)  # of rules that are gone no page is left
    (folder / "rules").mkdir(parents=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
