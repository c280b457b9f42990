"""A Rule as the YAML file states it, checked and ready to evaluate."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tracedoc.diagnosis import Fix, Scalar

TOPICS = (
    "communication",
    "sharding",
    "straggler",
    "input",
    "host",
    "memory",
    "compute",
    "pipeline",
    "capture",
)
STATUSES = ("stable", "preview")
SCOPES = ("run", "rank")
ON_CPU = ("capped", "as_usual")
TELLS = ("cause", "time")
FRAMEWORKS = (
    "any",
    "pytorch",
    "ddp",
    "fsdp1",
    "fsdp2",
    "deepspeed",
    "accelerate",
    "trainer",
    "lightning",
    "megatron",
)


class Param(msgspec.Struct, frozen=True):
    """A threshold of a rule, with its unit and the reason for its value."""

    value: Scalar
    unit: str
    why: str


class AtMost(msgspec.Struct, frozen=True):
    """A gain that a fact bounds: the fix gives back at most its time, ``assuming`` what it says.

    With ``within_host_work`` the fix leaves the host its own work, and the step cannot get shorter than that.
    """

    fact: str
    assuming: str
    within_host_work: bool = False


OTHERWISE = "otherwise"
"""Stands for all values of a fact that words do not name."""


class Words(msgspec.Struct, frozen=True):
    """What templates say for the values of a fact: a text for each, or for some and :data:`OTHERWISE`."""

    fact: str
    texts: Mapping[str, str]


def value_key(value: Scalar) -> str:
    """Return how YAML writes the value of a fact: a text, ``true`` or ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Rule(msgspec.Struct, frozen=True):
    """One rule. ``when`` is the source of the condition; ``gain`` is a bound or names an estimator,
    ``evidence`` names the fact whose intervals are shown, both "" without one.

    ``says`` is the clause of the first line behind the title's name, "" where its gain is all.
    ``severity`` is set, and fixed, only for rules without a gain (capture guards). ``yields_to`` lists
    the ids of sharper rules. ``on_cpu`` is "capped" (a CPU trace makes it a note at most: its time shares
    say little) or "as_usual" (counts, loader waits, arrival order). ``tells`` is "cause", or "time" for a
    rule that says where time goes and not why. ``aliases`` are former ids, and names that people look for;
    several rules may share one. ``fix_when`` has a condition for each of ``fixes``, empty for one that always
    helps; it is empty itself where all do.
    """

    id: str
    title: str
    topic: str
    status: str
    since: str
    scope: str
    needs: frozenset[str]
    when: str
    message: str
    why: str
    says: str = ""
    params: Mapping[str, Param] = msgspec.field(default_factory=dict)
    words: Mapping[str, Words] = msgspec.field(default_factory=dict)
    gain: AtMost | str = ""
    evidence: str = ""
    severity: str = ""
    on_cpu: str = "capped"
    tells: str = "cause"
    fixes: tuple[Fix, ...] = ()
    fix_when: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str = ""
