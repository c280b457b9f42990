"""The catalogue of facts: named measurements with a unit, a scope and a definition.

Two kinds share one catalogue. A ``rank_fact`` is computed from a :class:`RankTimeline` inside the worker
and travels in the digest; a ``run_fact`` is computed once, from the digests of all ranks. Either decorator
turns a function into a fact of the same name, which can be called as before.

A fact names what it needs: of the capture in words (:data:`NEEDS`), and the other facts that it reads. Those
are imported, so that facts cannot need each other in a circle; :mod:`tracedoc.facts.declared` holds that a
fact reads no others.

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
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import msgspec

from tracedoc.spans import Spans
from tracedoc.units import UNITS
from tracedoc.values import Failed, Unknown, Value

if TYPE_CHECKING:
    from tracedoc.digest.rank_digest import RankDigest
    from tracedoc.timeline.build import RankTimeline

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
        "sends",
    }
)
"""What a fact or a rule may need of a capture."""

NOT_MEASURED = Unknown("not measured")

Result = TypeVar("Result")
Measured = TypeVar("Measured", covariant=True)
Arguments = ParamSpec("Arguments")


class FactDef(msgspec.Struct, frozen=True, eq=False):
    """The definition of one fact. ``compute`` takes a ``RankTimeline`` or a ``RunView``.

    ``interval`` says what each interval is, for a fact that is measured as intervals. Those of a rank's fact
    travel in its digest; ``spans`` finds those of a run's fact, from the run, a digest and its analysed step.
    ``values`` are all that a text may be, where it is one of a few: rules have words for each. ``uses`` are
    the facts that this one reads.
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
    uses: tuple[FactDef, ...] = ()

    @property
    def doc(self) -> str:
        """What the fact means, in plain text: the docstring of the function that computes it."""
        return _plain(inspect.getdoc(self.compute) or "")


class RankFact(FactDef, Generic[Measured], frozen=True, eq=False):
    """A fact of each rank. The driver reads it in the rank's digest."""

    def __call__(self, timeline: RankTimeline) -> Measured:
        """Measure it, in the worker."""
        measured: Measured = self.compute(timeline)
        return measured

    def of(self, digest: RankDigest) -> Value:
        """Its value on the rank of a digest."""
        return digest.facts.get(self.name, NOT_MEASURED)

    def spans_of(self, digest: RankDigest) -> Spans:
        """Its intervals inside the analysed step of a rank; may be empty."""
        return digest.spans(self.name)


class RunFact(FactDef, Generic[Arguments, Measured], frozen=True, eq=False):
    """A fact of the run, measured in the driver."""

    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Measured:
        """Measure it, for the run; one that is measured as intervals, for one rank."""
        measured: Measured = (self.spans or self.compute)(*arguments, **named)  # type: ignore[assignment]
        return measured


class Measurement(msgspec.Struct, frozen=True):
    """A measured fact: the value for the run, and the values by key (rank, group, unit).

    For a fact of scope ``rank``, ``value`` is that of the rank whose step stands for the run.
    """

    definition: FactDef
    value: Value
    values: Mapping[str, Value] = msgspec.field(default_factory=dict)


FactTable = Mapping[str, Measurement]

CATALOG: dict[str, FactDef] = {}
"""Every fact by name, in reading order; filled by :mod:`tracedoc.topics`."""


def _plain(doc: str) -> str:
    """A docstring without the roles and double backticks of reStructuredText: users read it."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", doc).replace("``", "`")


def rank_fact(
    *,
    unit: str,
    needs: tuple[str | FactDef, ...] = (),
    scope: Scope = "rank",
    interval: str = "",
    values: Iterable[str] = (),
) -> Callable[[Callable[[RankTimeline], Measured]], RankFact[Measured]]:
    """Make ``function(RankTimeline) -> Value`` a fact of each rank.

    With ``interval``, the words for one of its intervals, the function returns ``Spans | Unknown``. A text
    that is one of a few says which: ``values``.
    """

    def made(function: Callable[[RankTimeline], Measured]) -> RankFact[Measured]:
        name, texts = function.__name__, tuple(values)
        _check(name, function.__doc__, unit, scope, interval, needs)
        of_capture, uses = _apart(needs)
        fact = RankFact[Measured](
            name, unit, scope, of_capture, "rank", function, interval, None, texts, uses
        )
        CATALOG[name] = fact
        return fact

    return made


def run_fact(
    *,
    unit: str,
    needs: tuple[str | FactDef, ...] = (),
    scope: Scope = "run",
    interval: str = "",
    values: Iterable[str] = (),
) -> Callable[[Callable[Arguments, Measured]], RunFact[Arguments, Measured]]:
    """Make ``function(RunView) -> Value`` (scope run) or ``-> dict[str, Value]`` (others) a fact of the run.

    With ``interval``, the words for one of its intervals, the fact is one of each rank, and its function
    ``(RunView, RankDigest, StepDigest) -> Spans | Unknown`` is asked for the analysed step of each.
    ``values`` are as for :func:`rank_fact`.
    """

    def made(function: Callable[Arguments, Measured]) -> RunFact[Arguments, Measured]:
        name, texts = function.__name__, tuple(values)
        _check(name, function.__doc__, unit, scope, interval, needs)
        of_capture, uses = _apart(needs)
        compute: Callable[..., Any] = _totals(function) if interval else function
        spans: Callable[..., Any] | None = function if interval else None
        fact = RunFact[Arguments, Measured](
            name, unit, scope, of_capture, "run", compute, interval, spans, texts, uses
        )
        CATALOG[name] = fact
        return fact

    return made


def _check(
    name: str, doc: str | None, unit: str, scope: Scope, interval: str, needs: tuple[str | FactDef, ...]
) -> None:
    if name in CATALOG:
        raise ValueError(f"fact {name} is defined twice")
    if not doc and sys.flags.optimize < 2:  # which strips the definitions
        raise ValueError(f"fact {name} has no definition (docstring)")
    if unit not in UNITS:
        raise ValueError(f"fact {name}: unknown unit {unit!r}")
    if not {need for need in needs if isinstance(need, str)} <= NEEDS:
        raise ValueError(f"fact {name}: unknown need in {needs}")
    if interval and (unit != "ms" or scope != "rank"):
        raise ValueError(f"fact {name}: intervals have a length in ms, and belong to a rank")


def _apart(needs: tuple[str | FactDef, ...]) -> tuple[frozenset[str], tuple[FactDef, ...]]:
    """What is needed of the capture, and the other facts."""
    of_capture = frozenset(need for need in needs if isinstance(need, str))
    return of_capture, tuple(need for need in needs if isinstance(need, FactDef))


def _totals(spans: Callable[..., Any]) -> Callable[[Any], dict[str, Value]]:
    """The function of a run that says how long the intervals of each rank are in all, in ms."""

    @wraps(spans)
    def totals(run: Any) -> dict[str, Value]:
        found: dict[str, Value] = run.by_rank(lambda digest, step: total_ms(spans(run, digest, step)))
        return found

    return totals


def total_ms(spans: Spans | Unknown) -> float | Unknown:
    """How long intervals are in all, in ms."""
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
    """A value; one that is no number, or has no end, is a fault of the fact."""
    if isinstance(value, float) and not math.isfinite(value):
        return Failed("error: not a number")
    return value
