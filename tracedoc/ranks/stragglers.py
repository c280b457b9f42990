"""What each late rank costs the others in every step, and what it did while they waited."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.ranks.arrival_replay import StartPolicy, arrival_replay, gains_together, gains_without
from tracedoc.ranks.blame import STRAGGLING
from tracedoc.ranks.groups import pipeline_pairs
from tracedoc.ranks.host_pace import OF_THE_HOST, host_surplus_ns
from tracedoc.ranks.pipelines import SlowWorker, pipeline, slow_workers
from tracedoc.ranks.run_view import RunView, once
from tracedoc.ranks.slowness import slowness_by_rank
from tracedoc.ranks.work_shares import work_excess, work_shares
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.host import WORK
from tracedoc.trace.distinct import is_among
from tracedoc.values import Unknown

MAX_SUSPECTS = 8
"""Ranks that are looked at closely: those in whose name the others wait longest."""

NOTICED = 0.02
"""A rank counts as late in a step from this share of the step on; less is within the jitter of launches."""

CAUSES = ("kernels", *WORK[2:])
"""What can make a rank late: :data:`WORK`, with all kernels as one."""

KERNEL_CAUSES = ("more kernels", "larger kernels", "slow GPU", "longer kernels")
"""What can be the matter with the kernels of a late rank."""

CAUSE_SHARE = 0.5
"""What explains at least this share of a lateness is called its cause."""

LEAST_SHARE = 0.3
"""What explains less than this share of the others' waiting is not worth naming."""

MORE_KERNELS = 1.02
"""A rank that starts this many times the kernels of its peers does more work, not slower work."""

MORE_OPERATORS = 1.1
"""On a CPU so many times: reading and logging a value takes some operators, and none of the time."""

REAL_SHARE = 0.5
"""So much of what a rank starts more before collectives must be more in whole steps as well."""

HIDDEN = 1.5
"""A host that is longer at something than its peers by this many times what that costs has slow peers."""


class Straggler(msgspec.Struct, frozen=True, eq=False):
    """One rank for which others wait.

    ``gain_ns[s]`` is how much shorter step ``steps[s]`` would be if nobody ever waited for this rank, as a
    replay of all ranks tells: their own hosts and their own work still take what they take. In a CPU trace it
    is what the median peer waits.
    ``cost_ns[s, p]`` is how long peer ``peers[p]`` waits for it in step ``steps[s]`` with no compute beside
    it: the union of its waits in operations whose chain of blame ends at this rank. ``operations`` are those
    (indices of the matching) to which it came last itself. ``excess_us[s, c]`` is what it did before them
    beyond the median of its peers, by :data:`CAUSES`; ``more_kernels`` the ratio of kernels that it started
    (1 where its whole steps have no more of them), ``away_phase`` where in the step its host was
    longest away.
    """

    rank: int
    steps: tuple[int, ...]
    peers: tuple[int, ...]
    gain_ns: Int64Array
    cost_ns: Int64Array
    operations: tuple[int, ...]
    excess_us: Int64Array
    more_kernels: float
    away_phase: int

    @property
    def low_ns(self) -> Int64Array:
        """What the peer that waits least waits in each step: the second-latest rank is as late as that."""
        return np.asarray(np.minimum(self.cost_ns.min(axis=1), self.gain_ns), dtype=np.int64)

    @property
    def cause(self) -> str:
        """What it did in the gap, of :data:`CAUSES`, or "" if nothing explains enough of it.

        What it does in nearly every step comes before what adds up to more in a few.
        """
        habit = np.sort(self.excess_us, axis=0)[(len(self.steps) - 1) // 4]
        if habit.max() >= LEAST_SHARE * float(np.median(self.gain_ns)) / 1000 > 0:
            return CAUSES[int(habit.argmax())]
        excess = self.excess_us.sum(axis=0)
        best = int(excess.argmax())
        enough = max(CAUSE_SHARE * excess.sum(), LEAST_SHARE * self.gain_ns.sum() / 1000)
        return CAUSES[best] if excess[best] > 0 and excess[best] >= enough else ""

    @property
    def cause_ns(self) -> Int64Array:
        """How much longer than its peers it was at its cause in each step; zeros without a cause."""
        cause = self.cause
        column = self.excess_us[:, CAUSES.index(cause)] if cause else np.zeros(len(self.steps), np.int64)
        return np.asarray(np.maximum(column, 0) * 1000)


@once
def stragglers(run: RunView) -> tuple[Straggler, ...]:
    """Return the ranks for which others wait, the most costly first. With one rank there are none."""
    steps = _steps(run)
    if pipeline(run) is not None:
        return tuple(_slow_worker(run, worker) for worker in slow_workers(run) if worker.gain_ns.any())
    costs = run.blame.exposed_cost_ns()
    suspects = np.argsort(-costs, kind="stable")[:MAX_SUSPECTS]
    found = [_late_rank(run, int(position), steps) for position in suspects if costs[position] > 0]
    found = [one for one in found if one.gain_ns.any()]
    return tuple(sorted(found, key=lambda one: -int(one.gain_ns.sum())))


def _steps(run: RunView) -> tuple[int, ...]:
    """Return the steps that every rank captured whole; without any, all steps that operations name."""
    sets = [{step.index for step in digest.complete_steps} for digest in run.digests]
    common = set.intersection(*sets) if sets else set()
    if common:
        return tuple(sorted(common))
    return tuple(sorted(set(run.matching.step.tolist()))) or (NONE,)


@once
def _blamed(run: RunView) -> npt.NDArray[np.bool_]:
    """Return which operations waited for a rank that was late from work of its own.

    Not those of pipeline neighbours: a stage waits for the one before it by design, and their work differs.
    """
    pipeline = np.array(pipeline_pairs(run.matching.groups), dtype=bool)
    straggling = is_among(run.blame.root_lateness, STRAGGLING)
    return np.asarray(straggling & ~pipeline[run.matching.group], dtype=bool)


def _late_rank(run: RunView, position: int, steps: Sequence[int]) -> Straggler:
    matching, blame = run.matching, run.blame
    blamed = _blamed(run) & (blame.root == position)
    blamed &= is_among(matching.step, steps)
    peers = tuple(place for place in range(len(matching.ranks)) if place != position)
    cost = np.zeros((len(steps), len(peers)), dtype=np.int64)
    for column, place in enumerate(peers):
        mine = np.flatnonzero(blamed[matching.operation] & (matching.part_rank == place))
        cost[:, column] = _waited(run, place, mine, steps)
    own = np.flatnonzero(blamed & (blame.last == position))
    excess, more_kernels, phase = _what_it_did(run, position, own, steps)
    waited = np.asarray(np.median(cost, axis=1), dtype=np.int64)
    gain = waited if arrival_replay(run) is None else np.maximum(gains_without(run, position, steps), 0)
    return Straggler(
        rank=matching.ranks[position],
        steps=tuple(steps),
        peers=tuple(matching.ranks[place] for place in peers),
        gain_ns=gain,
        cost_ns=cost,
        operations=tuple(own.tolist()),
        excess_us=_within_host_surplus(run, matching.ranks[position], steps, gain, excess),
        more_kernels=more_kernels,
        away_phase=phase,
    )


def _within_host_surplus(
    run: RunView, rank: int, steps: Sequence[int], gain_ns: Int64Array, excess_us: Int64Array
) -> Int64Array:
    """Return what a rank did longer than its peers, as far as their hosts are not slow as well.

    Where it is far more than would be gained if all ranks came as early as the median one, the peers lose the
    same time, hidden in their waiting. Then of the host's own causes no more counts than its host is longer.
    """
    of_host = np.array([cause in OF_THE_HOST for cause in CAUSES])
    most = np.maximum(gain_ns, gains_together(run, StartPolicy.MEDIAN, steps))
    longest = 1000 * excess_us[:, of_host].max(axis=1)
    if np.median(longest) <= HIDDEN * np.median(most):
        return excess_us
    surplus = host_surplus_ns(run, rank)
    if surplus is None:
        return excess_us
    return np.where(of_host, np.minimum(excess_us, max(surplus, 0) // 1000), excess_us)


def _slow_worker(run: RunView, worker: SlowWorker) -> Straggler:
    """Return a rank that holds up its pipeline as a straggler: its passes take longer, or its host."""
    found, matching = pipeline(run), run.matching
    assert found is not None
    steps, position = found.steps, worker.place
    own = np.flatnonzero(is_among(matching.step, steps) & (run.blame.root == position))
    excess = np.zeros((len(steps), len(CAUSES)), dtype=np.int64)
    excess[:, CAUSES.index("kernels")] = worker.longer_ns // 1000
    if not worker.longer_ns.any():
        excess = _what_it_did(run, position, own[run.blame.last[own] == position], steps)[0]
    peers = tuple(place for place in range(len(matching.ranks)) if place != position)
    cost = np.zeros((len(steps), len(peers)), dtype=np.int64)
    for column, place in enumerate(peers):
        parts = np.flatnonzero(is_among(matching.operation, own) & (matching.part_rank == place))
        cost[:, column] = _waited(run, place, parts, steps)
    return Straggler(
        rank=matching.ranks[position],
        steps=steps,
        peers=tuple(matching.ranks[place] for place in peers),
        gain_ns=np.maximum(worker.gain_ns, 0),
        cost_ns=cost,
        operations=tuple(own[run.blame.last[own] == position].tolist()),
        excess_us=excess,
        more_kernels=1.0,
        away_phase=0,
    )


def waits_for(run: RunView, late: Straggler, peer: int) -> Spans:
    """Return when a peer waited for a late rank with no compute beside it, on the peer's own clock."""
    position = run.matching.ranks.index(late.rank)
    place = run.matching.ranks.index(peer)
    blamed = _blamed(run) & (run.blame.root == position)
    mine = np.flatnonzero(blamed[run.matching.operation] & (run.matching.part_rank == place))
    return _wait_spans(run, place, run.matching.part_row[mine])


def gaps_of(run: RunView, late: Straggler) -> Spans:
    """Return when a late rank was at what made it late, on its own clock.

    From the end of what it had communicated before to its start of each collective to which it came last.
    """
    position = run.matching.ranks.index(late.rank)
    table = run.digest(late.rank).collectives
    own = np.flatnonzero(
        is_among(run.matching.operation, late.operations) & (run.matching.part_rank == position)
    )
    rows = run.matching.part_row[own]
    ended = np.maximum.accumulate(table.end_ns) if len(table) else table.end_ns
    before = np.where(
        rows > 0, ended[rows - 1], table.start_ns[rows] - run.blame.late_ns[run.matching.operation[own]]
    )
    return Spans.of(np.minimum(before, table.start_ns[rows]), table.start_ns[rows])


def _waited(run: RunView, place: int, parts: np.ndarray, steps: Sequence[int]) -> list[int]:
    rows = run.matching.part_row[parts]
    step_of = run.matching.step[run.matching.operation[parts]]
    start_ns, last_arrival_ns, exposed = _waiting(run, place)
    chosen = (rows[step_of == step] for step in steps)
    return [(Spans.of(start_ns[mine], last_arrival_ns[mine]) & exposed).total_ns for mine in chosen]


def _wait_spans(run: RunView, place: int, rows: np.ndarray) -> Spans:
    start_ns, last_arrival_ns, exposed = _waiting(run, place)
    return Spans.of(start_ns[rows], last_arrival_ns[rows]) & exposed


def _waiting(run: RunView, place: int) -> tuple[Int64Array, Int64Array, Spans]:
    """Return the start of each of a rank's collectives, the end of its waiting, and what is exposed."""
    digest = run.digests[place]
    table = digest.collectives
    return table.start_ns, run.arrivals[digest.rank].last_arrival_ns(table), digest.exposed_comm


def _what_it_did(
    run: RunView, position: int, operations: np.ndarray, steps: Sequence[int]
) -> tuple[Int64Array, float, int]:
    """Compare what a rank did before the operations to which it came last with what its peers did."""
    matching = run.matching
    excess = np.zeros((len(steps), len(CAUSES)), dtype=np.int64)
    kernels = peer_kernels = longest = phase = 0
    members: dict[int, set[int]] = {}
    stretches: dict[int, tuple[int, int]] = {}
    for operation in operations.tolist():
        own: tuple[Int64Array, int] | None = None
        others: list[tuple[Int64Array, int]] = []
        places: set[int] = set()
        for place, row in _parts(run, operation):
            work = run.digests[place].host_work
            if work is None:
                continue
            did = (_by_cause(work.before.us(row)), int(work.before.kernels[row]))
            if place != position:
                others.append(did)
                places.add(place)
                continue
            own = did
            if int(work.before.away_us[row]) > longest:
                longest, phase = int(work.before.away_us[row]), int(work.before.away_phase[row])
        if own is None or not others:
            continue
        members.setdefault(int(matching.step[operation]), set()).update(places)
        step = steps.index(int(matching.step[operation]))
        stretches[step] = (stretches.get(step, (operation,))[0], operation)
        excess[step] += own[0] - np.median([us for us, _ in others], axis=0).astype(np.int64)
        kernels += own[1]
        peer_kernels += int(np.median([count for _, count in others]))
    for step, (first, last) in stretches.items():
        over_all = _excess_over(run, position, first, last)
        if over_all is not None:
            excess[step] = np.minimum(excess[step], over_all)
    if run.digests[position].is_cpu:
        return excess, _operators_in_whole_steps(run, position, members), phase
    if not peer_kernels or _more_in_whole_steps(run, position, members) < REAL_SHARE * (
        kernels - peer_kernels
    ):
        return excess, 1.0, phase
    return excess, kernels / peer_kernels, phase


def _excess_over(run: RunView, position: int, first: int, last: int) -> Int64Array | None:
    """Return what a rank did longer than its peers up to operation ``last`` since before ``first``, in us.

    Between two operations a rank may do more than its peers because they did the same earlier, beside a wait
    that lies between two others. Over all of them that evens out. ``None`` where no peer was in both.
    """
    ends = dict(_parts(run, last))
    did: dict[int, Int64Array] = {}
    for place, row in _parts(run, first):
        work = run.digests[place].host_work
        if place in ends and work is not None:
            did[place] = _by_cause(work.before.total_us(row, ends[place] + 1))
    peers = [us for place, us in did.items() if place != position]
    if position not in did or not peers:
        return None
    return np.asarray(did[position] - np.median(peers, axis=0).astype(np.int64))


def did_before(run: RunView, operation: int) -> list[tuple[int, Int64Array]]:
    """Return the place of each rank in an operation, and what it did before in us, by :data:`CAUSES`."""
    found = []
    for place, row in _parts(run, operation):
        work = run.digests[place].host_work
        if work is not None:
            found.append((place, _by_cause(work.before.us(row))))
    return found


def _parts(run: RunView, operation: int) -> list[tuple[int, int]]:
    """Return the place and the row of each rank that took part in an operation."""
    matching = run.matching
    parts = slice(int(matching.first[operation]), int(matching.first[operation + 1]))
    return list(zip(matching.part_rank[parts].tolist(), matching.part_row[parts].tolist(), strict=True))


def _by_cause(us: Int64Array) -> Int64Array:
    """Return times by :data:`WORK` as times by :data:`CAUSES`."""
    return np.append(us[:2].sum(), us[2:])


def _more_in_whole_steps(run: RunView, position: int, members: dict[int, set[int]]) -> float:
    """Return how many kernels more than its peers a rank starts in the steps in which it comes late.

    Backward passes and collectives run beside each other: where a collective starts a little later among
    the same kernels, more of them lie before it, and as many fewer behind it. Infinite where not known.
    """
    shares = work_shares(run)
    kernels, more = shares.amount[2], 0.0
    for step, places in members.items():
        if step not in shares.steps:
            return inf
        column = shares.steps.index(step)
        more += float(kernels[position, column] - np.median(kernels[sorted(places), column]))
    return inf if np.isnan(more) else more


def _operators_in_whole_steps(run: RunView, position: int, members: dict[int, set[int]]) -> float:
    """Return how many times the operators of its peers a CPU rank runs in the steps in which it comes late.

    Operators that follow each other closely are one piece of compute before a collective, so whole steps are
    compared. 1 where that is not known, and for a few more operators, which are no work to speak of.
    """
    shares = work_shares(run)
    operators, ratios = shares.amount[2], []
    for step, places in members.items():
        if step in shares.steps:
            column = operators[:, shares.steps.index(step)]
            ratios.append(column[position] / np.median(column[sorted(places)]))
    ratio = float(np.median(ratios)) if ratios else 1.0
    return ratio if ratio >= MORE_OPERATORS else 1.0


def kernel_cause(late: Straggler, run: RunView) -> str:
    """Return why the kernels of a rank that they make late take longer, as far as it is known.

    "more kernels", "larger kernels" (as many, on more data), "slow GPU" (three in four of its matrix products
    take longer than those of its peers, at the median by half or more of what its compute does), else "longer
    kernels".
    """
    if late.more_kernels >= MORE_KERNELS:
        return "more kernels"
    place = run.digests.index(run.digest(late.rank))
    excess, slowness = work_excess(run), slowness_by_rank(run)[late.rank]
    if excess is not None and excess.explained[place].mean() >= CAUSE_SHARE:
        return "larger kernels"
    if isinstance(slowness, Unknown) or slowness.low_ratio <= 1.0:
        return "longer kernels"
    enough = slowness.ratio - 1.0 >= CAUSE_SHARE * (slowness.compute_ratio - 1.0)
    return "slow GPU" if enough else "longer kernels"
