"""The names that rules may use: facts, estimators of gains, and facts that can be shown as evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

import msgspec

from tracedoc.facts.catalog import FactDef


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """Facts with their units and scopes, the names of estimators, and the facts that have evidence."""

    facts: Mapping[str, FactDef]
    gains: Collection[str]
    evidence: Collection[str]

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The unit of each fact."""
        return {name: fact.unit for name, fact in self.facts.items()}

    @cached_property
    def texts(self) -> Mapping[str, Collection[str]]:
        """All values of each fact that is one of a few texts."""
        return {name: fact.values for name, fact in self.facts.items() if fact.values}


def installed_vocabulary() -> Vocabulary:
    """Return every fact and estimator of this installation."""
    # Late, because a caller with a vocabulary of its own needs none of the measuring code.
    from tracedoc.topics import load_facts
    from tracedoc.whatif.evidence import collectors
    from tracedoc.whatif.gains import GAINS

    return Vocabulary(load_facts(), GAINS, collectors())
