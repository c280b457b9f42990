"""Read what a fix is replayed as: the ``predict`` field of a rule's fix."""

from __future__ import annotations

from collections.abc import Container

import yaml

from tracedoc.errors import ChangeError
from tracedoc.rules.nodes import fail, read_mapping, read_text
from tracedoc.rules.prediction import JUDGED_RANK
from tracedoc.rules.template import placeholders
from tracedoc.whatif.changes.registry import request

STAND_IN = 1.0
"""The value of what is only known of a run, while a rule is read."""


def read_prediction(file: str, node: yaml.Node, known: Container[str]) -> str:
    """Return the change of a ``predict`` field as ``tracedoc whatif`` takes it.

    The value of a parameter may be that of a fact in braces, one of ``known``, which is put in when a run is
    judged. Raises :class:`RuleError` where there is no such change, or its parameters are wrong.
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
        if unknown := [name for name in placeholders(str(value.value)) if name not in known]:
            fail(file, value, f"predict: there is no fact {unknown[0]!r}")
    try:
        # Which rank is judged, and the values of facts, are only known of a run.
        request(name, {key: STAND_IN if _of_run(value) else value for key, value in given.items()})
    except ChangeError as error:
        fail(file, node, f"predict: {error.message}; {error.hint}")
    words = (
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()
    )
    return " ".join((name, *words))


def _of_run(value: float | str) -> bool:
    return value == JUDGED_RANK or bool(placeholders(str(value)))
