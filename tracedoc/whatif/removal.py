"""What a cause takes of the program of each step of a run, and a program without some causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, RunProgram, Scenario
from tracedoc.step.program import narrow
from tracedoc.whatif.changes.change import Mask, NotApplicable, of_scenario

Times = npt.NDArray[np.int64]


class Part(msgspec.Struct, frozen=True, eq=False):
    """What is taken of a column: ``where``, and how many ns; of most causes that is a small part of it.

    Of many ranks a column is long, and there is one for each cause.
    """

    where: Index | slice
    ns: Times

    @classmethod
    def of(cls, column: Times) -> Part:
        """What a whole column takes."""
        where = np.flatnonzero(column)
        if 2 * where.size > column.size:
            return cls(slice(None), narrow(column))
        return cls(narrow(where), narrow(column[where]))

    @classmethod
    def within(cls, chosen: Mask, column: Times) -> Part:
        """What the chosen entries of a column take."""
        where = np.flatnonzero(chosen)
        return cls(narrow(where), narrow(column[where]))

    def take_from(self, column: Times) -> None:
        """Take it from a column, in place."""
        column[self.where] -= self.ns

    def whole(self, like: Times) -> Times:
        """It as a column like another one, with 0 where nothing is taken."""
        column: Times = np.zeros_like(like)
        column[self.where] = self.ns
        return column

    def spread(self, label: Index, labels: int) -> npt.NDArray[np.float64]:
        """How much is taken of each of so many labels, of which every entry of the column has one; in ns."""
        ns: npt.NDArray[np.float64] = np.maximum(self.ns, 0).astype(np.float64)
        return np.asarray(np.bincount(label[self.where], weights=ns, minlength=labels), dtype=np.float64)


class Removal(msgspec.Struct, frozen=True, eq=False):
    """What goes with a cause: parts of times, waits, and the way things hang together.

    ``parts`` are of columns: nanoseconds ``lag``, ``own`` and ``ready`` of points, ``dur`` of events, ``gap``
    of the time before them, ``transfer`` of the parts of collectives; ``slower`` are two rows: the share of a
    part's transfer that a link saves which does what it should, and that in the fast scenario. ``dropped``
    are causes that no longer hold, ``alone`` parts that wait for nobody. Causes take different parts of a
    time, so that it does not matter in which order they go.
    ``rewired`` ties events to others; that is done last. With ``calls_less`` it also saves the host calls.
    ``doubt`` is by which share ``dur`` and ``lag`` may be more or less than that. ``perhaps`` is what else of
    ``lag`` goes in the fast scenario, and ``unasked`` which waits; other causes may take the same.
    """

    parts: Mapping[str, Part] = {}
    slower: npt.NDArray[np.float64] | None = None
    dropped: Mask | None = None
    unasked: Mask | None = None
    alone: Mask | None = None
    rewired: Callable[[RunProgram], RunProgram] | None = None
    calls_less: bool = False
    doubt: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        dropped: Mask | None = None,
        unasked: Mask | None = None,
        alone: Mask | None = None,
        doubt: float = 0.0,
        **columns: Part | Times | None,
    ) -> Removal | None:
        """What goes, of columns, which have 0 where nothing does; ``None`` if nothing goes."""
        given = {name: one for name, one in columns.items() if one is not None}
        every = {name: one if isinstance(one, Part) else Part.of(one) for name, one in given.items()}
        parts = {name: one for name, one in every.items() if one.ns.any()}
        masks = [one is not None and one.any() for one in (dropped, alone)]
        if not parts and not any(masks):
            return None
        return cls(parts, dropped=dropped, unasked=unasked, alone=alone, doubt=doubt)


OverSteps = tuple[Removal | None, ...]
"""What goes with a cause in each played step, in their order; ``None`` where a step has nothing of it."""


def without(program: RunProgram, removals: Sequence[Removal]) -> RunProgram:
    """The program without some causes."""
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for name in ("lag", "own", "ready", "dur"):
        if taken := _parts(removals, name, program.scenario):
            columns[name] = narrow(_less(getattr(program, name), taken))
    for part in _parts(removals, "perhaps") if program.scenario is Scenario.FAST else ():
        columns["lag"] = np.minimum(columns.get("lag", program.lag), _minus(program.lag, [part]))
    if gaps := _parts(removals, "gap"):
        columns["delay"] = narrow(_minus(program.delay, gaps))
    transfer = program.transfer
    slower = [one.slower for one in removals if one.slower is not None]
    for likely, best in slower:
        share = best if program.scenario is Scenario.FAST else likely
        transfer = np.rint(transfer * (1.0 - share)).astype(np.int64)
    taken = _parts(removals, "transfer")
    if taken or slower:
        columns["transfer"] = _less(transfer, taken)
    dropped = [one.dropped for one in removals if one.dropped is not None]
    if program.scenario is Scenario.FAST:
        dropped += [one.unasked for one in removals if one.unasked is not None]
    if dropped:
        columns["active"] = program.active & ~np.logical_or.reduce(dropped)
    alone = [one.alone for one in removals if one.alone is not None]
    if alone:
        columns["joined"] = program.joined & ~np.logical_or.reduce(alone)
    program = program.edited(**columns) if columns else program
    for one in removals:
        if one.rewired is not None:
            program = one.rewired(program)
    return program


def removed(program: RunProgram, removal: Removal | None, otherwise: str) -> RunProgram:
    """The program without what goes; raises :class:`NotApplicable` where that is nothing."""
    if removal is None:
        raise NotApplicable(otherwise)
    return without(program, [removal])


def _parts(removals: Sequence[Removal], name: str, scenario: Scenario = Scenario.LIKELY) -> list[Part]:
    """What some causes take of one column in a scenario."""
    found = []
    for one in removals:
        part = one.parts.get(name)
        if part is not None and name in ("dur", "lag") and one.doubt:
            factor = of_scenario(scenario, 1 + one.doubt, 1.0, 1 - one.doubt)
            part = Part(part.where, narrow(np.rint(part.ns * factor).astype(np.int64)))
        if part is not None:
            found.append(part)
    return found


def _less(times: Times, taken: Sequence[Part]) -> Times:
    """Times less what is taken of them; entries that mean nothing (below 0) stay."""
    left = _minus(times, taken)
    np.maximum(left, 0, out=left)
    np.copyto(left, times, where=times <= 0)
    return left


def _minus(times: Times, taken: Sequence[Part]) -> Times:
    """The difference in 64 bits; one array beside those that are given, however many they are."""
    left = times.astype(np.int64)
    for part in taken:
        part.take_from(left)
    return left
