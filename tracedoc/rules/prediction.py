"""Read what a fix is replayed as: the ``predict`` field of a rule's fix."""

from __future__ import annotations

import yaml

from tracedoc.errors import ChangeError
from tracedoc.rules.nodes import fail, read_mapping, read_text
from tracedoc.whatif.changes.registry import request

JUDGED_RANK = "judged-rank"
"""Stands for the rank that a rule judges, as the value of a parameter."""


def read_prediction(file: str, node: yaml.Node) -> str:
    """Return the change of a ``predict`` field as ``tracedoc whatif`` takes it.

    Raises :class:`RuleError` where there is no such change, or its parameters are wrong.
    """
    fields = read_mapping(file, node, "predict")
    if "change" not in fields:
        fail(file, node, "predict has no change")
    name = read_text(file, fields["change"], "change")
    given: dict[str, float | str] = {}
    for key, value in fields.items():
        if key == "change":
            continue
        if not isinstance(value, yaml.ScalarNode):
            fail(file, value, f"predict: {key} is a number or a word")
        number = value.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        given[key] = float(value.value) if number else str(value.value)
    try:
        # Which rank is judged is only known of a run.
        request(name, {key: 0.0 if value == JUDGED_RANK else value for key, value in given.items()})
    except ChangeError as error:
        fail(file, node, f"predict: {error.message}; {error.hint}")
    words = (
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()
    )
    return " ".join((name, *words))
