"""The rules that a command judges by: their files, kept as they were checked, and chosen by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from tracedoc.cache import slot_of_small_files
from tracedoc.errors import RuleError, did_you_mean
from tracedoc.judge.rule import TOPICS, Rule

MAX_RULES = 1000
"""Rule files in one pack; each takes milliseconds to check."""


def builtin_directory() -> Path:
    """Return the folder of tracedoc's own rules: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "builtin", package.parents[1] / "rules"):
        if directory.is_dir():
            return directory
    raise RuleError("the rules that come with tracedoc are missing", "install tracedoc again")


def files_of(directories: Iterable[str | Path]) -> list[Path]:
    """Return the files that :func:`tracedoc.judge.load.load_rules` reads."""
    folders = (builtin_directory(), *map(Path, directories))
    return [path for folder in folders for path in rule_files(folder)]


def rule_files(directory: Path) -> list[Path]:
    """Return the rule files of a folder and of its sub-folders, but for ``tests``, each in order.

    Raises :class:`RuleError` for what is no folder, holds too many, or files that end in ``.yml``.
    """
    if not directory.is_dir():
        raise RuleError(f"{directory}: not a folder", "name a folder of rule files (*.yaml)")
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    files: list[Path] = []
    for folder in folders:
        if folder != directory and (folder.name == "tests" or folder.name.startswith(".")):
            continue
        for path in sorted(folder.iterdir()):
            if path.suffix == ".yml":
                raise RuleError(f"{path}: rule files end in .yaml", f"rename it to {path.stem}.yaml")
            if path.suffix == ".yaml" and not path.name.startswith("."):
                files.append(path)
    if len(files) > MAX_RULES:
        raise RuleError(
            f"{directory}: {len(files)} rule files, and a pack holds at most {MAX_RULES}",
            "divide it into several packs, and load those that fit the job",
        )
    return files


class _Rules(msgspec.Struct, frozen=True):
    rules: tuple[Rule, ...]


def kept_rules(directories: Sequence[str]) -> tuple[Rule, ...]:
    """Return what :func:`tracedoc.judge.load.load_rules` does, without reading files that did not change.

    Raises :class:`RuleError` as that does: rules with a mistake are not kept.
    """
    slot = slot_of_small_files([str(path) for path in files_of(directories)], directories)
    kept = slot.load(_Rules) if slot is not None else None
    if kept is not None:
        return kept.rules
    from tracedoc.judge.load import load_rules  # what was kept needs no YAML

    rules = load_rules(directories)
    if slot is not None:
        slot.store(_Rules(rules))
    return rules


def choose(rules: Sequence[Rule], select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Return the rules that ``select`` names (all, if it names none) less those that ``ignore`` names.

    A name is a rule's id or one of its aliases, a topic, or a pattern of ids with ``*``. Raises
    :class:`RuleError` for a name that fits nothing.
    """
    selected = [_named(rules, name) for name in select]
    ignored = frozenset[str]().union(*(_named(rules, name) for name in ignore))
    wanted = frozenset[str]().union(*selected) if selected else frozenset(rule.id for rule in rules)
    return tuple(rule for rule in rules if rule.id in wanted - ignored)


def _named(rules: Sequence[Rule], name: str) -> frozenset[str]:
    found = frozenset(
        rule.id
        for rule in rules
        if name in (rule.id, rule.topic, *rule.aliases) or ("*" in name and fnmatchcase(rule.id, name))
    )
    if not found and name not in TOPICS:
        known = [*(rule.id for rule in rules), *TOPICS]
        raise RuleError(
            f"no rule or topic is named {name!r}{did_you_mean(name, known)}",
            "list them with: tracedoc rules list",
        )
    return found
