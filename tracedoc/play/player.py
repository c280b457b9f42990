"""Play a run's program with changes: many at once, in all scenarios, compute slowed down beside transfers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.play.segments import (
    Slowdown,
    Stretches,
    SyncGraph,
    find_sync_graph,
    reduce_stretches,
    weigh,
)
from tracedoc.play.solver import Cyclic, Plan, Solution, Times, make_plan, solve
from tracedoc.spans import Int64Array
from tracedoc.timeline.lags import NEVER

Floats = npt.NDArray[np.float64]


class OverlapShare(msgspec.Struct, frozen=True, eq=False):
    """Which share of each stretch, and of each meeting event itself, runs beside a transfer."""

    stretch: Floats
    itself: Floats


def find_overlap(graph: SyncGraph, program: RunProgram, times: Times, before: Times) -> OverlapShare:
    """Return the shares of one program by the times of its nodes in two periods (one column)."""
    layout, joins = program.layout, program.layout.joins
    meeting = graph.meeting
    rank = layout.rank_of_event(meeting)
    start = times[graph.start_base : graph.join_base].astype(np.float64)
    previous = before[graph.start_base : graph.join_base].astype(np.float64)
    origin = float(start.min(initial=0))
    length = program.dur[meeting].astype(np.float64)
    part = graph.part
    comm = np.flatnonzero(part >= 0)
    of = part[comm]
    length[comm] = program.transfer[of]
    begun = start.copy()
    if joins.operations:
        met = times[graph.join_base :].astype(np.float64)
        joined = program.joined[of]
        begun[comm[joined]] = met[joins.op[of[joined]]]
    end = begun + length
    source = graph.stretch_from
    opens = source >= np.arange(meeting.size)
    free = np.where(opens, previous[source] + (end - start)[source], end[source])
    # Each rank has a stretch of time of its own, so that all of them are covered in one go.
    room = float(max(end.max(initial=0), start.max(initial=0)) - min(origin, free.min(initial=0))) + 1.0
    shift = rank * room - origin
    order = comm[np.argsort((begun + shift)[comm], kind="stable")]
    if order.size == 0:
        return OverlapShare(np.zeros(meeting.size), np.zeros(meeting.size))
    first, last = (begun + shift)[order], np.maximum.accumulate((end + shift)[order])
    first[1:] = np.maximum(first[1:], last[:-1])
    last = np.maximum(first, last)
    knots = np.stack((first, last), axis=1).ravel()
    covered = np.concatenate(([0.0], np.cumsum(np.diff(knots) * (np.arange(knots.size - 1) % 2 == 0))))

    def share(begin: Floats, stop: Floats) -> Floats:
        passed = np.interp(stop + shift, knots, covered) - np.interp(begin + shift, knots, covered)
        return np.asarray(np.clip(passed / np.maximum(stop - begin, 1.0), 0.0, 1.0))

    return OverlapShare(share(free, start), share(begun, end))


def slow_down(program: RunProgram, known: OverlapShare, now: OverlapShare) -> Slowdown:
    """The share by which compute is longer than captured, where other shares of it run beside transfers."""
    k = program.contention
    return Slowdown(
        (1 + k * now.stretch) / (1 + k * known.stretch) - 1, (1 + k * now.itself) / (1 + k * known.itself) - 1
    )


ROUNDS = 2
"""How often the times are worked out again after contention has changed the lengths of kernels."""

BATCH_BYTES = 5_000_000
"""Programs are played together as long as what they and their edges take is no more than this."""

MOST_PLANS = 4
"""So many plans are kept: most changes need that of the program without a change."""


class Played(msgspec.Struct, frozen=True, eq=False):
    """One program played: the steady step of the rank that stands for the run, and all that led to it."""

    program: RunProgram
    plan: Plan
    step_ns: float
    weights: Int64Array
    stretches: Stretches
    times: Times
    before: Times
    periods: int


class Player:
    """Plays changed programs of one run; ``subject`` is the position of the rank that stands for it."""

    def __init__(self, subject: int) -> None:
        self._subject = subject
        self._plans: dict[bytes, Plan] = {}
        self._cyclic: set[bytes] = set()
        self._bases: dict[Scenario, RunProgram] = {}
        self._overlap: dict[tuple[bytes, Scenario], OverlapShare] = {}
        self._reduced: dict[tuple[bytes, Scenario], Stretches] = {}

    def play_base(self, programs: Sequence[RunProgram]) -> list[Played]:
        """Play the programs without a change, one for each scenario; changes are compared with them."""
        self._bases = {program.scenario: program for program in programs}
        self._overlap, self._reduced = {}, {}
        played = self.play(programs)
        for one in played:
            beside = find_overlap(one.plan.graph, one.program, one.times, one.before)
            self._overlap[one.program.extra.shape, one.program.scenario] = beside
        return played

    def together(self, program: RunProgram) -> int:
        """The number of programs like this one that are best edited and played together."""
        layout = program.layout
        edges = self._plan(program).graph.src.size
        return max(1, BATCH_BYTES // (4 * (layout.points + layout.events) + 24 * edges))

    def play(self, programs: Sequence[RunProgram]) -> list[Played]:
        """Play programs; raises :class:`~tracedoc.play.solver.Cyclic` where one waits for itself."""
        found: dict[int, Played] = {}
        alike: dict[bytes, list[int]] = {}
        for index, program in enumerate(programs):
            alike.setdefault(program.extra.shape, []).append(index)
        for members in alike.values():
            plan = self._plan(programs[members[0]])
            width = self.together(programs[members[0]])
            for begin in range(0, len(members), width):
                batch = members[begin : begin + width]
                played = self._play_alike(plan, [programs[index] for index in batch])
                found.update(zip(batch, played, strict=True))
        return [found[index] for index in range(len(programs))]

    def _plan(self, program: RunProgram) -> Plan:
        key = program.extra.shape
        if key in self._cyclic:
            raise Cyclic
        if key not in self._plans:
            if len(self._plans) == MOST_PLANS:  # the first is that of programs without ties
                gone = list(self._plans)[1]
                del self._plans[gone]
                self._overlap = {one: kept for one, kept in self._overlap.items() if one[0] != gone}
                self._reduced = {one: kept for one, kept in self._reduced.items() if one[0] != gone}
            try:
                self._plans[key] = make_plan(find_sync_graph(program))
            except Cyclic:
                self._cyclic.add(key)
                raise
        return self._plans[key]

    def _play_alike(self, plan: Plan, programs: list[RunProgram]) -> list[Played]:
        graph = plan.graph
        stretches = self._stretches(graph, programs)
        weights = np.stack(
            [weigh(graph, program, one) for program, one in zip(programs, stretches, strict=True)], axis=1
        )
        solution = solve(plan, programs, weights)
        changed = [column for column, program in enumerate(programs) if self._is_slowed(program)]
        for _ in range(ROUNDS if changed else 0):
            for column in changed:
                slower = self._slower(plan, programs[column], solution, column)
                weights[:, column] = weigh(graph, programs[column], stretches[column], slower)
            solution = solve(plan, programs, weights)
        return [
            Played(
                program=program,
                plan=plan,
                step_ns=float(solution.step_ns[self._subject, column]),
                weights=weights[:, column],
                stretches=stretches[column],
                times=solution.times[:, column],
                before=solution.before[:, column],
                periods=solution.periods,
            )
            for column, program in enumerate(programs)
        ]

    def _is_slowed(self, program: RunProgram) -> bool:
        base = self._bases.get(program.scenario)
        return program.contention > 0 and base is not None and base is not program

    def _slower(self, plan: Plan, program: RunProgram, solution: Solution, column: int) -> Slowdown:
        now = find_overlap(plan.graph, program, solution.times[:, column], solution.before[:, column])
        return slow_down(program, self._known_overlap(plan, program), now)

    def _known_overlap(self, plan: Plan, program: RunProgram) -> OverlapShare:
        """The shares that ran beside transfers in the capture, by the meeting events of a plan."""
        key = program.extra.shape, program.scenario
        if key not in self._overlap:
            untied = replace(program.extra, lag_ns=np.full_like(program.extra.lag_ns, NEVER))
            base = self._bases[program.scenario].edited(extra=untied)
            (stretches,) = self._stretches(plan.graph, [base])
            weights = weigh(plan.graph, base, stretches)
            solution = solve(plan, [base], weights[:, None])
            self._overlap[key] = find_overlap(plan.graph, base, solution.times[:, 0], solution.before[:, 0])
        return self._overlap[key]

    def _stretches(self, graph: SyncGraph, programs: Sequence[RunProgram]) -> list[Stretches]:
        """Reduce the stretches of programs; those with the lags and durations of their base share them."""
        found = [self._known_stretches(graph, program) for program in programs]
        new = [program for program, known in zip(programs, found, strict=True) if known is None]
        made = iter(reduce_stretches(graph, new) if new else ())
        return [next(made) if known is None else known for known in found]

    def _known_stretches(self, graph: SyncGraph, program: RunProgram) -> Stretches | None:
        columns = ("lag", "dur", "delay", "launched")
        alike = (
            scenario
            for scenario, base in self._bases.items()
            if all(getattr(base, name) is getattr(program, name) for name in columns)
        )
        scenario = next(alike, None)
        if scenario is None:
            return None
        key = program.extra.shape, scenario
        if key not in self._reduced:
            (self._reduced[key],) = reduce_stretches(graph, [program])
        return self._reduced[key]
