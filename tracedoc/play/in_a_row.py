"""Steps in a row: their programs as one, in which what waits for the step before waits for that one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.play.player import Played, Player
from tracedoc.play.run_program import AddedEdges, CollectiveParts, Index, Layout, Mask, RunProgram, Scenario

Column = npt.NDArray[Any]

_OF_EVENTS = ("launch_lag", "gap", "delay", "stream", "group", "event_part")
_OF_PARTS = ("transfer_ns", "nbytes", "kind", "group", "gradients", "extra", "complete", "block")


class Row:
    """Plays steps of the same ranks one after the other; after the last one the first one comes again.

    ``subject`` is the position of the rank that stands for the run. What an edge calls the step before is the
    like of its source there: counted from the end of the rank's calls or of the stream, as what is waited for
    is what came last. Edges without such a source are left out.
    """

    def __init__(self, subject: int, layouts: Sequence[Layout]) -> None:
        self._layouts, self._player = layouts, Player(subject)
        self._points = _Entries([one.point_rank for one in layouts])
        self._events = _Entries([one.lane(np.arange(one.events)) for one in layouts])
        self._parts = _Entries([self._events.at(step, one.joins.event) for step, one in enumerate(layouts)])
        sources = [
            self._events.source(step, one.cause_from, one.cause_back) for step, one in enumerate(layouts)
        ]
        self._kept = [there for _, there in sources]
        self._first: dict[tuple[Scenario, str], tuple[list[Any], Any]] = {}
        self._layout = self._joined_layout([source for source, _ in sources])
        self._base: RunProgram
        self.mean_ns: dict[Scenario, float] = {}

    def play_base(self, programs: Sequence[Sequence[RunProgram]]) -> None:
        """Play the programs without a change, all steps in each scenario: ``mean_ns`` is their mean step."""
        found = self._player.play_base([self._joined(one) for one in programs])
        self._base = found[0].program
        self.mean_ns = {one.program.scenario: one.step_ns / len(self._layouts) for one in found}

    def play(self, programs: Sequence[Sequence[RunProgram]]) -> list[Played]:
        """Play lists of all steps' programs; ``step_ns`` is the mean of the steps."""
        played = self._player.play([self._joined(one) for one in programs])
        return [replace(one, step_ns=one.step_ns / len(self._layouts)) for one in played]

    @property
    def together(self) -> int:
        """How many lists are best played together."""
        return self._player.together(self._base)

    def _joined(self, programs: Sequence[RunProgram]) -> RunProgram:
        """The programs of all steps as one.

        Columns that are those of the first programs of a scenario are the same arrays then.
        """
        scenario = programs[0].scenario

        def of(name: str, put: Callable[[list[Any]], Any]) -> Any:
            given = [getattr(one, name) for one in programs]
            known, whole = self._first.get((scenario, name), (given, None))
            if whole is not None and all(one is other for one, other in zip(given, known, strict=True)):
                return whole
            made = put(given)
            self._first.setdefault((scenario, name), (given, made))
            return made

        return RunProgram(
            layout=self._layout,
            lag=of("lag", self._behind),
            **{name: of(name, self._points.put) for name in ("own", "ready")},
            **{name: of(name, self._events.put) for name in ("dur", "delay")},
            **{name: of(name, self._parts.put) for name in ("transfer", "joined", "launched")},
            active=of("active", self._of_causes),
            extra=of("extra", self._extra),
            contention=float(np.mean([one.contention for one in programs])),
            scenario=scenario,
        )

    def _joined_layout(self, sources: list[Index]) -> Layout:
        layouts, points, events = self._layouts, self._points, self._events

        def each(name: str) -> list[Column]:
            return [getattr(one, name) for one in layouts]

        def moved(name: str, entries: _Entries) -> list[Column]:
            return [np.where(one < 0, one, entries.at(step, one)) for step, one in enumerate(each(name))]

        bases = {name: np.sum(each(name), axis=0) for name in ("point_base", "event_base")}
        opens = (events.at(0, layouts[0].opens) - bases["event_base"][:-1]).tolist()
        ends = zip(each("to_host"), moved("cause_to", points), moved("cause_to", events), strict=True)
        none = np.empty(0, dtype=np.int32)
        columns: dict[str, Any] = {
            **{name: points.put(each(name)) for name in ("kind", "part", "blocks")},
            **{name: events.put(each(name)) for name in _OF_EVENTS},
            **{name: self._of_causes(each(name)) for name in ("cause_kind", "cause_lag")},
            **{name: np.concatenate(moved(name, points)) for name in ("rejoin_from", "rejoin_to")},
            **bases,
        }
        return Layout(
            **columns,
            rejoin_lag=np.concatenate(each("rejoin_lag")),
            after_return=self._behind(each("after_return")),
            point=events.put(moved("point", points)),
            cause_from=self._of_causes(sources),
            cause_to=self._of_causes([np.where(*one) for one in ends]),
            cause_back=self._of_causes([one & (step == 0) for step, one in enumerate(each("cause_back"))]),
            ranks=layouts[0].ranks,
            notes=tuple(
                replace(one, opens=at, labels=(), label_at=none)
                for one, at in zip(layouts[0].notes, opens, strict=True)
            ),
            periodic=True,
            offset_ns=layouts[0].offset_ns,
            spare_cores=layouts[0].spare_cores,
            batch_point=none,
            batch_ns=np.empty(0, dtype=np.int64),
            joins=self._joins(),
        )

    def _joins(self) -> CollectiveParts:
        joins = [one.joins for one in self._layouts]
        since = np.cumsum([0, *(one.operations for one in joins)]).tolist()
        return replace(
            joins[0],
            event=self._parts.put([self._events.at(step, one.event) for step, one in enumerate(joins)]),
            op=self._parts.put([one.op + since[step] * (one.op >= 0) for step, one in enumerate(joins)]),
            **{name: self._parts.put([getattr(one, name) for one in joins]) for name in _OF_PARTS},
        )

    def _of_causes(self, columns: list[Column]) -> Column:
        """One column of the causes that are left."""
        return np.concatenate([one[kept] for one, kept in zip(columns, self._kept, strict=True)])

    def _behind(self, steps: list[Column]) -> Column:
        """A column in which a step's first point says what comes between its last one and the next step."""
        whole = self._points.put(steps)
        for step in range(len(steps)):
            first, ended = self._points.first(step), self._points.first(step - 1)
            whole[self._points.at(step, first)] = steps[step - 1][ended]
        return whole

    def _extra(self, extras: list[AddedEdges]) -> AddedEdges:
        columns: list[tuple[Column, ...]] = []
        for step, one in enumerate(extras):
            event, there = self._events.source(step, one.source, one.back)
            point, reached = self._points.source(step, one.source, one.back)
            kept = np.where(one.of_point, reached, there)
            source, target = np.where(one.of_point, point, event), self._events.at(step, one.target)
            edges = (source, target, one.of_point, one.lag_ns, one.back & (step == 0))
            columns.append(tuple(column[kept] for column in edges))
        return AddedEdges(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class _Entries:
    """Entries of several steps in one order: of their ``queues``, which rise in each step, then of steps."""

    def __init__(self, queues: Sequence[Index]) -> None:
        self._bounds = np.cumsum([0, *(one.size for one in queues)])
        self._order = np.argsort(np.concatenate(queues), kind="stable")
        self._place = np.empty_like(self._order)
        self._place[self._order] = np.arange(self._order.size)
        self._queues = [np.unique(one, return_index=True) for one in queues]

    def first(self, step: int) -> Index:
        """The first entry of each queue of a step."""
        return self._queues[step][1]

    def at(self, step: int, index: Index) -> Index:
        """The places of entries of one step; what is not there has any."""
        found: Index = self._place[np.clip(self._bounds[step] + index, 0, self._place.size - 1)]
        return found

    def put(self, columns: Sequence[Column]) -> Column:
        """One column of all steps."""
        return np.concatenate(columns)[self._order]

    def source(self, step: int, index: Index, back: Mask) -> tuple[Index, Mask]:
        """The places of entries, ``back`` in the step before those of their like; which of them are there."""
        before = (step or len(self._queues)) - 1
        mine, other = self._ends(step), self._ends(before)
        queue = np.searchsorted(mine[1], index, side="right") - 1
        at = np.minimum(np.searchsorted(other[0], mine[0][queue]), other[0].size - 1)
        like = other[2][at] - (mine[2][queue] - index)
        there = (other[0][at] == mine[0][queue]) & (like >= other[1][at])
        return np.where(back, self.at(before, like), self.at(step, index)), there | ~back

    def _ends(self, step: int) -> tuple[Index, Index, Index]:
        """The queues of a step, and where their entries begin and end."""
        queue, first = self._queues[step]
        return queue, first, np.append(first[1:], self._bounds[step + 1] - self._bounds[step])
