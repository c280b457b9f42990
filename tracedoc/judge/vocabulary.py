"""The names that rules may use, and the JSON schema of a rule file, which holds them for editors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from inspect import cleandoc
from typing import Any

import msgspec

from tracedoc.facts.catalog import NEEDS, Fact
from tracedoc.glossary import limits
from tracedoc.judge.rule import Rule
from tracedoc.ledger import CAUSE_IDS
from tracedoc.units import UNITS


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """Facts with their units and scopes, and the facts that have evidence."""

    facts: Mapping[str, Fact]
    evidence: Collection[str]

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The unit of each fact."""
        return {name: fact.unit for name, fact in self.facts.items()}

    @cached_property
    def texts(self) -> Mapping[str, Collection[str]]:
        """All values of each fact that is one of a few texts."""
        return {name: fact.values for name, fact in self.facts.items() if fact.values}

    @cached_property
    def words(self) -> Mapping[str, Collection[str]]:
        """All words that a rule may use, by the title of their type in :mod:`tracedoc.judge.rule`."""
        named = {"fact": self.facts, "evidence": self.evidence}
        return {**named, "need": NEEDS, "unit": UNITS, "limit": limits(), "cause": CAUSE_IDS}


def installed_vocabulary() -> Vocabulary:
    """Every fact of this installation."""
    # Late, because a caller with a vocabulary of its own needs none of the measuring code.
    from tracedoc.topics import load_facts
    from tracedoc.whatif.evidence import collectors

    return Vocabulary(load_facts(), collectors())


def rule_schema() -> dict[str, Any]:
    """The schema of a rule file, with every fact and change of this installation.

    Conditions and templates are text here; what stands in them, and units, are checked by
    ``tracedoc rules check`` alone.
    """
    from tracedoc.whatif.changes.registry import CHANGES

    words = installed_vocabulary().words
    schema = _with_words(msgspec.json.schema(Rule), words)
    kinds = schema["$defs"]
    for kind in kinds.values():
        # Python 3.13 takes the indentation out of docstrings, earlier ones keep it.
        kind["description"] = cleandoc(kind["description"])
    kinds["Rule"]["anyOf"] = [{"required": [one]} for one in ("gain", "cause", "severity")]
    kinds["Rule"]["not"] = {"required": ["gain", "severity"]}
    kinds["RuleFix"]["anyOf"] = [{"required": ["change"]}, {"required": ["advice"]}]
    kinds["RuleFix"]["properties"]["predict"] |= {
        "properties": {"change": {"enum": sorted(CHANGES)}},
        "required": ["change"],
    }
    kinds |= {title: {"enum": sorted(known)} for title, known in words.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A rule of tracedoc",
        **schema,
    }


def _with_words(part: Any, words: Mapping[str, Collection[str]]) -> Any:
    """A part of a schema in which each kind of word refers to all words of that kind."""
    if isinstance(part, list):
        return [_with_words(one, words) for one in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "string" and part.get("title") in words:
        return {"$ref": f"#/$defs/{part['title']}"}
    return {key: _with_words(value, words) for key, value in part.items() if key != "default"}
