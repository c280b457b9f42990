"""Put the facts of a run into what a fix is replayed as."""

from __future__ import annotations

from collections.abc import Mapping

from tracedoc.rules.template import placeholders
from tracedoc.values import Value

JUDGED_RANK = "judged-rank"
"""Stands for the rank that a rule judges, as the value of a parameter."""


def fill_prediction(replays: str, values: Mapping[str, Value]) -> str:
    """Return a change with the values of facts put in; a parameter whose fact is unknown is left out."""
    words = []
    for word in replays.split():
        key, _, value = word.partition("=")
        names = placeholders(value)
        if not names:
            words.append(word)
        elif isinstance(number := values.get(names[0]), int | float):
            words.append(f"{key}={number:g}")
    return " ".join(words)
