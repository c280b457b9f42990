"""A rule as its YAML file states it; these types are what the loader reads and what the JSON schema says."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct, field

from tracedoc.diagnosis import Scalar

Topic = Literal[
    "communication",
    "sharding",
    "straggler",
    "input",
    "host",
    "memory",
    "compute",
    "pipeline",
    "capture",
]
TOPICS: tuple[str, ...] = get_args(Topic)
Framework = Literal[
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
]

Text = Annotated[str, Meta(min_length=1)]
Id = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$",
        max_length=60,
        description="lower-case words joined by hyphens",
    ),
]
Version = Annotated[str, Meta(pattern=r"^\d+\.\d+(\.\d+)?$", description='a version such as "0.1"')]
Url = Annotated[
    str, Meta(pattern=r"^https://[^\s\"'<>]+$", description="an address that starts with https://")
]

# Words of which an installation knows all; see Vocabulary.
FactName = Annotated[str, Meta(title="fact")]
Evidence = Annotated[str, Meta(title="evidence")]
LimitCode = Annotated[str, Meta(title="limit")]
CauseId = Annotated[str, Meta(title="cause")]
Need = Annotated[str, Meta(title="need")]
UnitName = Annotated[str, Meta(title="unit")]


class _Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a rule file. What may be left out is "" then, which no file may say."""


class Param(_Part, frozen=True):
    """A threshold of a rule, with its unit and the reason for its value."""

    value: Scalar
    unit: UnitName
    why: Text


class AtMost(_Part, frozen=True):
    """A gain that a fact bounds: the fix gives back at most its time, ``assuming`` what it says.

    ``step`` is the fact with the length of the step that this time is of, where that is not the analysed one;
    ``behind`` that of what has to hide the time, as long as which it is gained at most.
    """

    fact: FactName = field(name="at_most")
    assuming: Text
    step: FactName | None = field(name="of_step", default=None)
    behind: FactName | None = None


OTHERWISE = "otherwise"
"""Stands for all values of a fact that words do not name."""


class Words(_Part, frozen=True):
    """What templates say for the values of a fact: a text for each, or for some and :data:`OTHERWISE`."""

    fact: FactName = field(name="of")
    texts: dict[str, Text] = field(name="say")


class RuleFix(_Part, frozen=True):
    """A fix in the words of one framework, offered where ``when`` holds and ``unless`` does not.

    ``unless`` says that the job has it already, or has not what it changes: not known is no reason to leave
    a fix out. Both are "" where the rule's ``fits`` says why its fixes need neither.

    It has a ``change`` that can be pasted, ``advice`` in prose, or both. ``predict`` is the change that it is
    replayed as: its name under "change", and its parameters, which may be facts in braces.
    """

    framework: Framework
    title: Text
    risk: Text
    change: Text = ""
    advice: Text = ""
    url: Url = ""
    when: Text = ""
    unless: Text = ""
    predict: dict[str, Scalar] = field(default_factory=dict)

    @property
    def replays(self) -> str:
        """The change of ``predict`` as ``tracedoc whatif`` takes it, "" without one."""
        return " ".join(
            str(value) if key == "change" else f"{key}={value:g}" if _is_number(value) else f"{key}={value}"
            for key, value in sorted(self.predict.items(), key=lambda item: item[0] != "change")
        )


class Rule(_Part, frozen=True):
    """One rule. ``when`` is the source of the condition; ``gain`` bounds what mending it gives, which without
    one is as the ledger has it; ``evidence`` names the fact whose intervals are shown, "" without one.

    ``cause`` are the entries of the ledger that it names: ids, or families, which stand for their members;
    ``part_of`` those of which it names a part, whose size its gain bounds, of the first before the next.
    ``stands_for`` are those of which it gives the reason and the fixes also where no rule tells them,
    with its message where what bounds the gain is seen, else with ``observed``.
    ``says`` is the clause of the first line behind the title's name and cost; "" for the title's second half.
    ``severity`` is set, and fixed, only for rules without a gain (capture guards). ``on_cpu`` is "capped"
    (a CPU trace makes it a note at most: its time shares say little) or "as_usual" (counts, loader waits,
    arrival order). ``tells`` is "cause", or "time" for a rule that says where time goes and not why (it
    speaks of what the others leave), or "batch" for one whose cost is what twice the batch saves.
    ``fits`` says why ``fixes`` without a condition suit every job in which the rule holds. ``limit`` is
    the code of one that says the same as its finding: both are shown as one. ``aliases`` are former ids,
    and names that people look for; rules may share one.
    """

    id: Id
    title: Text
    topic: Topic
    status: Literal["stable", "preview"]
    since: Version
    scope: Literal["run", "rank"]
    needs: frozenset[Need]
    when: Text
    message: Text
    why: Text
    cause: tuple[CauseId, ...] = ()
    part_of: tuple[CauseId, ...] = ()
    stands_for: tuple[CauseId, ...] = ()
    observed: Text = ""
    says: Text = ""
    params: dict[str, Param] = field(default_factory=dict)
    words: dict[str, Words] = field(default_factory=dict)
    gain: AtMost | None = None
    evidence: Evidence = ""
    severity: Literal["critical", "warning", "note"] = ""  # type: ignore[assignment]
    on_cpu: Literal["capped", "as_usual"] = "capped"
    tells: Literal["cause", "time", "batch"] = "cause"
    fixes: tuple[RuleFix, ...] = ()
    fits: Text = ""
    limit: LimitCode = ""
    aliases: tuple[Text, ...] = ()


def value_key(value: Scalar) -> str:
    """How YAML writes the value of a fact: a text, ``true`` or ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
