"""Keep checked rules, so that the next command need not read and check them again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tracedoc.cache import slot_of_small_files
from tracedoc.rules.files import files_of
from tracedoc.rules.model import Rule


class _Rules(msgspec.Struct, frozen=True):
    rules: tuple[Rule, ...]


def kept_rules(directories: Sequence[str]) -> tuple[Rule, ...]:
    """Return what :func:`tracedoc.rules.load.load_rules` does, without reading files that did not change.

    Raises :class:`RuleError` as that does: rules with a mistake are not kept.
    """
    slot = slot_of_small_files([str(path) for path in files_of(directories)], directories)
    kept = slot.load(_Rules) if slot is not None else None
    if kept is not None:
        return kept.rules
    from tracedoc.rules.load import load_rules  # what was kept needs no YAML

    rules = load_rules(directories)
    if slot is not None:
        slot.store(_Rules(rules))
    return rules
