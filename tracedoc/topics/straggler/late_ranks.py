"""The ranks that others wait for: what each costs them in every step, or between steps in which they meet."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together, gains_without
from tracedoc.ranks.run_view import RunView, habitual
from tracedoc.ranks.waiting import STRAGGLING
from tracedoc.spans import Int64Array, Spans
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.collective_table import NONE
from tracedoc.topics.pipeline.balance import SlowWorker, slow_workers
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.topics.straggler.work import (
    CAUSES,
    OF_THE_HOST,
    host_surplus_ns,
    work_before,
)
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.values import once


class OwnTimes(msgspec.Struct, frozen=True, eq=False):
    """What each rank takes for steps itself, as arrays ``[rank, step]`` in ns, without waiting for others.

    ``by_cause_us[rank, step, cause]`` is that by :data:`CAUSES`, in us.
    """

    own_ns: Int64Array
    by_cause_us: Int64Array

    @property
    def pace_ns(self) -> Int64Array:
        """What each step takes the rank that takes longest for it."""
        return np.asarray(self.own_ns.max(axis=0))

    @property
    def late_ns(self) -> Int64Array:
        """What each step takes longer than it takes the median rank, of two the earlier one."""
        return np.asarray(self.pace_ns - np.sort(self.own_ns, axis=0)[(len(self.own_ns) - 1) // 2])

    def later_ns(self, place: int) -> Int64Array:
        """How much longer a rank takes for each step than the median of the others; what adds up over all."""
        longer = self.own_ns[place] - median(np.delete(self.own_ns, place, axis=0), axis=0)
        positive = np.maximum(longer, 0)
        adds_up = longer.sum() / max(positive.sum(), 1)
        return np.asarray(np.rint(positive * max(adds_up, 0.0)), dtype=np.int64)

    def more_us(self, place: int) -> Int64Array:
        """How much longer than the median of the others a rank is at each cause: ``[step, cause]``."""
        others = median(np.delete(self.by_cause_us, place, axis=0), axis=0)
        return np.asarray(self.by_cause_us[place] - others.astype(np.int64))


def own_times(run: RunView, steps: Sequence[int]) -> OwnTimes | None:
    """What ranks take for ``steps``, ``None`` where they meet in each of them, in none, or are alone.

    Where they meet in some, those who are late in the others are waited for there, for all of it at once.
    """
    if not run.meets_rarely:
        return None
    meeting = set(run.matching.step.tolist())
    met = [step in meeting for step in steps]
    if all(met) or not any(met):
        return None
    own = np.zeros((len(run.digests), len(steps)), dtype=np.int64)
    by_cause = np.zeros((*own.shape, len(CAUSES)), dtype=np.int64)
    for place, digest in enumerate(run.digests):
        windows = {step.index: step for step in digest.steps}
        if not windows.keys() >= set(steps):
            return None
        for column, index in enumerate(steps):
            step = windows[index]
            own[place, column] = step.budget.window_ns - run.splits[digest.rank, index].wait_ns
            named = {"kernels": step.budget.compute_ns, **step.idle_ns}
            by_cause[place, column] = [named.get(cause, 0) // 1000 for cause in CAUSES]
    return OwnTimes(own, by_cause)


MAX_SUSPECTS = 8
"""Ranks that are looked at closely: those in whose name the others wait longest."""

NOTICED = 0.02
"""A rank counts as late in a step from this share of the step on; less is within the jitter of launches."""

CAUSE_SHARE = 0.5
"""What explains at least this share of a lateness is called its cause."""

WORTH_EXPLAINING = 0.3
"""What explains less than this share of the others' waiting is not worth naming."""

HIDDEN = 1.5
"""A host that is longer at something than its peers by this many times what that costs has slow peers."""


class Straggler(msgspec.Struct, frozen=True, eq=False):
    """One rank for which others wait.

    ``gain_ns[s]`` is how much shorter step ``steps[s]`` would be if nobody ever waited for this rank, as a
    replay of all ranks tells: their own hosts and their own work still take what they take. In a CPU trace it
    is what the median peer of its groups waits; where ranks do not meet in every step, what this one takes
    longer (:class:`OwnTimes`). ``operations`` are those (indices of the matching) to which it came
    last itself. ``excess_us[s, c]`` is what it did before them beyond the median of its peers, by
    :data:`CAUSES`; ``more_kernels`` the ratio of kernels that it started (1 where its whole steps have no
    more of them), ``away_phase`` where in the step its host was longest away.
    """

    rank: int
    steps: tuple[int, ...]
    gain_ns: Int64Array
    operations: tuple[int, ...]
    excess_us: Int64Array
    more_kernels: float = 1.0
    away_phase: int = 0

    @property
    def cause(self) -> str:
        """What it did in the gap, of :data:`CAUSES`, or "" if nothing explains enough of it.

        What it does in nearly every step comes before what adds up to more in a few.
        """
        recurring = habitual(self.excess_us)
        if recurring.max() >= WORTH_EXPLAINING * float(median(self.gain_ns)) / 1000 > 0:
            return CAUSES[int(recurring.argmax())]
        excess = self.excess_us.sum(axis=0)
        best = int(excess.argmax())
        enough = max(CAUSE_SHARE * excess.sum(), WORTH_EXPLAINING * self.gain_ns.sum() / 1000)
        return CAUSES[best] if excess[best] > 0 and excess[best] >= enough else ""

    @property
    def recurring_ms(self) -> float:
        """How much longer than its peers it is in at least three quarters of the steps, at all causes."""
        return float(habitual(np.maximum(self.excess_us, 0)).sum()) / 1e3

    @property
    def cause_ns(self) -> Int64Array:
        """How much longer than its peers it was at its cause in each step; zeros without a cause."""
        cause = self.cause
        column = self.excess_us[:, CAUSES.index(cause)] if cause else np.zeros(len(self.steps), np.int64)
        return np.asarray(np.maximum(column, 0) * 1000)


@once
def stragglers(run: RunView) -> tuple[Straggler, ...]:
    """The ranks for which others wait, the most costly first. With one rank there are none."""
    stages = pipeline(run)
    if stages is not None:
        return tuple(_slow_worker(run, stages.steps, one) for one in slow_workers(run) if one.gain_ns.any())
    steps = run.common_steps or tuple(sorted(set(run.matching.step.tolist()))) or (NONE,)
    costs = run.blame.exposed_cost_ns()
    suspects = np.argsort(-costs, kind="stable")[:MAX_SUSPECTS]
    found = [_late_rank(run, int(place), steps) for place in suspects if costs[place] > 0]
    return tuple(sorted((one for one in found if one.gain_ns.any()), key=lambda one: -int(one.gain_ns.sum())))


@once
def late_by_rank(run: RunView) -> dict[int, Straggler]:
    """The ranks for which others wait, by their numbers."""
    return {one.rank: one for one in stragglers(run)}


def noticeable_ns(run: RunView) -> float:
    """What a rank costs in a step at least that is late in it: 2 % of the analysed step, 0 without one."""
    step = run.analysed_step
    return 0.0 if step is None else NOTICED * step.budget.window_ns


@once
def _blamed(run: RunView) -> npt.NDArray[np.bool_]:
    """Marks the operations that waited for a rank that was late from work of its own.

    Not those of pipeline neighbours: a stage waits for the one before it by design, and their work differs.
    """
    straggling = is_among(run.blame.root_lateness, STRAGGLING)
    return np.asarray(straggling & ~run.matching.between_stages[run.matching.group], dtype=bool)


def _late_rank(run: RunView, place: int, steps: tuple[int, ...]) -> Straggler:
    blamed = _blamed(run) & (run.blame.root == place) & is_among(run.matching.step, steps)
    own = np.flatnonzero(blamed & (run.blame.last == place))
    replayed = arrival_replay(run) is not None
    gain = (
        np.maximum(gains_without(run, place, steps), 0) if replayed else _waited_ns(run, place, blamed, steps)
    )
    before = work_before(run, place, own, steps)
    excess_us = _within_host_surplus(run, place, steps, gain, before.excess_us)
    apart = own_times(run, steps)
    if apart is not None and gain.any():
        gain, excess_us = apart.later_ns(place), apart.more_us(place)
    return Straggler(
        rank=run.matching.ranks[place],
        steps=steps,
        gain_ns=gain,
        operations=tuple(own.tolist()),
        excess_us=excess_us,
        more_kernels=before.more_kernels,
        away_phase=before.away_phase,
    )


def _slow_worker(run: RunView, steps: tuple[int, ...], worker: SlowWorker) -> Straggler:
    """A rank that holds up its pipeline as a straggler: its passes take longer, or its host."""
    place, excess_us = worker.place, worker.excess_us
    blamed = is_among(run.matching.step, steps) & (run.blame.root == place)
    own = np.flatnonzero(blamed & (run.blame.last == place))
    if excess_us is None:
        excess_us = work_before(run, place, own, steps).excess_us
    gain = np.maximum(worker.gain_ns, 0)
    return Straggler(run.matching.ranks[place], steps, gain, tuple(own.tolist()), excess_us)


def _cost_ns(run: RunView, place: int, blamed: npt.NDArray[np.bool_], steps: Sequence[int]) -> Int64Array:
    """What each peer waits in the operations that are ``blamed`` on a rank: ``[step, peer]``."""
    matching = run.matching
    operation = matching.operation
    parts = np.flatnonzero(blamed[operation])
    rank, row, step_of = matching.part_rank[parts], matching.part_row[parts], matching.step[operation[parts]]
    peers = [peer for peer in range(len(run.digests)) if peer != place]
    cost = np.zeros((len(steps), len(peers)), dtype=np.int64)
    for column, peer in enumerate(peers):
        start_ns, last_arrival_ns, exposed = _waiting(run, peer)
        for number, step in enumerate(steps):
            rows = row[(rank == peer) & (step_of == step)]
            cost[number, column] = (Spans.of(start_ns[rows], last_arrival_ns[rows]) & exposed).total_ns
    return cost


def _waited_ns(run: RunView, place: int, blamed: npt.NDArray[np.bool_], steps: Sequence[int]) -> Int64Array:
    """What the median peer waits in each step in the operations that are ``blamed`` on a rank.

    Of each group its members, for ranks of other groups wait elsewhere; of several groups together, at most
    what one peer waits.
    """
    matching = run.matching
    members = matching.group[matching.operation]
    peers = np.delete(np.arange(len(run.digests)), place)
    found = np.zeros(len(steps), dtype=np.int64)
    most = _cost_ns(run, place, blamed, steps).max(axis=1, initial=0)
    for group in distinct(matching.group[blamed]).tolist():
        cost = _cost_ns(run, place, blamed & (matching.group == group), steps)
        among = is_among(peers, matching.part_rank[members == group])
        found += median(cost[:, among], axis=1).astype(np.int64)
    return np.asarray(np.minimum(found, most), dtype=np.int64)


def _waiting(run: RunView, place: int) -> tuple[Int64Array, Int64Array, Spans]:
    """The start of each of a rank's collectives, the end of its waiting, and what is exposed."""
    digest = run.digests[place]
    table = digest.collectives
    return table.start_ns, run.arrivals[digest.rank].last_arrival_ns(table), digest.exposed_comm


def waits_for(run: RunView, late: Straggler) -> list[tuple[RankDigest, Spans]]:
    """When peers waited for a late rank with no compute beside it, on their own clocks, the longest first."""
    matching = run.matching
    blamed = _blamed(run) & (run.blame.root == matching.ranks.index(late.rank))
    parts = np.flatnonzero(blamed[matching.operation])
    rank, row = matching.part_rank[parts], matching.part_row[parts]
    found = []
    for place, digest in enumerate(run.digests):
        if digest.rank != late.rank:
            start_ns, last_arrival_ns, exposed = _waiting(run, place)
            rows = row[rank == place]
            found.append((digest, Spans.of(start_ns[rows], last_arrival_ns[rows]) & exposed))
    return sorted(found, key=lambda one: -one[1].total_ns)


def gaps_of(run: RunView, late: Straggler) -> Spans:
    """When a late rank was at what made it late, on its own clock.

    From the end of what it had communicated before to its start of each collective to which it came last.
    """
    matching, table = run.matching, run.digest(late.rank).collectives
    operation, place = matching.operation, matching.ranks.index(late.rank)
    own = np.flatnonzero(is_among(operation, late.operations) & (matching.part_rank == place))
    rows = matching.part_row[own]
    ended = np.maximum.accumulate(table.end_ns) if len(table) else table.end_ns
    before = np.where(rows > 0, ended[rows - 1], table.start_ns[rows] - run.blame.late_ns[operation[own]])
    return Spans.of(np.minimum(before, table.start_ns[rows]), table.start_ns[rows])


def _within_host_surplus(
    run: RunView, place: int, steps: Sequence[int], gain_ns: Int64Array, excess_us: Int64Array
) -> Int64Array:
    """What a rank did longer than its peers, as far as their hosts are not slow as well.

    Where it is far more than would be gained if all ranks came as early as the median one, the peers lose the
    same time, hidden in their waiting. Then of the host's own causes no more counts than its host is longer.
    """
    of_host = np.array([cause in OF_THE_HOST for cause in CAUSES])
    most = np.maximum(gain_ns, gains_together(run, StartPolicy.MEDIAN, steps))
    longest = 1000 * excess_us[:, of_host].max(axis=1)
    if median(longest) <= HIDDEN * median(most):
        return excess_us
    surplus = host_surplus_ns(run, run.digests[place].rank)
    if surplus is None:
        return excess_us
    return np.where(of_host, np.minimum(excess_us, max(surplus, 0) // 1000), excess_us)
