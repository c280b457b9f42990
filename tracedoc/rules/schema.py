"""Describe a rule file as a JSON schema, for editors: the same fields and words as the loader reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tracedoc.diagnosis import SEVERITIES
from tracedoc.facts.catalog import NEEDS
from tracedoc.rules.load import FIX_FIELDS, OPTIONAL, REQUIRED
from tracedoc.rules.model import FRAMEWORKS, ON_CPU, SCOPES, STATUSES, TELLS, TOPICS
from tracedoc.rules.vocabulary import installed_vocabulary
from tracedoc.units import UNITS
from tracedoc.whatif.changes.registry import CHANGES

_TEXT = {"type": "string", "minLength": 1}
_SCALAR = {"type": ["number", "string", "boolean"]}


def rule_schema() -> dict[str, Any]:
    """Return the schema of a rule file, with every fact, estimator and change of this installation.

    Conditions and templates are text here; what stands in them, units and ``yields_to`` are checked by
    ``tracedoc rules check`` alone.
    """
    known = installed_vocabulary()
    fields = {
        "id": {"type": "string", "pattern": "^[a-z][a-z0-9]*(-[a-z0-9]+)*$", "maxLength": 60},
        "title": _TEXT,
        "topic": _one_of(TOPICS),
        "status": _one_of(STATUSES),
        "since": {"type": "string", "pattern": r"^\d+\.\d+(\.\d+)?$"},
        "scope": _one_of(SCOPES),
        "needs": _list_of(_one_of(sorted(NEEDS))),
        "when": _TEXT,
        "says": _TEXT,
        "message": _TEXT,
        "why": _TEXT,
        "params": _named(
            _object(
                {"value": _SCALAR, "unit": _one_of(sorted(UNITS)), "why": _TEXT}, ("value", "unit", "why")
            )
        ),
        "words": _named(_object({"of": _one_of(sorted(known.facts)), "say": _named(_TEXT)}, ("of", "say"))),
        "gain": {
            "anyOf": [
                _one_of(sorted(known.gains)),
                _object(
                    {
                        "at_most": _one_of(sorted(n for n, fact in known.facts.items() if fact.unit == "ms")),
                        "assuming": _TEXT,
                        "within_host_work": {"type": "boolean"},
                    },
                    ("at_most", "assuming"),
                ),
            ]
        },
        "severity": _one_of(SEVERITIES),
        "evidence": _one_of(sorted(known.evidence)),
        "on_cpu": _one_of(ON_CPU),
        "tells": _one_of(TELLS),
        "fixes": _list_of(_fix()),
        "yields_to": _list_of({"type": "string"}),
        "aliases": _list_of({"type": "string"}),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A rule of tracedoc",
        **_object({name: fields[name] for name in (*REQUIRED, *OPTIONAL)}, REQUIRED),
        "oneOf": [{"required": ["gain"]}, {"required": ["severity"]}],
    }


def _fix() -> dict[str, Any]:
    parts = {
        "framework": _one_of(FRAMEWORKS),
        "title": _TEXT,
        "risk": _TEXT,
        "change": _TEXT,
        "advice": _TEXT,
        "url": {"type": "string", "pattern": "^https://"},
        "when": _TEXT,
        "predict": {
            "type": "object",
            "properties": {"change": _one_of(sorted(CHANGES))},
            "required": ["change"],
            "additionalProperties": _SCALAR,
        },
    }
    required, optional = FIX_FIELDS
    return {
        **_object({name: parts[name] for name in (*required, *optional)}, required),
        "anyOf": [{"required": ["change"]}, {"required": ["advice"]}],
    }


def _one_of(words: Iterable[str]) -> dict[str, Any]:
    return {"enum": list(words)}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _named(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


def _object(properties: dict[str, Any], required: Iterable[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
