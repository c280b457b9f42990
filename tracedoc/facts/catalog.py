"""The catalogue of facts: named measurements with a unit, a scope and a definition.

Two kinds share one catalogue. A ``rank_fact`` is computed from a :class:`RankTimeline` inside the worker
and travels in the digest; a ``run_fact`` is computed once, from the digests of all ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from tracedoc.units import UNITS
from tracedoc.values import Unknown, Value

Scope = Literal["run", "rank", "step", "group", "unit"]
NEEDS = frozenset(
    {
        "gpu",
        "kernels",
        "launches",
        "collectives",
        "multi_rank",
        "host_ops",
        "shapes",
        "memory",
        "sharding",
        "tf32",
    }
)
"""What a fact or a rule may need of a capture."""


class FactDef(msgspec.Struct, frozen=True):
    """The definition of one fact. ``compute`` takes a ``RankTimeline`` or a ``RunView``."""

    name: str
    unit: str
    scope: Scope
    needs: frozenset[str]
    doc: str
    kind: Literal["rank", "run"]
    compute: Callable[[Any], Any]


class Measurement(msgspec.Struct, frozen=True):
    """A measured fact: the value for the run, and the values by key (rank, group, unit).

    For a fact of scope ``rank``, ``value`` is that of the rank whose step stands for the run.
    """

    definition: FactDef
    value: Value
    values: Mapping[str, Value] = msgspec.field(default_factory=dict)


FactTable = Mapping[str, Measurement]

CATALOG: dict[str, FactDef] = {}
"""Every fact by name, in order of definition; filled when ``tracedoc.facts`` is imported."""

Function = TypeVar("Function", bound=Callable[..., Any])


def rank_fact(
    name: str, *, unit: str, needs: tuple[str, ...] = (), scope: Scope = "rank"
) -> Callable[[Function], Function]:
    """Register ``function(RankTimeline) -> Value`` as a fact of each rank."""
    return _register(name, unit, scope, needs, "rank")


def run_fact(
    name: str, *, unit: str, needs: tuple[str, ...] = (), scope: Scope = "run"
) -> Callable[[Function], Function]:
    """Register ``function(RunView) -> Value`` (scope run) or ``-> dict[str, Value]`` (other scopes)."""
    return _register(name, unit, scope, needs, "run")


def _register(
    name: str, unit: str, scope: Scope, needs: tuple[str, ...], kind: Literal["rank", "run"]
) -> Callable[[Function], Function]:
    if unit not in UNITS:
        raise ValueError(f"fact {name}: unknown unit {unit!r}")
    if not set(needs) <= NEEDS:
        raise ValueError(f"fact {name}: unknown need in {needs}")

    def register(function: Function) -> Function:
        if name in CATALOG:
            raise ValueError(f"fact {name} is defined twice")
        doc = inspect.getdoc(function) or ""
        if not doc and sys.flags.optimize < 2:  # which strips the definitions
            raise ValueError(f"fact {name} has no definition (docstring)")
        CATALOG[name] = FactDef(name, unit, scope, frozenset(needs), doc, kind, function)
        return function

    return register


def computed(definition: FactDef, subject: object) -> Value | dict[str, Value]:
    """Compute one fact. A failure costs this fact only: it becomes Unknown, and its rules say error."""
    try:
        result: Value | dict[str, Value] = definition.compute(subject)
    except Exception as error:
        return Unknown(f"error: {type(error).__name__}: {error}")
    if isinstance(result, float) and result != result:
        return Unknown("error: not a number")
    return result
