"""What ranks did beside what their peers did: in whole steps, and before collectives where they were late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.idle_causes import CAUSES as IDLE_CAUSES
from tracedoc.idle_causes import LATE_LAUNCH
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.timeline.host import WORK
from tracedoc.trace.distinct import median
from tracedoc.values import once

Floats = npt.NDArray[np.float64]

SAME_AMOUNT = 0.01
"""Amounts of data or arithmetic that differ by no more than this are the same work."""

SAME_KERNELS = 0.02
"""Numbers of kernels that differ by no more than this are one program: a rank may log a little more."""

MEASURES = ("arithmetic", "thread blocks", "kernels")
"""Measures of a rank's work: recorded shapes, else sizes of grids; and the number of kernels."""

CPU_MEASURES = ("arithmetic", "thread blocks", "operators")


class Shares(msgspec.Struct, frozen=True, eq=False):
    """The work of all ranks in the steps that all of them captured whole, as arrays ``[rank, step]``.

    Ranks are in the order of ``RunView.digests``. ``amount[m]`` follows :data:`MEASURES`; NaN where not
    known. ``compute_ns`` is the compute of the step.
    """

    steps: tuple[int, ...]
    amount: tuple[Floats, Floats, Floats]
    compute_ns: Floats

    def alike(self, place: int) -> npt.NDArray[np.bool_]:
        """Marks the ranks that do the same work as one in every step; itself only without sizes."""
        arithmetic, blocks, kernels = (_differences(values, place) for values in self.amount)
        sized = np.where(np.isnan(arithmetic), blocks, arithmetic) <= SAME_AMOUNT
        same = np.asarray((sized & (kernels <= SAME_KERNELS)).all(axis=1))
        same[place] = True
        return same


@once
def work_shares(run: RunView) -> Shares:
    """Return the work of all ranks in their common complete steps; without such steps there is none."""
    steps = run.common_steps
    kernels, blocks, flops, compute = (np.full((len(run.digests), len(steps)), np.nan) for _ in range(4))
    for place, digest in enumerate(run.digests):
        own = list(digest.steps)
        at = {step.index: number for number, step in enumerate(own)}
        chosen = [at[step] for step in steps]
        compute[place] = [own[number].budget.compute_ns for number in chosen]
        if digest.work is not None:
            kernels[place] = digest.work.kernels[chosen]
            blocks[place] = digest.work.blocks[chosen]
            flops[place] = digest.work.flops[chosen]
    return Shares(steps, (_known(flops), _known(blocks), _known(kernels)), compute)


def _known(values: Floats) -> Floats:
    """Return amounts with NaN in the steps in which a rank has none: it did not record them."""
    return np.where((values > 0).all(axis=0, keepdims=True), values, np.nan)


def _differences(values: Floats, place: int) -> Floats:
    return np.asarray(np.abs(values / values[place] - 1.0))


CAUSES = ("kernels", *WORK[2:])
"""What can make a rank late: :data:`WORK`, with all kernels as one."""

OF_THE_HOST = frozenset({*LATE_LAUNCH, *IDLE_CAUSES} - {"launch", "sync", "dependency"})
"""Causes of idle time that are the host's own time."""

_OF_HOST = np.array([cause in OF_THE_HOST for cause in CAUSES])

MORE_OPERATORS = 1.1
"""On a CPU so many times: reading and logging a value takes some operators, and none of the time."""

AHEAD = 0.02
"""A host whose every launch is early by this share of the step may wait where the trace does not show it."""

REAL_SHARE = 0.5
"""So much of what a rank starts more before collectives must be more in whole steps as well."""


class Did(msgspec.Struct, frozen=True, eq=False):
    """What one rank did before a collective: times in us by :data:`CAUSES`, kernels, and its longest absence.

    ``place`` is the position of the rank, ``phase`` where in the step its host was away for ``away_us``.
    """

    place: int
    us: Int64Array
    kernels: int
    away_us: int
    phase: int


class WorkBefore(msgspec.Struct, frozen=True, eq=False):
    """How much more than the median peer a rank did before collectives.

    ``excess_us[step, cause]`` is time by :data:`CAUSES`, ``more_kernels`` the ratio of kernels (CPU:
    operators) that it started, ``away_phase`` where in the step its host was longest away.
    """

    excess_us: Int64Array
    more_kernels: float = 1.0
    away_phase: int = 0


def work_before(
    run: RunView, place: int, operations: npt.NDArray[np.intp], steps: Sequence[int]
) -> WorkBefore:
    """Compare what a rank did before the operations to which it came last with what its peers did."""
    excess = np.zeros((len(steps), len(CAUSES)), dtype=np.int64)
    kernels = peer_kernels = longest = phase = 0
    members: dict[int, set[int]] = defaultdict(set)
    within: dict[int, list[int]] = defaultdict(list)
    for operation in operations.tolist():
        did = list(did_before(run, operation))
        own = next((one for one in did if one.place == place), None)
        peers = [one for one in did if one.place != place]
        if own is not None and own.away_us > longest:
            longest, phase = own.away_us, own.phase
        if own is None or not peers:
            continue
        step = int(run.matching.step[operation])
        members[step].update(one.place for one in peers)
        within[step].append(operation)
        excess[steps.index(step)] += own.us - _median(peers)
        kernels += own.kernels
        peer_kernels += int(median([one.kernels for one in peers]))
    for step, found in within.items():
        over_all = _excess_over(run, place, found[0], found[-1])
        if over_all is not None:
            excess[steps.index(step)] = np.minimum(excess[steps.index(step)], over_all)
    if run.digests[place].is_cpu:
        longer_us = dict(zip(steps, excess[:, CAUSES.index("kernels")].tolist(), strict=True))
        return WorkBefore(excess, _operators_in_whole_steps(run, place, members, longer_us), phase)
    more = kernels - peer_kernels
    is_real = peer_kernels and _more_in_whole_steps(run, place, members) >= REAL_SHARE * more
    return WorkBefore(excess, kernels / peer_kernels if is_real else 1.0, phase)


def host_us(run: RunView, place: int, step: int) -> Int64Array:
    """What the host of a rank did in a step while its device was idle, by :data:`CAUSES`, in us."""
    work, rows = run.digests[place].host_work, np.flatnonzero(run.digests[place].collectives.step == step)
    if work is None or not rows.size:
        return np.zeros(len(CAUSES), dtype=np.int64)
    return np.where(_OF_HOST, _by_cause(work.before.total_us(int(rows[0]), int(rows[-1]) + 1)), 0)


def did_before(run: RunView, operation: int) -> Iterator[Did]:
    """Yield what each rank did before an operation that it took part in, where that is known."""
    for place, row in _parts(run, operation):
        work = run.digests[place].host_work
        if work is not None:
            before = work.before
            yield Did(
                place,
                _by_cause(before.us(row)),
                int(before.kernels[row]),
                int(before.away_us[row]),
                int(before.away_phase[row]),
            )


def _median(peers: Sequence[Did]) -> Int64Array:
    return np.asarray(median([one.us for one in peers], axis=0).astype(np.int64))


def _excess_over(run: RunView, place: int, first: int, last: int) -> Int64Array | None:
    """What a rank did longer than its peers up to operation ``last`` since before ``first``, in us.

    Between two operations a rank may do more than its peers because they did the same earlier, beside a wait
    that lies between two others. Over all of them that evens out. ``None`` where no peer was in both.
    """
    ends = dict(_parts(run, last))
    did: dict[int, Int64Array] = {}
    for other, row in _parts(run, first):
        work = run.digests[other].host_work
        if other in ends and work is not None:
            did[other] = _by_cause(work.before.total_us(row, ends[other] + 1))
    peers = [us for other, us in did.items() if other != place]
    if place not in did or not peers:
        return None
    return np.asarray(did[place] - median(peers, axis=0).astype(np.int64))


def _parts(run: RunView, operation: int) -> list[tuple[int, int]]:
    """The place and the row of each rank that took part in an operation."""
    matching = run.matching
    parts = slice(int(matching.first[operation]), int(matching.first[operation + 1]))
    return list(zip(matching.part_rank[parts].tolist(), matching.part_row[parts].tolist(), strict=True))


def _by_cause(us: Int64Array) -> Int64Array:
    """Times by :data:`WORK` as times by :data:`CAUSES`."""
    return np.append(us[:2].sum(), us[2:])


def _more_in_whole_steps(run: RunView, place: int, members: dict[int, set[int]]) -> float:
    """How many kernels more than its peers a rank starts in the steps in which it comes late.

    Backward passes and collectives run beside each other: where a collective starts a little later among
    the same kernels, more of them lie before it, and as many fewer behind it. Infinite where not known.
    """
    more = sum(more for more, _ in _more_by_step(run, place, members).values())
    known = members.keys() <= set(work_shares(run).steps) and not np.isnan(more)
    return float(more) if known else inf


def _operators_in_whole_steps(
    run: RunView, place: int, members: dict[int, set[int]], longer_us: dict[int, int]
) -> float:
    """How many times the operators of its peers a CPU rank runs in the steps in which it comes late.

    Operators that follow each other closely are one piece of compute before a collective, so whole steps are
    compared: at least so many more are in those with half of what its operators take longer. 1 where that is
    not known, and for a few more operators, which are no work to speak of.
    """
    by_step = _more_by_step(run, place, members)
    ratios = sorted((1.0 + more / peers, longer_us[step]) for step, (more, peers) in by_step.items())
    longer = np.cumsum([max(us, 0) for _, us in ratios])
    if not ratios or longer[-1] == 0:
        return 1.0
    ratio = ratios[int(np.searchsorted(longer, longer[-1] / 2))][0]
    return ratio if ratio >= MORE_OPERATORS else 1.0


def _more_by_step(run: RunView, place: int, members: dict[int, set[int]]) -> dict[int, tuple[float, float]]:
    """How many kernels (CPU: operators) more than its peers a rank starts by each step in which it is late.

    Beside what a peer starts in a step. Of that step and the one before the one with more counts: what runs
    between two steps is a part of the first one, and makes the rank late in the second.
    """
    shares = work_shares(run)
    found = {}
    for step, peers in members.items():
        if step in shares.steps:
            columns = [shares.steps.index(one) for one in (step - 1, step) if one in shares.steps]
            amount = shares.amount[2][:, columns]
            usual = median(amount[sorted(peers)], axis=0)
            found[step] = float((amount[place] - usual).max()), float(usual[-1])
    return found


def host_surplus_ns(run: RunView, rank: int) -> int | None:
    """How much longer a rank's host is at its own work than that of the median other rank, if known.

    A rank that comes last never waits in a collective, so its gaps between launches show as idle time, while
    those of its peers lie beside their waiting. Their hosts may be as slow, which only this tells.
    """
    own = _own_host_ns(run)
    others = [ns for other, ns in own.items() if other != rank]
    if rank not in own or not others:
        return None
    return own[rank] - int(median(others))


@once
def _own_host_ns(run: RunView) -> dict[int, int]:
    """The host's own time in the analysed step, without what it waited for the GPU, by rank.

    Ranks whose host is not followed call by call (CPU runs, no launches), or is ahead of its GPU throughout,
    are left out.
    """
    found: dict[int, int] = {}
    for digest in run.digests:
        if not digest.programs or digest.is_cpu:
            continue
        program = digest.programs[0].decoded()
        if program.point.size and program.lead_ns < AHEAD * program.step_ns:
            found[digest.rank] = int(
                np.sum(program.lag, dtype=np.int64) + np.sum(program.own, dtype=np.int64)
            )
    return found
