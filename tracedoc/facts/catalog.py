"""The catalogue of facts: named measurements with a unit, a scope and a definition.

Two kinds share one catalogue. A ``rank_fact`` is computed from a :class:`RankTimeline` inside the worker
and travels in the digest; a ``run_fact`` is computed once, from the digests of all ranks.

A fact that is a length of time may be measured as intervals: its function returns :class:`Spans`, the fact's
value is their total in ms, and rules that name the fact show them as evidence.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVar

import msgspec

from tracedoc.spans import Spans
from tracedoc.units import UNITS
from tracedoc.values import Failed, Unknown, Value

Scope = Literal["run", "rank", "step", "group", "unit"]
NEEDS = frozenset(
    {
        "cpu",
        "gpu",
        "kernels",
        "launches",
        "collectives",
        "multi_rank",
        "host_ops",
        "shapes",
        "memory",
        "sharding",
        "sends",
    }
)
"""What a fact or a rule may need of a capture."""


class FactDef(msgspec.Struct, frozen=True):
    """The definition of one fact. ``compute`` takes a ``RankTimeline`` or a ``RunView``.

    ``interval`` says what each interval is, for a fact that is measured as intervals. Those of a rank's fact
    travel in its digest; ``spans`` finds those of a run's fact, from the run, a digest and its analysed step.
    ``values`` are all that a text may be, where it is one of a few: rules have words for each.
    """

    name: str
    unit: str
    scope: Scope
    needs: frozenset[str]
    kind: Literal["rank", "run"]
    compute: Callable[[Any], Any]
    interval: str = ""
    spans: Callable[..., Spans | Unknown] | None = None
    values: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        """What the fact means, in plain text: the docstring of the function that computes it."""
        return _plain(inspect.getdoc(self.compute) or "")


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
Result = TypeVar("Result")


def _plain(doc: str) -> str:
    """Return a docstring without the roles and double backticks of reStructuredText: users read it."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", doc).replace("``", "`")


def rank_fact(
    name: str,
    *,
    unit: str,
    needs: tuple[str, ...] = (),
    scope: Scope = "rank",
    interval: str = "",
    values: Iterable[str] = (),
) -> Callable[[Function], Function]:
    """Register ``function(RankTimeline) -> Value`` as a fact of each rank.

    With ``interval``, the words for one of its intervals, the function returns ``Spans | Unknown``. A text
    that is one of a few says which: ``values``.
    """
    return _register(name, unit, scope, needs, "rank", interval, tuple(values))


def run_fact(
    name: str,
    *,
    unit: str,
    needs: tuple[str, ...] = (),
    scope: Scope = "run",
    interval: str = "",
    values: Iterable[str] = (),
) -> Callable[[Function], Function]:
    """Register ``function(RunView) -> Value`` (scope run) or ``-> dict[str, Value]`` (other scopes).

    With ``interval``, the words for one of its intervals, the fact is one of each rank, and its function
    ``(RunView, RankDigest, StepDigest) -> Spans | Unknown`` is asked for the analysed step of each.
    ``values`` are as for :func:`rank_fact`.
    """
    return _register(name, unit, scope, needs, "run", interval, tuple(values))


def _register(
    name: str,
    unit: str,
    scope: Scope,
    needs: tuple[str, ...],
    kind: Literal["rank", "run"],
    interval: str,
    values: tuple[str, ...],
) -> Callable[[Function], Function]:
    if unit not in UNITS:
        raise ValueError(f"fact {name}: unknown unit {unit!r}")
    if not set(needs) <= NEEDS:
        raise ValueError(f"fact {name}: unknown need in {needs}")
    if interval and (unit != "ms" or scope != "rank"):
        raise ValueError(f"fact {name}: intervals have a length in ms, and belong to a rank")

    def register(function: Function) -> Function:
        if name in CATALOG:
            raise ValueError(f"fact {name} is defined twice")
        if not function.__doc__ and sys.flags.optimize < 2:  # which strips the definitions
            raise ValueError(f"fact {name} has no definition (docstring)")
        by_rank = bool(interval) and kind == "run"
        CATALOG[name] = FactDef(
            name,
            unit,
            scope,
            frozenset(needs),
            kind,
            _totals(function) if by_rank else function,
            interval,
            function if by_rank else None,
            values,
        )
        return function

    return register


def _totals(spans: Callable[..., Spans | Unknown]) -> Callable[[Any], dict[str, Value]]:
    """Return the function of a run that says how long the intervals of each rank are in all, in ms."""

    @wraps(spans)
    def totals(run: Any) -> dict[str, Value]:
        found: dict[str, Value] = run.by_rank(lambda digest, step: total_ms(spans(run, digest, step)))
        return found

    return totals


def total_ms(spans: Spans | Unknown) -> float | Unknown:
    """Return how long intervals are in all."""
    return spans if isinstance(spans, Unknown) else spans.total_ns / 1e6


def attempt(function: Callable[..., Result], *arguments: object) -> Result | Failed:
    """Call a function; if it raises, only what it measures is lost, and rules over it end in an error."""
    try:
        return function(*arguments)
    except Exception as error:
        return Failed(f"error: {type(error).__name__}: {error}", traceback.format_exc())


def computed(definition: FactDef, subject: object) -> tuple[Value | dict[str, Value], Spans | None]:
    """Compute one fact of a timeline or a run: its value or values, and its intervals if it has some here."""
    result = attempt(definition.compute, subject)
    if isinstance(result, Spans):
        return total_ms(result), result
    if isinstance(result, dict):
        return {key: _finite(value) for key, value in result.items()}, None
    return _finite(result), None


def _finite(value: Value) -> Value:
    """Return a value; one that is no number, or has no end, is a fault of the fact."""
    if isinstance(value, float) and not math.isfinite(value):
        return Failed("error: not a number")
    return value
