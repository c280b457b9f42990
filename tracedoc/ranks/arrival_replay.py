"""Replay all ranks from meeting to meeting: when each would have arrived, had a rank been earlier.

Unchanged it gives the times that were measured. Changed, it tells what a step would have taken: with one rank
never the last, with all ranks at the same time, or with other amounts of work. Launches stay when they were,
but for what the host waited for. It plays all captured steps with little detail, and operations may begin at
a median or mean; ``play/`` plays one step in full to predict fixes, where only the last one counts. Why
they are two is in docs/decisions/0089.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracedoc.ranks.clocks import Clock
from tracedoc.ranks.matching import NO_OPERATION
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Int64Array
from tracedoc.step.rank_digest import RankDigest
from tracedoc.step.sync_path import NO_LIMIT, Action, SyncPath
from tracedoc.timeline.collective_table import NO_TIME
from tracedoc.timeline.lags import NEVER
from tracedoc.values import once

CAUGHT_UP_NS = 1_000_000
"""A host that is always further ahead of its GPU is held back by something that no call shows (a full
queue, a rate limit): without waiting it would have been as far ahead."""

UNLIKE = 0.01
"""A replay that is off by more than this share of a step, with nothing changed, tells nothing."""

NO_SLACK = -1
"""Stands for the slack of work that no launch limits."""


class StartPolicy(Enum):
    """When an operation begins to move data, by the starts of its ranks."""

    LAST = "when the last has come"
    MEDIAN = "when the median rank has come"
    MEAN = "at the mean of all starts"


@dataclass(frozen=True, eq=False)
class ArrivalReplay:
    """All that a replay needs, on the common clock: one entry for each action, rank by rank.

    Columns are arrays of Python, which take single entries in and out faster than numpy's, with as few bytes
    an entry as it needs: of many ranks they are long.

    ``steps`` are the numbers of each rank's steps; ``ends`` where the actions of each rank end. ``item``
    is a row of all ranks' collectives, or an edge of a step: the beginning of the first one, the ends of
    all. ``work_ns`` is the stream's own time since the action before on its rank, ``slack_ns`` how long
    before the action the host let that work end (``NO_SLACK`` where it is not known). ``operation`` to
    ``rest_ns`` have an entry for each row: what it is part of, when it was launched, the row that it
    stands behind, and how long after the last start it ended; ``held_back`` tells which hosts are as far
    ahead of their GPUs whatever happens; ``members`` (how many parts) and ``one_way`` (a send and its
    receive) one for each operation; ``offsets`` tell where the rows of each rank begin, ``closes`` whether
    all of them are of its steps, so that the last one ends no earlier than they do.
    """

    steps: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    action: array[int]
    item: array[int]
    at_ns: array[int]
    work_ns: array[int]
    slack_ns: array[int]
    lag_ns: array[int]
    operation: array[int]
    launch_ns: array[int]
    before: array[int]
    rest_ns: array[int]
    members: array[int]
    one_way: list[bool]
    held_back: tuple[bool, ...]
    offsets: tuple[int, ...]
    closes: tuple[bool, ...]

    def step_ends(
        self,
        *,
        without: int | None = None,
        together: StartPolicy = StartPolicy.LAST,
        work_ns: Sequence[int] | None = None,
        earlier: tuple[int, Mapping[int, int]] = (-1, {}),
    ) -> list[list[int]]:
        """Return for each rank when its compute stream begins the first of its steps, and ends each.

        ``without`` is a rank (a position) that is never waited for; ``work_ns`` replaces the own; ``earlier``
        is a rank whose host launches so many nanoseconds earlier in some of its steps, counted from 0.
        """
        return _play(_State(self, without, together, work_ns, earlier=earlier))

    def parts(self) -> list[slice]:
        """The places of each rank's actions."""
        return [slice(begin, end) for begin, end in zip((0, *self.ends[:-1]), self.ends, strict=True)]

    @property
    def measured_ends(self) -> list[list[int]]:
        """What :meth:`step_ends` gives unchanged: what was measured."""
        return self._measured[0]

    @property
    def measured_ns(self) -> array[int]:
        """When the compute stream was done with each action, unchanged."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[list[list[int]], array[int]]:
        state = _State(self, None, StartPolicy.LAST, None, unchanged=True)
        return _play(state), state.reached_ns


@once
def arrival_replay(run: RunView) -> ArrivalReplay | None:
    """Join the paths of all ranks; ``None`` where one has none, or unchanged it is not what was measured.

    Operations that miss a rank, or in which nobody waits for the last, last as long as they did.
    """
    if not len(run.matching) or any(digest.sync_path is None for digest in run.digests):
        return None
    matching, clock = run.matching, run.matching.clock
    offsets = [0, *np.cumsum([len(digest.collectives) for digest in run.digests]).tolist()]
    ranks = [
        (digest, digest.sync_path, offset)
        for digest, offset in zip(run.digests, offsets, strict=False)
        if digest.sync_path is not None
    ]
    meets, latest_ns = matching.has_latest_start, matching.latest_start_ns
    operations = [_meeting(run.operations[digest.rank], meets) for digest in run.digests]
    # Column by column: of many ranks, all that goes into all columns at once is much.
    plan = ArrivalReplay(
        steps=tuple(tuple(step.index for step in digest.steps) for digest in run.digests),
        ends=tuple(np.cumsum([len(path) for _, path, _ in ranks]).tolist()),
        action=_ints(path.action for _, path, _ in ranks),
        item=_ints(_items(path, offset) for _, path, offset in ranks),
        at_ns=_ints(clock.to_common(digest.rank, path.at_ns) for digest, path, _ in ranks),
        work_ns=_ints(path.work_ns for _, path, _ in ranks),
        slack_ns=_ints(np.where(path.slack_ns == NO_LIMIT, NO_SLACK, path.slack_ns) for _, path, _ in ranks),
        lag_ns=_ints(path.lag_ns for _, path, _ in ranks),
        operation=_ints(operations),
        launch_ns=_ints(_launches(digest, clock) for digest in run.digests),
        before=_ints(np.where(path.behind >= 0, path.behind + offset, -1) for _, path, offset in ranks),
        rest_ns=_ints(
            _rests(digest, clock, operation, latest_ns)
            for digest, operation in zip(run.digests, operations, strict=True)
        ),
        members=_ints([np.diff(matching.first)]),
        one_way=_one_way(run),
        held_back=tuple(_is_held_back(path) for _, path, _ in ranks),
        offsets=tuple(offsets),
        closes=tuple(
            not digest.steps or not (digest.collectives.start_ns >= digest.steps[-1].end_ns).any()
            for digest in run.digests
        ),
    )
    return plan if _is_as_measured(run, plan) else None


def _ints(parts: Iterable[npt.NDArray[np.integer]]) -> array[int]:
    """Return integers one after the other, in the fewest bytes that hold them all."""
    column = np.concatenate([*parts])
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    code = next(one for one in "bhiq" if np.iinfo(one).min <= least and most <= np.iinfo(one).max)
    return array(code, column.astype(code).tobytes())


def _is_as_measured(run: RunView, plan: ArrivalReplay) -> bool:
    """Whether the replay, unchanged, gives the measured ends of the complete steps."""
    for digest, edges in zip(run.digests, plan.measured_ends, strict=True):
        for number, step in enumerate(digest.steps):
            end = int(run.matching.clock.to_common(digest.rank, np.array([step.end_ns]))[0])
            if step.complete and abs(edges[number + 1] - end) > UNLIKE * step.budget.window_ns:
                return False
    return True


def _items(path: SyncPath, offset: int) -> Int64Array:
    """Return the items of a rank's actions, as :class:`ArrivalReplay` counts them."""
    of_row = (path.action <= int(Action.JOIN)) | (path.action == int(Action.AWAIT))
    return path.row + np.where(of_row, offset, 0)


def _launches(digest: RankDigest, clock: Clock) -> Int64Array:
    """The launch of each row of a rank on the common clock, ``NEVER`` where that is not known."""
    launch, known = digest.collectives.launch_ns, digest.collectives.launch_ns != NO_TIME
    return np.where(known, clock.to_common(digest.rank, np.where(known, launch, 0)), NEVER)


def _meeting(operation: npt.NDArray[np.int32], meets: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the operation of each row in which ranks wait for the last of them, else ``NO_OPERATION``."""
    return np.where((operation != NO_OPERATION) & meets[operation], operation, np.int32(NO_OPERATION))


def _rests(
    digest: RankDigest, clock: Clock, operation: npt.NDArray[np.int32], latest_ns: Int64Array
) -> Int64Array:
    """Nanoseconds from the last start to the end of each row of a rank; from its own where nobody waits."""
    start = clock.to_common(digest.rank, digest.collectives.start_ns)
    end = clock.to_common(digest.rank, digest.collectives.end_ns)
    return end - np.where(operation != NO_OPERATION, latest_ns[operation], start)


def _one_way(run: RunView) -> list[bool]:
    """Operations that are a send and its receive; truth values."""
    groups = np.array([group.one_way for group in run.matching.groups] or [False])
    return groups[run.matching.group].tolist()  # type: ignore[no-any-return]


def _is_held_back(path: SyncPath) -> bool:
    """Whether a host is always far ahead of its GPU, and yet never further."""
    slack = path.slack_ns[path.kernels > 0][1:]  # what comes before the first is not known
    known = slack[slack != NO_LIMIT]
    waits = (path.action == int(Action.SYNC)).any()
    return bool(known.size and known.min() > CAUGHT_UP_NS and not waits)


def gains_without(run: RunView, position: int, steps: Sequence[int]) -> Int64Array:
    """Nanoseconds by which each step would be shorter if nobody ever waited for a rank (a position).

    Its own delays are then as long as those of the latest of the others, at most. Zeros where unknown.
    """
    plan = arrival_replay(run)
    if plan is None:
        return np.zeros(len(steps), dtype=np.int64)
    others = [place for place in range(len(plan.steps)) if place != position]
    return _gains(plan, plan.step_ends(without=position), others, steps)


def gains_together(run: RunView, together: StartPolicy, steps: Sequence[int]) -> Int64Array:
    """Nanoseconds by which steps would be shorter if operations began otherwise than with the last rank."""
    plan = arrival_replay(run)
    if plan is None:
        return np.zeros(len(steps), dtype=np.int64)
    return _gains(plan, plan.step_ends(together=together), range(len(plan.steps)), steps)


def gains_of_work(plan: ArrivalReplay, work_ns: npt.NDArray[np.float64], steps: Sequence[int]) -> Int64Array:
    """Nanoseconds by which each step would be shorter with other work between the actions of the ranks."""
    starts = np.array(plan.action) == int(Action.START)
    work = np.where(starts, plan.work_ns, np.rint(work_ns).astype(np.int64))
    return _gains(plan, plan.step_ends(work_ns=_ints([work])), range(len(plan.steps)), steps)


def gains_of_launches(
    plan: ArrivalReplay, position: int, earlier_ns: Mapping[int, int], steps: Sequence[int]
) -> Int64Array:
    """Nanoseconds by which each step would be shorter if a rank's host launched so much earlier in steps."""
    edges = {plan.steps[position].index(step): ns for step, ns in earlier_ns.items()}
    changed = plan.step_ends(work_ns=plan.work_ns, earlier=(position, edges))
    return _gains(plan, changed, range(len(plan.steps)), steps)


def _gains(
    plan: ArrivalReplay, changed: list[list[int]], ranks: Sequence[int], steps: Sequence[int]
) -> Int64Array:
    """Nanoseconds by which the end of each step is earlier, beyond its beginning, at its last rank.

    What comes before the first step counts where nothing but one step was captured.
    """
    measured = plan.measured_ends
    gained = []
    for step in steps:
        edges = []
        for edge in (0, 1):
            places = [
                (rank, plan.steps[rank].index(step) + edge) for rank in ranks if step in plan.steps[rank]
            ]
            if not places:
                edges.append(0)
                continue
            before = max(measured[rank][place] for rank, place in places)
            after = max(changed[rank][place] for rank, place in places)
            edges.append(before - after)
        gained.append(edges[1] - (edges[0] if len(steps) > 1 else 0))
    return np.array(gained, dtype=np.int64)


def _play(state: _State) -> list[list[int]]:
    plan = state.plan
    ends = plan.ends
    blocked = [True] * len(plan.steps)
    while any(blocked):
        moved = False
        for rank, end in enumerate(ends):
            while state.place[rank] < end and state.advance(rank):
                moved = True
            blocked[rank] = state.place[rank] < end
        if not moved:
            # Operations that were matched wrongly can wait for each other: the first goes on alone.
            rank = min((r for r, one in enumerate(blocked) if one), key=lambda r: plan.at_ns[state.place[r]])
            state.advance(rank, alone=True)
    for rank, edges in enumerate(state.edges):
        rows = slice(plan.offsets[rank], plan.offsets[rank + 1])
        if plan.closes[rank]:
            edges[-1] = max([edges[-1], *state.ends[rows]])
    return state.edges


def _filled(value: int, count: int) -> array[int]:
    return array("q", [value]) * count


class _State:
    """How far each rank is, and when."""

    def __init__(
        self,
        plan: ArrivalReplay,
        without: int | None,
        together: StartPolicy,
        work_ns: Sequence[int] | None,
        *,
        unchanged: bool = False,
        earlier: tuple[int, Mapping[int, int]] = (-1, {}),
    ) -> None:
        self.earlier, self.earliest_ns = earlier, 0  # by how much the host may be later at most
        # Other work is that of a pipeline, whose hosts wait for the end of a step (losses, gradient norms),
        # often where no call shows it.
        ranks, rows = len(plan.steps), len(plan.operation)
        self.follows = plan.held_back if work_ns is None else (True,) * ranks
        self.unchanged = unchanged
        self.plan, self.without, self.together = plan, without, together
        self.work_ns = plan.work_ns if work_ns is None else work_ns
        self.place = [0, *plan.ends[:-1]]
        self.awaited = [NEVER] * ranks
        self.now = [NEVER] * ranks
        self.behind_ns = [0] * ranks  # how much later than measured each compute stream is
        self.reached_ns = _filled(NEVER, plan.ends[-1])
        self.shifts = [[0] for _ in range(ranks)]  # how much later each host is, after each of its waits
        self.ready, self.ends, self.late = (_filled(one, rows) for one in (NEVER, NEVER, 0))
        self.caught_up, self.caught_up_at = [0] * ranks, _filled(0, rows)
        self.met = [array("i") for _ in plan.members]
        self.edges = [[NEVER] * (len(steps) + 1) for steps in plan.steps]

    def open(self, item: int) -> bool:
        """Whether a row's operation has not met yet."""
        operation = self.plan.operation[item]
        return operation >= 0 and len(self.met[operation]) < self.plan.members[operation]

    def advance(self, rank: int, *, alone: bool = False) -> bool:
        """Take one action of a rank; False where it waits for others, unless it goes on alone."""
        plan, place = self.plan, self.place[rank]
        action, item, lag, shifts = (
            plan.action[place],
            plan.item[place],
            plan.lag_ns[place],
            self.shifts[rank],
        )
        if action == Action.START:
            before = plan.before[item]
            if before >= 0 and self.open(before) and not alone:
                return False
            self._start(rank, item, place)
            self.place[rank] += 1
            return True
        if action in (Action.JOIN, Action.AWAIT) and self.open(item) and not alone:
            return False
        slack, work = plan.slack_ns[place], self.work_ns[place]
        # What the host launches last comes before the end of the work by what follows it.
        launched = NEVER
        if slack != NO_SLACK:
            limit = plan.at_ns[place] - slack
            launched = limit + self._host_shift(rank, -1) + work - plan.work_ns[place]
        reached = max(self.now[rank] + work, launched)
        if action == Action.READY:
            self.ready[item] = reached if lag else NEVER
        elif action in (Action.JOIN, Action.AWAIT):
            # A rank that nobody waited for is on time from here on, where its stream or its host waits.
            behind = self.late[item] - (self.caught_up[rank] - self.caught_up_at[item])
            if behind > 0:
                self.caught_up[rank] += behind
                shifts[-1] -= behind
                reached -= behind
            if action == Action.JOIN:
                reached = max(reached, self.ends[item])
            else:
                self.awaited[rank] = self.ends[item]
        elif action == Action.SYNC:
            called = plan.at_ns[place] - lag + shifts[-1]
            shifts.append(max(called, reached, self.awaited[rank]) + item - plan.at_ns[place])
            self.awaited[rank] = NEVER
        else:
            self.edges[rank][item] = reached - lag
            if rank == self.earlier[0]:
                self.earliest_ns = reached - plan.measured_ns[place] - self.earlier[1].get(item, 0)
        self.now[rank] = self.reached_ns[place] = reached
        if not self.unchanged and reached > NEVER // 2:
            self.behind_ns[rank] = reached - plan.measured_ns[place]
        self.place[rank] += 1
        return True

    def _host_shift(self, rank: int, waits: int) -> int:
        """Nanoseconds by which a host is later than measured after so many of its waits."""
        if not self.follows[rank]:
            return self.shifts[rank][min(waits, len(self.shifts[rank]) - 1)]
        behind = self.behind_ns[rank]
        return behind if rank != self.earlier[0] else min(behind, self.earliest_ns)

    def _start(self, rank: int, item: int, place: int) -> None:
        plan = self.plan
        before = plan.before[item]
        launched = plan.launch_ns[item] + self._host_shift(rank, plan.work_ns[place])
        start = max(launched, self.ready[item], self.ends[before] if before >= 0 else NEVER)
        start = start + plan.lag_ns[place] if start > NEVER // 2 else plan.at_ns[place]
        self.ends[item] = start + plan.rest_ns[item]
        self.caught_up_at[item] = self.caught_up[rank]
        operation = plan.operation[item]
        if operation < 0:
            return
        parts = self.met[operation]
        parts.append(item)
        if len(parts) == plan.members[operation]:
            how = StartPolicy.LAST if plan.one_way[operation] else self.together
            starts = [self.ends[part] - plan.rest_ns[part] for part in parts]
            begun = _begun(plan, parts, starts, self.without, how)
            for part, own in zip(parts, starts, strict=True):
                self.late[part] = max(own - begun, 0)
                self.ends[part] = begun + plan.rest_ns[part]


def _begun(
    plan: ArrivalReplay, parts: Iterable[int], everyone: list[int], without: int | None, together: StartPolicy
) -> int:
    """The time at which an operation begins whose ``parts`` start at the times of ``everyone``."""
    starts = everyone
    if without is not None:
        starts = [
            start for item, start in zip(parts, everyone, strict=True) if not _is_of(plan, item, without)
        ]
    if not starts or together is StartPolicy.LAST:
        return max(starts or everyone)
    if together is StartPolicy.MEAN:
        return sum(starts) // len(starts)
    return sorted(starts)[(len(starts) - 1) // 2]


def _is_of(plan: ArrivalReplay, item: int, rank: int) -> bool:
    return plan.offsets[rank] <= item < plan.offsets[rank + 1]
