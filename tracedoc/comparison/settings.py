"""What two runs were started with, and where it differs: settings, versions, lines of the script."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracedoc.comparison.scaling import gpus
from tracedoc.diagnosis import Diagnosis

TEXTS = {
    "matrix_dtype": "type of matrix products",
    "parameter_dtype": "type of gathered parameters",
    "reduction_dtype": "type of reduced gradients",
    "activation_checkpointing": "activation checkpointing",
    "compiled": "torch.compile",
    "loader_kind": "who makes the batches",
}
"""Facts that are choices of the script, by the words for them."""

PLACES = {
    "loader_code": "the loader's time is in",
    "host_code": "the host's time is in",
    "straggler_code": "the straggler's time is in",
    "sync_place": "most waits for the GPU are in",
}
"""Facts that name a line of the script."""


class Setting(msgspec.Struct, frozen=True):
    """Something that is not a measurement, and differs; a side without it has ""."""

    name: str
    base: str
    head: str


def settings_that_differ(base: Diagnosis, head: Diagnosis) -> tuple[Setting, ...]:
    """Return device, ranks, strategy, versions, variables and settings of the script that differ.

    What only one side's capture records is left out: the other may have it too.
    """
    pairs = [
        ("device", base.run.device, head.run.device),
        ("GPUs", str(gpus(base)), str(gpus(head))),
        ("strategy", base.run.strategy.name, head.run.strategy.name),
        ("frameworks", ", ".join(base.run.frameworks), ", ".join(head.run.frameworks)),
        ("tracedoc", base.tool_version, head.tool_version),
        *_recorded(base, head),
        *_of_facts(base, head, TEXTS),
    ]
    if base.run.backend and head.run.backend:  # a single process has none
        pairs.append(("backend", base.run.backend, head.run.backend))
    return tuple(Setting(name, before, after) for name, before, after in pairs if before != after)


def places_that_differ(base: Diagnosis, head: Diagnosis) -> tuple[Setting, ...]:
    """Return the lines of the script that the two sides blame, where they differ."""
    return tuple(
        Setting(name, before, after)
        for name, before, after in _of_facts(base, head, PLACES)
        if before != after and not {before, after} <= {"none", ""}
    )


def _recorded(base: Diagnosis, head: Diagnosis) -> Iterator[tuple[str, str, str]]:
    before, after = base.run.settings, head.run.settings
    if before and after:
        for name in dict.fromkeys((*before, *after)):
            yield name, before.get(name, "not set"), after.get(name, "not set")


def _of_facts(base: Diagnosis, head: Diagnosis, names: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, words in names.items():
        old, new = base.facts.get(name), head.facts.get(name)
        if old is not None and new is not None and old.value is not None and new.value is not None:
            yield words, _text(old.value), _text(new.value)


def _text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
