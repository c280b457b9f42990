"""Choose rules by id, alias, topic or pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from tracedoc.errors import RuleError, did_you_mean
from tracedoc.rules.model import TOPICS, Rule


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
