"""``tracedoc rules``: list, check and test rules, and write a new one with its cases, ready to be changed."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tracedoc.cli.completion import folders
from tracedoc.cli.output import format_option, in_columns, show
from tracedoc.cli.reading import rules_option
from tracedoc.errors import InputError, RuleError, TracedocError

RULE = """id: {id}
title: "{title}: say in a few words what is wrong"
topic: communication
status: preview
since: "0.1"
scope: run
needs: [kernels, collectives]
params:
  min_share: {{value: 0.10, unit: fraction, why: "say why less of it is no finding"}}
when: exposed_comm_ms / step_ms > min_share
gain: {{at_most: exposed_comm_ms, assuming: "say what has to hold for all of it"}}
message: "{{exposed_comm_ms}} of the {{step_ms}} step is ..."
why: >
  Say in two sentences why this costs time: what waits for what.
fixes:
  - framework: pytorch
    title: Say what to change
    change: "the line of code or configuration"
    risk: none for numerics
"""

CASES = """rule: {id}
cases:
  - name: the fault, drawn as lanes in milliseconds
    lanes: |
      backward   20-60
      compute    0-60
      allreduce  60-100  64MiB
    expect: {{outcome: finding, gain_ms: [0, 40], message: "40 ms of the 100 ms step"}}
  - name: a healthy job that looks like it
    lanes: |
      backward   20-100
      compute    0-100
      allreduce  60-100  64MiB
    expect: {{outcome: pass}}
  - name: one GPU
    ranks: 1
    expect: {{outcome: not_applicable}}
"""


def write_rule(rule_id: str, directory: Path) -> tuple[Path, Path]:
    """Write ``ID.yaml`` into ``directory`` and its cases into the folder ``tests`` there; return both paths.

    Raises :class:`RuleError` for an id that is none, that tracedoc uses itself, or whose files are there.
    """
    from tracedoc.judge.rule_cache import builtin_directory

    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", rule_id) or len(rule_id) > 60:
        raise RuleError(
            f"id {rule_id!r} must be lower-case words joined by hyphens", "name it after the failing state"
        )
    if any(path.stem == rule_id for path in builtin_directory().rglob("*.yaml")):
        raise RuleError(f"tracedoc has a rule {rule_id}", "take another id: those of all rules must differ")
    rule, cases = directory / f"{rule_id}.yaml", directory / "tests" / f"{rule_id}.yaml"
    for path in (rule, cases):
        if path.exists():
            raise RuleError(f"{path} is there already", "take another id or folder")
    cases.parent.mkdir(parents=True, exist_ok=True)
    title = rule_id.replace("-", " ").capitalize()
    rule.write_text(RULE.format(id=rule_id, title=title), encoding="utf-8")
    cases.write_text(CASES.format(id=rule_id), encoding="utf-8")
    return rule, cases


@click.group()
def rules() -> None:
    """List the rules; check and test rules of your own.

    \b
    Examples:
      tracedoc rules list
      tracedoc rules check my-rules/
      tracedoc rules test my-rules/
      tracedoc rules new slow-tokeniser --in my-rules/
    """


@rules.command("list")
@rules_option()
@format_option()
def list_rules(rule_directories: tuple[str, ...], report_format: str | None) -> None:
    """List every rule: id, topic, status, title.

    \b
    Examples:
      tracedoc rules list
      tracedoc rules list --rules my-rules/
      tracedoc rules list -f json | jq -r '.[].id'
    """
    from tracedoc.judge.load import load_rules
    from tracedoc.report.texts import plain

    found = load_rules(rule_directories)
    names = ("id", "topic", "status", "title", "since", "scope")
    rows = [("rule", *names[1:4]), *(tuple(getattr(rule, name) for name in names[:4]) for rule in found)]
    show(
        [{name: getattr(rule, name) for name in names} for rule in found],
        report_format,
        lambda: "".join(f"{plain(line)}\n" for line in in_columns(rows)),
    )


@rules.command()
@click.argument("directory", metavar="DIR", shell_complete=folders)
def check(directory: str) -> None:
    """Check rule files: keys, names, units, conditions. Exit with 1 if one is wrong.

    A folder "tests" inside DIR is left out: it holds the cases for "rules test".

    \b
    Examples:
      tracedoc rules check my-rules/
    """
    from tracedoc.judge.load import load_rule, load_rules
    from tracedoc.judge.rule_cache import MAX_RULES
    from tracedoc.report.texts import plain

    files = [path for path in _yaml_files(directory) if "tests" not in path.relative_to(directory).parts[:-1]]
    if not files:
        raise InputError(f"{directory} holds no rules (*.yaml)", "give the folder of a rule pack")
    if len(files) > MAX_RULES:
        raise InputError(f"{directory} holds {len(files)} files", f"check at most {MAX_RULES} rules at once")
    problems = []
    for path in files:
        try:
            load_rule(path)
        except RuleError as error:
            problems.append(error)
    if not problems:
        try:
            # What only several rules together show: ids used twice.
            load_rules([directory])
        except RuleError as error:
            problems.append(error)
    for problem in problems:
        click.echo(plain(problem.message))
        if problem.hint:
            click.echo(f"  hint: {plain(problem.hint)}")
    click.echo(f"{_count(len(files), 'rule file')} checked, {len(problems)} wrong")
    if problems:
        raise click.exceptions.Exit(1)


@rules.command()
@click.argument("rule_id", metavar="ID")
@click.option("--in", "directory", metavar="DIR", default="rules", help="The pack's folder. [rules]")
def new(rule_id: str, directory: str) -> None:
    """Write a new rule and its cases into a pack, ready to be changed.

    DIR/ID.yaml is the rule, DIR/tests/ID.yaml draws its steps. Both pass
    as they are; docs/rules.md has every field.

    \b
    Examples:
      tracedoc rules new slow-tokeniser --in my-rules/
      tracedoc rules test my-rules/
    """
    for path in write_rule(rule_id, Path(directory)):
        click.echo(f"wrote {path}")
    click.echo(f"next: change both, then tracedoc rules check {directory}; tracedoc rules test {directory}")


@rules.command("test")
@click.argument("directory", metavar="DIR", shell_complete=folders)
@rules_option("Add the rules of another folder.")
def run_tests(directory: str, rule_directories: tuple[str, ...]) -> None:
    """Run the cases of a rule pack. Exit with 1 if one fails.

    The cases of a pack lie in DIR/tests. Without that folder, DIR itself
    holds cases, for the rules of tracedoc and of --rules.

    \b
    Examples:
      tracedoc rules test my-rules/
      tracedoc rules test cases/ --rules my-rules/
    """
    inner = Path(directory, "tests")
    packs = (directory, *rule_directories) if inner.is_dir() else rule_directories
    files = _yaml_files(str(inner) if inner.is_dir() else directory)
    if not files:
        raise InputError(f"{directory} holds no cases (*.yaml)", "put them into DIR/tests, one file a rule")
    from tracedoc.report.texts import one_line, plain
    from tracedoc.testing.cases import run_case_file

    passed = failed = 0
    for path in files:
        try:
            results = run_case_file(path, packs)
        except TracedocError as error:
            click.echo(f"FAILED  {plain(one_line(error.message))}")
            failed += 1
            continue
        for result in results:
            passed += result.passed
            failed += not result.passed
            if not result.passed:
                click.echo(
                    f"FAILED  {path}: {plain(one_line(result.name))}: {plain(one_line(result.reason))}"
                )
    click.echo(f"{_count(passed + failed, 'case')}: {passed} passed, {failed} failed")
    if failed:
        raise click.exceptions.Exit(1)


def _yaml_files(directory: str) -> list[Path]:
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError(f"{directory} is not a folder", "give the folder of a rule pack")
    return sorted(folder.rglob("*.yaml"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
