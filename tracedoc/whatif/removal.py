"""What a cause takes of the program of each step of a run, and a program without some causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import RunProgram, Scenario
from tracedoc.step.program import narrow
from tracedoc.whatif.changes.change import Mask, of_scenario

Times = npt.NDArray[np.int64]


class Removal(msgspec.Struct, frozen=True, eq=False):
    """What goes with a cause: parts of times, waits, and the way things hang together.

    ``lag``, ``own`` and ``ready`` are nanoseconds of points, ``dur`` of events, ``gap`` of the time before
    them, ``transfer`` of the parts of collectives; ``slower`` is the share of a part's transfer that a link
    which does what it should saves. ``dropped`` are causes that no longer hold, ``alone`` parts that wait for
    nobody. Causes take different parts of a time, so that it does not matter in which order they go.
    ``rewired`` ties events to others; that is done last. With ``calls_less`` it also saves the host calls.
    ``doubt`` is by which share ``dur`` and ``lag`` may be more or less than that.
    """

    lag: Times | None = None
    own: Times | None = None
    ready: Times | None = None
    dur: Times | None = None
    gap: Times | None = None
    transfer: Times | None = None
    slower: npt.NDArray[np.float64] | None = None
    dropped: Mask | None = None
    alone: Mask | None = None
    rewired: Callable[[RunProgram], RunProgram] | None = None
    calls_less: bool = False
    doubt: float = 0.0

    def __post_init__(self) -> None:
        for name in _KEPT:  # of many ranks they are long, and there is one for each cause
            if (column := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, narrow(column))


_KEPT = ("lag", "own", "ready", "dur", "gap", "transfer")


class OverSteps(msgspec.Struct, frozen=True, eq=False):
    """What goes with a cause in each played step, in their order; ``None`` where a step has nothing of it."""

    steps: tuple[Removal | None, ...]


def without(program: RunProgram, removals: Sequence[Removal]) -> RunProgram:
    """The program without some causes."""
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for name in ("lag", "own", "ready", "dur"):
        taken = [
            _in_doubt(one, part, program.scenario) if name in ("dur", "lag") else part
            for one in removals
            if (part := getattr(one, name)) is not None
        ]
        if taken:
            columns[name] = narrow(_less(getattr(program, name), taken))
    gaps = [one.gap for one in removals if one.gap is not None]
    if gaps:
        columns["delay"] = narrow(_minus(program.delay, gaps))
    transfer = program.transfer
    slower = [one.slower for one in removals if one.slower is not None]
    for share in slower:
        transfer = np.rint(transfer * (1.0 - share)).astype(np.int64)
    taken = [one.transfer for one in removals if one.transfer is not None]
    if taken or slower:
        columns["transfer"] = _less(transfer, taken)
    dropped = [one.dropped for one in removals if one.dropped is not None]
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


def _in_doubt(removal: Removal, taken: Times, scenario: Scenario) -> Times:
    """What goes in a scenario of what is taken."""
    if not removal.doubt:
        return taken
    factor = of_scenario(scenario, 1 + removal.doubt, 1.0, 1 - removal.doubt)
    return narrow(np.rint(taken * factor).astype(np.int64))


def _less(times: Times, taken: Sequence[Times]) -> Times:
    """Times less what is taken of them; entries that mean nothing (below 0) stay."""
    left = _minus(times, taken)
    np.maximum(left, 0, out=left)
    np.copyto(left, times, where=times <= 0)
    return left


def _minus(times: Times, taken: Sequence[Times]) -> Times:
    """The difference in 64 bits; one array beside those that are given, however many they are."""
    left = times.astype(np.int64)
    for part in taken:
        left -= part
    return left


def chosen_of(times: Times | None, chosen: Mask) -> Times | None:
    """The chosen of some times and 0 of others, ``None`` where nothing is left."""
    if times is None:
        return None
    kept = np.where(chosen, times, 0)
    return kept if kept.any() else None
