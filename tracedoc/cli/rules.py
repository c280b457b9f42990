"""``tracedoc rules``: list rules, and check and test packs of your own."""

from __future__ import annotations

from pathlib import Path

import click

from tracedoc.cli.completion import folders
from tracedoc.cli.output import format_option, in_columns, show
from tracedoc.cli.reading import rules_option
from tracedoc.errors import InputError, RuleError, TracedocError


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
    from tracedoc.judge.scaffold import write_rule

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
