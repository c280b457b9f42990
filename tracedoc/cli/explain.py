"""``tracedoc explain``: what a rule, a fact, a cause, a limit or a word means, in general or in a run."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from tracedoc.cli.output import format_option, quiet_option, show, text_width
from tracedoc.cli.reading import rules_option
from tracedoc.errors import TracedocError
from tracedoc.glossary import letters, limits, spellings, words

if TYPE_CHECKING:
    from tracedoc.facts.catalog import Fact
    from tracedoc.judge.rule import Rule

_RULE_FIELDS = ("id", "title", "topic", "status", "since", "scope", "when", "params", "why", "fixes")
_FACT_FIELDS = ("name", "unit", "scope", "doc")


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in _all_names(*_known(())) if name.startswith(incomplete)]


@click.command(short_help="Explain a rule, a fact, a cause, a limit, or any word.")
@click.argument("name", shell_complete=_names)
@click.argument("run", nargs=-1, metavar="[RUN]...")
@rules_option()
@format_option()
@quiet_option
def explain(
    name: str, run: tuple[str, ...], rule_directories: tuple[str, ...], report_format: str | None
) -> None:
    """Explain a rule, a fact, a cause, a limit, or a word, however it is spelled.

    With a run, a rule shows its numbers of that run, and all fixes that fit its framework. Two words are
    compared.

    \b
    Examples:
      tracedoc explain exposed-communication    a rule: when, why, fixes
      tracedoc explain exposed_comm_ms          a fact: its definition
      tracedoc explain link.transfer            a cause: what it is, who names it
      tracedoc explain no-complete-step         a limit: what it takes away
      tracedoc explain launch-bound             a word of an answer
      tracedoc explain ZeRO-2 ZeRO-3            two words, compared
      tracedoc explain input-stall runs/a       a rule, with the numbers of a run
      tracedoc explain tiny-batch -f json | jq .rule.when
    """
    rules, facts = _known(rule_directories)
    names = _all_names(rules, facts)
    if run and _spelled(" ".join((name, *run)), names):
        name, run = " ".join((name, *run)), ()
    same = _spelled(name, names) or _titled(name, rules)
    other = _spelled(run[0], words()) if len(run) == 1 and not Path(run[0]).exists() else []
    if other and (word := _spelled(name, words())):
        _compare(word[0], other[0], report_format)
        return
    if run:
        _explain_in(
            same[0] if same and name not in same else name, run, rules, rule_directories, report_format
        )
        return
    found = _found(name, rules, facts)
    from tracedoc.report.texts import plain

    meanings = {kind: data for kind, data, _ in found}
    show(meanings, report_format, lambda: plain("\n".join(text for _, _, text in found)))


def meanings_of(name: str) -> dict[str, str]:
    """What a name means, in any spelling: the explanation by kind ("rule", "fact", "cause", "limit", "word").

    Raises :class:`TracedocError` with the nearest name for one that is not known.
    """
    return {kind: text for kind, _, text in _found(name, *_known(()))}


def _found(name: str, rules: Mapping[str, Rule], facts: Mapping[str, Fact]) -> list[tuple[str, object, str]]:
    """All meanings of a name: a guard may share its name with its limit; then both are explained."""
    names = _all_names(rules, facts)
    same = _spelled(name, names) or _titled(name, rules)
    found = [meaning for one in same for meaning in _meanings(one, rules, facts)]
    if not found:
        raise _unknown(name, names)
    return found


def _explain_in(
    name: str,
    run: tuple[str, ...],
    rules: Mapping[str, Rule],
    rule_directories: tuple[str, ...],
    report_format: str | None,
) -> None:
    """Print what a rule says of a run: its finding with every fitting fix, else why there is none."""
    from tracedoc.cli.reading import run_pipeline
    from tracedoc.ledger import CAUSE_WORDS
    from tracedoc.pipeline import Options
    from tracedoc.report.terminal import render_rule
    from tracedoc.report.view import build_view

    alike = _with_alias(name, rules)
    if name not in rules and len(alike) == 1:
        name = alike[0].id
    if name not in rules and name not in CAUSE_WORDS:
        raise TracedocError(f"no rule is called {name!r}", "with a run, name a rule: tracedoc rules list")
    diagnosis = run_pipeline(run, Options(rule_directories=rule_directories, cache=True))
    found = [one for one in diagnosis.findings if one.rule_id == name]
    said = [one for one in diagnosis.verdicts if one.rule_id == name]

    def text() -> str:
        return render_rule(build_view(diagnosis), name, run=shlex.join(run), width=text_width())

    show({"findings": found, "verdicts": said}, report_format, text)


def _meanings(
    name: str, rules: Mapping[str, Rule], facts: Mapping[str, Fact]
) -> Iterator[tuple[str, object, str]]:
    """Yield what a name means: its kind, what it is for programs, and the explanation."""
    from tracedoc.ledger import CAUSE_IDS, CAUSE_WORDS

    if name in rules:
        rule = rules[name]
        data = {key: getattr(rule, key) for key in _RULE_FIELDS} | {"needs": sorted(rule.needs)}
        yield "rule", data, _rule(rule)
    if name in facts:
        fact = facts[name]
        data = {key: getattr(fact, key) for key in _FACT_FIELDS} | {"needs": sorted(fact.needs)}
        yield "fact", data, _fact(fact)
    if alike := _with_alias(name, rules):
        text = _rule(alike[0]) if len(alike) == 1 else _shared_alias(name, alike)
        yield "see", {"rules": [rule.id for rule in alike]}, text
    if name in CAUSE_IDS:
        named = [rule for rule in rules.values() if _names_cause(rule, name)]
        causes = {one: words for one, words in CAUSE_WORDS.items() if _is_part(one, name)}
        standing = [rule for rule in rules.values() if name in rule.stands_for]
        about = {
            "causes": causes,
            "rules": [rule.id for rule in named],
            "fixes": [one.id for one in standing],
        }
        yield "cause", about, _cause(name, causes, named, standing)
    if name in limits():
        yield "limit", limits()[name], f"{name}  (limit)\n\n{_paragraph(limits()[name])}\n"
    if name in words():
        yield "word", words()[name], _word(name, words()[name])


def _is_part(cause: str, family: str) -> bool:
    return cause == family or cause.startswith(f"{family}.")


def _names_cause(rule: Rule, name: str) -> bool:
    return any(_is_part(name, one) or _is_part(one, name) for one in rule.cause)


def _known(rule_directories: Sequence[str]) -> tuple[dict[str, Rule], Mapping[str, Fact]]:
    """Return all rules and facts by name."""
    from tracedoc.judge.load import load_rules
    from tracedoc.topics import load_facts

    return {rule.id: rule for rule in load_rules(rule_directories)}, load_facts()


def _with_alias(name: str, rules: Mapping[str, Rule]) -> list[Rule]:
    return [rule for rule in rules.values() if name in rule.aliases]


def _all_names(rules: Mapping[str, Rule], facts: Mapping[str, Fact]) -> list[str]:
    from tracedoc.ledger import CAUSE_IDS

    aliases = [alias for rule in rules.values() for alias in rule.aliases]
    return list(dict.fromkeys((*rules, *facts, *aliases, *limits(), *words(), *CAUSE_IDS)))


def _spelled(name: str, known: Collection[str]) -> list[str]:
    """Those of the known names that this one is in any spelling, else those that it is the plural of."""
    short = letters(name)
    for wanted in (short, short.removesuffix("s")):
        also = [word for word, others in spellings().items() if wanted in map(letters, others)]
        if found := [one for one in known if letters(one) == wanted or one in also]:
            return found
    return []


def _titled(name: str, rules: Mapping[str, Rule]) -> list[str]:
    """The causes and the rules that answers call by this name."""
    from tracedoc.ledger import CAUSE_WORDS

    called = {**CAUSE_WORDS, **{rule.id: rule.title.partition(": ")[0] for rule in rules.values()}}
    return [one for one, title in called.items() if letters(title) == letters(name)]


def _unknown(name: str, known: list[str]) -> TracedocError:
    near = {letters(word): word for word in (*chain(*spellings().values()), *known)}
    if found := difflib.get_close_matches(letters(name), near, n=1):
        word = shlex.quote(near[found[0]])
        return TracedocError(f"nothing is called {name!r}", f"did you mean: tracedoc explain {word}")
    return TracedocError(f"nothing is called {name!r}", "names of rules: tracedoc rules list")


def _rule(rule: Rule) -> str:
    from tracedoc.judge.fixes import framework_name
    from tracedoc.judge.wording import without_numbers
    from tracedoc.units import format_quantity

    status = f", {rule.status}" if rule.status != "stable" else ""
    lines = [
        f"{rule.id}  (rule, {rule.topic}{status}, since {rule.since})",
        rule.title,
        "",
        _paragraph(rule.why),
        "",
        "Found when",
        _paragraph(rule.when, 2),
    ]
    if rule.params:
        lines += ["", "Thresholds"]
    for name, param in rule.params.items():
        lines.append(
            _paragraph(f"{name} = {format_quantity(param.value, param.unit)}: {param.why}", 2, hang=4)
        )
    if rule.needs:
        lines += ["", f"Needs: {', '.join(sorted(need.replace('_', ' ') for need in rule.needs))}"]
    if rule.fixes:
        lines += ["", f"Fixes, with the numbers of a run: tracedoc explain {rule.id} RUN"]
    for fix in rule.fixes:
        lines.append(_paragraph(f"{framework_name(fix.framework)}: {without_numbers(fix.title)}", 2, hang=4))
        for word, condition in (("only where", fix.when), ("unless", fix.unless)):
            if condition:
                lines.append(_paragraph(f"{word} {condition}", 4))
        if fix.advice:
            lines.append(_paragraph(without_numbers(fix.advice), 4))
        if fix.change:
            lines.append(indent(without_numbers(fix.change).strip("\n"), "    "))
        if fix.risk and fix.risk != "none":
            lines.append(_paragraph(f"risk: {without_numbers(fix.risk)}", 4))
        if fix.url:
            lines.append(f"    {fix.url}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _shared_alias(name: str, rules: Sequence[Rule]) -> str:
    """The rules that tell what a name means that several of them share."""
    lines = [f"{name}  (no rule of this name; these tell it)", ""]
    lines += [_paragraph(f"tracedoc explain {rule.id}: {rule.title}", 2, hang=4) for rule in rules]
    return "\n".join(lines) + "\n"


def _cause(name: str, causes: Mapping[str, str], rules: Sequence[Rule], standing: Sequence[Rule]) -> str:
    """What a cause or a family of causes is, why it costs time, its fixes, the rules that name it, a budget.

    The reason and the fixes are those of the rules that are ``standing`` for it.
    """
    from tracedoc.judge.wording import without_numbers

    if name in causes:
        lines = [f"{name}  (cause)", "", _paragraph(causes[name][0].upper() + causes[name][1:] + ".")]
    else:
        lines = [f"{name}  (family of causes)", ""]
        lines += [_paragraph(f"{one}: {words}", 2, hang=4) for one, words in causes.items()]
    lines += [
        "",
        _paragraph("What it costs: the step is played again without it, alone and last. See: ledger"),
    ]
    for rule in {rule.why: rule for rule in standing}.values():
        titles = dict.fromkeys(without_numbers(fix.title) for fix in rule.fixes)
        lines += ["", _paragraph(rule.why), "", f"Fixes, in full: tracedoc explain {rule.id}"]
        lines += [_paragraph(title, 2, hang=4) for title in titles]
    if rules:
        lines += ["", "Rules that name it"]
        lines += [_paragraph(f"{rule.id}: {rule.title}", 2, hang=4) for rule in rules]
    lines += ["", f"As a budget: tracedoc diagnose RUN --budget 'cause.{name}.share <= 0.1'"]
    return "\n".join(lines) + "\n"


def _word(name: str, meaning: Mapping[str, str]) -> str:
    """A word: what it is, and a line for whatever else is told of it."""
    lines = [f"{name}  (word)", "", _paragraph(meaning["Is"])]
    rest = [_paragraph(text, label=f"{label:9}") for label, text in meaning.items() if label != "Is"]
    return "\n".join([*lines, *([""] if rest else []), *rest]) + "\n"


def _compare(one: str, other: str, report_format: str | None) -> None:
    """Print two words, label by label."""
    both = {name: words()[name] for name in (one, other)}
    width = max(map(len, both)) + 4
    lines = [f"{one} and {other}"]
    for label in dict.fromkeys(label for meaning in both.values() for label in meaning):
        lines += ["", label] + [
            _paragraph(meaning.get(label, "-"), label=f"  {name}".ljust(width))
            for name, meaning in both.items()
        ]
    show(both, report_format, lambda: "\n".join(lines) + "\n")


def _fact(fact: Fact) -> str:
    lines = [f"{fact.name}  (fact, unit {fact.unit}, one value a {fact.scope})", "", fact.doc]
    needs, uses = sorted(fact.needs), [one.name for one in fact.uses]
    if needs or uses:
        lines.append("")
    if needs:
        lines.append(f"Needs: {', '.join(needs)}")
    if uses:
        lines.append(_paragraph(f"Made of: {', '.join(uses)}", hang=2))
    return "\n".join(lines) + "\n"


def _paragraph(text: str, margin: int = 0, *, hang: int | None = None, label: str = "") -> str:
    """The text, wrapped; a ``label`` stands before it, and later lines begin under its end."""
    first, later = label or " " * margin, " " * (len(label) or (margin if hang is None else hang))
    return fill(
        " ".join(text.split()),
        text_width(),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
