"""The change that adds ranks, each with the work of today's: longer rings, more peers to wait for."""

from __future__ import annotations

from functools import cache
from math import log2
from statistics import NormalDist

import numpy as np

from tracedoc.play.run_program import RunProgram
from tracedoc.step.program import Lags, narrow
from tracedoc.trace.vocabulary import busbw_factor
from tracedoc.whatif.changes.change import Arguments, NotApplicable, Parameter, as_change, of_scenario
from tracedoc.whatif.changes.ranks import AT_ONCE, evened

POINT_TO_POINT = ("send", "recv")


@as_change(
    Parameter("by", "the factor", 2.0, 1.0, 64.0),
    assuming="the added ranks have the same kind of link and are as even as today's",
)
def more_ranks(program: RunProgram, arguments: Arguments) -> RunProgram | NotApplicable:
    """The job has this many times as many ranks, each with the work of today's.

    Bytes cross the link as often as the operation needs with so many ranks (nccl-tests' bus bandwidth).
    Latency grows as in a tree in the fast scenario, as in a ring in the slow one. By how much ranks differ
    from their median stays in the fast scenario; in the slow one it grows like the expected largest of so
    many normal deviates: the last of more ranks comes later.
    """
    joins = program.layout.joins
    sizes = {joins.group_sizes[group] for group in set(joins.group.tolist()) if group >= 0} - {1}
    if not sizes:
        return NotApplicable("the step has no collective of several ranks whose group is known")
    if len(sizes) > 1 or max(sizes) < len(program.layout.ranks):
        return NotApplicable("the ranks are split in several ways, of which any could grow")
    if any(joins.kinds[kind] in POINT_TO_POINT for kind in set(joins.kind.tolist())):
        return NotApplicable("a pipeline can grow in stages or in copies of itself")
    now = sizes.pop()
    then = round(now * arguments.number("by"))
    scenario = program.scenario
    split = arguments.splits[scenario]
    tree, ring = log2(then) / log2(now), (then - 1) / (now - 1)
    longer = of_scenario(scenario, tree, (tree * ring) ** 0.5, ring)
    latency = np.minimum(split.latency_ns, program.transfer)
    waiting = np.minimum(np.maximum(split.fixed_ns - split.latency_ns, 0), program.transfer - latency)
    crossings = np.array(
        [busbw_factor(kind, then) / busbw_factor(kind, now) for kind in joins.kinds] or [1.0]
    )[joins.kind]
    moved = program.transfer - latency - waiting
    transfer = np.rint(latency * longer + waiting + moved * crossings).astype(np.int64)
    latest = latest_of(then) / latest_of(now)
    later = of_scenario(scenario, 1.0, (1 + latest) / 2, latest)
    return _with_later_ranks(program, later).edited(transfer=transfer)


@cache
def latest_of(ranks: int) -> float:
    """Return the expected largest of so many standard normal deviates (Blom's approximation, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _with_later_ranks(program: RunProgram, factor: float) -> RunProgram:
    """Return the program in which what ranks take beyond their peers is multiplied."""
    count = len(program.layout.ranks)
    if factor == 1.0 or count < 2:
        return program
    even = evened(program, tuple(range(count)))
    return program.edited(
        lag=_later(program.lag, even.lag, factor),
        own=_later(program.own, even.own, factor),
        dur=_later(program.dur, even.dur, factor),
    )


def _later(column: Lags, usual: Lags, factor: float) -> Lags:
    """Return times of which what is beyond the usual is multiplied."""
    later = np.empty(column.size, dtype=np.int64)
    for begin in range(0, column.size, AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        later[some] = np.rint(usual[some] + factor * (column[some].astype(np.int64) - usual[some]))
    return narrow(later)
