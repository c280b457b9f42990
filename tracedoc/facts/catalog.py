"""The catalogue of facts: named measurements with a unit, a scope and a definition.

A decorator turns a function into a fact of the same name, which can be called as before. What the
function sees says where it is measured:

- ``rank_fact``: the timeline of a rank, in the worker; the value travels in the rank's digest;
- ``digest_fact``: the run, the digest of a rank and its analysed step, in the driver;
- ``ranks_fact``: the run and the digest of a rank, in the driver, also without a step to analyse;
- ``manifest_fact``: a rank's part of the manifest of `tracedoc collect`, in the driver;
- ``run_fact``: the run, in the driver.

A fact names what it needs: of the capture in words (:data:`NEEDS`), and the other facts that it reads. Those
are imported, so that facts cannot need each other in a circle; :mod:`tracedoc.topics` holds that a fact
reads no others.

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
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import msgspec

from tracedoc.spans import Spans
from tracedoc.units import UNITS
from tracedoc.values import Failed, Unknown, Value, answering

if TYPE_CHECKING:
    from tracedoc.ranks.run_view import RunView
    from tracedoc.run.job import RankJob
    from tracedoc.step.rank_digest import RankDigest, StepDigest
    from tracedoc.timeline.build import RankTimeline

Scope = Literal["run", "rank"]
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

NOT_MEASURED = Unknown("not measured")
NO_MANIFEST = Unknown("no manifest: capture with `tracedoc collect`")

Result = TypeVar("Result")
Measured = TypeVar("Measured", covariant=True)
Arguments = ParamSpec("Arguments")


class Fact(msgspec.Struct, frozen=True, eq=False):
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
    uses: tuple[Fact, ...] = ()

    @property
    def doc(self) -> str:
        """What the fact means, in plain text: the docstring of the function that computes it."""
        return _definition(self.compute)


class RankFact(Fact, Generic[Measured], frozen=True, eq=False):
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


class RunFact(Fact, Generic[Arguments, Measured], frozen=True, eq=False, kw_only=True):
    """A fact that is measured in the driver: ``function`` of the run or of one rank, ``compute`` of all."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Measured:
        """Measure it, for what its function takes."""
        measured: Measured = self.function(*arguments, **named)
        return measured

    def by_rank(self, run: RunView) -> dict[str, Value]:
        """Measure it on all ranks of a run."""
        found: dict[str, Value] = self.compute(run)
        return found


class Measurement(msgspec.Struct, frozen=True):
    """A measured fact: the value for the run, and the values by key (rank, group, unit).

    For a fact of scope ``rank``, ``value`` is that of the rank whose step stands for the run.
    """

    definition: Fact
    value: Value
    values: Mapping[str, Value] = msgspec.field(default_factory=dict)


FactTable = Mapping[str, Measurement]

CATALOG: dict[str, Fact] = {}
"""Every fact by name, in reading order; filled by :mod:`tracedoc.topics`."""


@cache
def _definition(function: Callable[..., Any]) -> str:
    """A docstring without the roles and double backticks of reStructuredText: users read it."""
    doc = inspect.getdoc(function) or ""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", doc).replace("``", "`")


Needs = tuple[str | Fact, ...]
if TYPE_CHECKING:
    OfDigest = Callable[[RunView, RankDigest, StepDigest], Measured]
    DigestFact = RunFact[[RunView, RankDigest, StepDigest], Measured]


def rank_fact(
    *, unit: str, needs: Needs = (), interval: str = "", values: Iterable[str] = ()
) -> Callable[[Callable[[RankTimeline], Measured]], RankFact[Measured]]:
    """Make ``function(RankTimeline) -> Value`` a fact of each rank.

    With ``interval``, the words for one of its intervals, the function returns ``Spans | Unknown``. A text
    that is one of a few says which: ``values``.
    """

    def made(function: Callable[[RankTimeline], Measured]) -> RankFact[Measured]:
        of_capture, uses = _checked(function, unit, needs, interval)
        fact = RankFact[Measured](
            name=function.__name__,
            unit=unit,
            scope="rank",
            needs=of_capture,
            kind="rank",
            compute=answering(function),
            interval=interval,
            values=tuple(values),
            uses=uses,
        )
        CATALOG[fact.name] = fact
        return fact

    return made


def digest_fact(
    *, unit: str, needs: Needs = (), interval: str = "", values: Iterable[str] = ()
) -> Callable[[OfDigest[Measured]], DigestFact[Measured]]:
    """Make ``function(RunView, RankDigest, StepDigest) -> Value`` a fact of each rank with an analysed step.

    ``interval`` and ``values`` are as for :func:`rank_fact`.
    """

    def made(asked: OfDigest[Measured]) -> DigestFact[Measured]:
        function = answering(asked)

        @wraps(function)
        def compute(run: RunView) -> dict[str, Value]:
            def measured(digest: RankDigest, step: StepDigest) -> Value:
                found: Any = function(run, digest, step)
                return total_ms(found) if interval else found

            return run.by_rank(measured)

        return _of_run(function, compute, unit, "rank", needs, interval, values)

    return made


def ranks_fact(
    *, unit: str, needs: Needs = (), values: Iterable[str] = ()
) -> Callable[[Callable[[RunView, RankDigest], Value]], RunFact[[RunView, RankDigest], Value]]:
    """Make ``function(RunView, RankDigest) -> Value`` a fact of each captured rank."""

    def made(asked: Callable[[RunView, RankDigest], Value]) -> RunFact[[RunView, RankDigest], Value]:
        function = answering(asked)

        @wraps(function)
        def compute(run: RunView) -> dict[str, Value]:
            return {str(digest.rank): function(run, digest) for digest in run.digests}

        return _of_run(function, compute, unit, "rank", needs, "", values)

    return made


def manifest_fact(
    *, unit: str, needs: Needs = (), values: Iterable[str] = ()
) -> Callable[[Callable[[RankJob], Value]], RunFact[[RankJob], Value]]:
    """Make ``function(RankJob) -> Value`` a fact of each captured rank, unknown without a manifest."""

    def made(asked: Callable[[RankJob], Value]) -> RunFact[[RankJob], Value]:
        function = answering(asked)

        @wraps(function)
        def compute(run: RunView) -> dict[str, Value]:
            jobs = {str(digest.rank): job_of(run, digest) for digest in run.digests}
            return {rank: one if isinstance(one, Unknown) else function(one) for rank, one in jobs.items()}

        return _of_run(function, compute, unit, "rank", needs, "", values)

    return made


def run_fact(
    *, unit: str, needs: Needs = (), values: Iterable[str] = ()
) -> Callable[[Callable[[RunView], Measured]], RunFact[[RunView], Measured]]:
    """Make ``function(RunView) -> Value`` a fact of the run."""

    def made(asked: Callable[[RunView], Measured]) -> RunFact[[RunView], Measured]:
        function = answering(asked)
        return _of_run(function, function, unit, "run", needs, "", values)

    return made


def job_of(run: RunView, digest: RankDigest) -> RankJob | Unknown:
    """A captured rank's part of the manifest."""
    return run.job.rank(digest.rank) or NO_MANIFEST


def _of_run(
    function: Callable[..., Any],
    compute: Callable[[RunView], Any],
    unit: str,
    scope: Scope,
    needs: Needs,
    interval: str,
    values: Iterable[str],
) -> RunFact[Any, Any]:
    of_capture, uses = _checked(function, unit, needs, interval)
    fact = RunFact[Any, Any](
        name=function.__name__,
        unit=unit,
        scope=scope,
        needs=of_capture,
        kind="run",
        compute=compute,
        interval=interval,
        spans=function if interval else None,
        values=tuple(values),
        uses=uses,
        function=function,
    )
    CATALOG[fact.name] = fact
    return fact


def _checked(
    function: Callable[..., Any], unit: str, needs: Needs, interval: str
) -> tuple[frozenset[str], tuple[Fact, ...]]:
    """What a fact needs of the capture, and the facts that it uses; raises ValueError for what is no fact."""
    name, of_capture = function.__name__, frozenset(need for need in needs if isinstance(need, str))
    if name in CATALOG:
        raise ValueError(f"fact {name} is defined twice")
    if not function.__doc__ and sys.flags.optimize < 2:  # which strips the definitions
        raise ValueError(f"fact {name} has no definition (docstring)")
    if unit not in UNITS:
        raise ValueError(f"fact {name}: unknown unit {unit!r}")
    if not of_capture <= NEEDS:
        raise ValueError(f"fact {name}: unknown need in {sorted(of_capture)}")
    if interval and unit != "ms":
        raise ValueError(f"fact {name}: intervals have a length in ms")
    return of_capture, tuple(need for need in needs if isinstance(need, Fact))


def total_ms(spans: Spans | Unknown) -> float | Unknown:
    """How long intervals are in all, in ms."""
    return spans if isinstance(spans, Unknown) else spans.total_ns / 1e6


def attempt(function: Callable[..., Result], *arguments: object) -> Result | Failed:
    """Call a function; if it raises, only what it measures is lost, and rules over it end in an error."""
    try:
        return function(*arguments)
    except Exception as error:
        return Failed(f"error: {type(error).__name__}: {error}", traceback.format_exc())


def computed(definition: Fact, subject: object) -> tuple[Value | dict[str, Value], Spans | None]:
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
