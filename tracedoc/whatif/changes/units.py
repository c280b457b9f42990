"""Changes of how large sharded units are: several are put together, or the largest one is split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, RunProgram, Scenario
from tracedoc.play.scenarios import call_latency
from tracedoc.step.program import Doing
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.whatif.changes.buckets import carried, cut_reductions, merged_into_last, nearest
from tracedoc.whatif.changes.change import BACKWARD, Mask, NotApplicable, Parameter, as_change, of_scenario
from tracedoc.whatif.changes.gathers import (
    of_units,
    started_as,
    unit_gathers,
    without_collectives,
)


@as_change(
    Parameter("count", "how many it becomes", 8.0, 2, 256),
    assuming="its compute is shared equally by the new units",
)
def split_units(program: RunProgram, count: float) -> RunProgram:
    """The largest sharded unit becomes several, gathered and reduced one after the other.

    The pieces of a reduction are ready one after the other in the backward pass.
    """
    joins = program.layout.joins
    chosen = unit_gathers(program)
    if not chosen.any():
        raise NotApplicable("the step gathers no sharded units")
    if not (joins.nbytes[chosen] > 0).all():
        raise NotApplicable("the sizes of the units are not known")
    if program.layout.is_cpu:
        raise NotApplicable("the ranks compute on CPUs: what runs beside a gather there slows it down")
    pieces = int(count)
    largest = joins.nbytes[chosen].max()
    # In the fast scenario, where a call less saves most, a further one costs least.
    latency = call_latency(program, program.scenario.opposite)
    large = np.flatnonzero(chosen & (2 * joins.nbytes > largest))
    gathered = _in_pieces(program, large, pieces, latency)
    reductions = of_units(program, joins.gradients & program.launched)
    if reductions.any() and (joins.nbytes[reductions] > 0).all():
        size = float(joins.nbytes[reductions].max()) / pieces
        gathered = cut_reductions(gathered, size, latency) or gathered
    if gathered is program:
        raise NotApplicable("the capture does not show the compute of the largest unit")
    return gathered


def _in_pieces(program: RunProgram, large: Index, pieces: int, latency: npt.NDArray[np.int64]) -> RunProgram:
    """Return the program with gathers in pieces, each needed by an equal share of the pass's compute.

    All pieces are gathered one after the other; but for the fast scenario, each when the one before begins to
    compute, and in the slow one, when the host launches what needs it.
    """
    layout, joins = program.layout, program.layout.joins
    transfer, dur = program.transfer.copy(), program.dur.astype(np.int64)
    ties: list[tuple[int, int, int, bool]] = []
    for part in large.tolist():
        event = int(joins.event[part])
        computed = _computed_after(program, event)
        if computed.size < 2:
            continue
        done = np.cumsum(program.dur[computed], dtype=np.int64)
        shares = np.arange(1, pieces) / pieces
        begins = distinct(nearest(done, shares * done[-1]) + 1)
        begins = begins[begins < computed.size]
        if not begins.size:
            continue
        own = min(int(latency[part]), int(program.transfer[part]))
        piece = own + (int(program.transfer[part]) - own) // (begins.size + 1)
        transfer[part] = piece
        before = np.concatenate(([0], begins))
        for number, begin in enumerate(begins.tolist()):
            target = int(computed[begin])
            ties.append((event, target, (number + 1) * piece, False))
            if program.scenario is not Scenario.FAST:
                start = int(computed[before[number]])
                ties.append((start, target, max(piece - int(program.dur[start]), 0), False))
            if program.scenario is Scenario.SLOW and layout.point[target] >= 0:
                ties.append((int(layout.point[target]), target, piece, True))
        beside = min(begins.size * piece / max(int(done[-1]), 1), 1.0)
        dur[computed] = np.rint(dur[computed] * (1 + program.contention * beside))
    if not ties:
        return program
    return program.edited(transfer=transfer, dur=dur).tied(*np.array(ties, dtype=np.int64).T)


def _computed_after(program: RunProgram, event: int) -> Index:
    """Return the compute of a gather's pass that was launched after it, in its order."""
    layout = program.layout
    rank = int(layout.rank_of_event(event))
    mine = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
    part = layout.event_part[event]
    parts = next((one for one in ((Phase.FORWARD,), BACKWARD) if part in one), ())
    chosen = layout.computes[mine] & is_among(layout.event_part[mine], parts)
    chosen &= layout.point[mine] > layout.point[event]
    return np.asarray(mine[chosen][np.argsort(layout.point[mine[chosen]], kind="stable")], dtype=np.intp)


HOOKS_GONE = (1.0, 0.8, 0.5)
"""Of the share of units that disappear, so much of the time in hooks does: each parameter costs some too.

Measured 0.80 and 0.83 on FSDP2 of torch 2.13 without any transfer, blocks of eight modules in eight or seven
units against one."""


class Queue:
    """The gathers of one rank, stream and pass in their order, and where each group of them begins."""

    def __init__(self, parts: Index, group: Index) -> None:
        self.parts = parts
        self.first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        self.group = np.cumsum(is_among(np.arange(parts.size), self.first)) - 1


@as_change(assuming="there is memory for two gathered blocks")
def merge_units(program: RunProgram) -> RunProgram:
    """The sharded units of a block become one, gathered and reduced in one call each.

    A block is gathered when its first unit is needed, as many blocks ahead as units are today; its gradients
    are reduced when those of its last unit are there. The latency and the hooks of the others disappear.
    """
    chosen = unit_gathers(program)
    if not chosen.any():
        raise NotApplicable("the step gathers no sharded units")
    queues = [Queue(parts, _blocks(program, parts)) for parts in _queues(program, chosen)]
    if all(one.first.size == one.parts.size for one in queues):
        raise NotApplicable("no block has several units")
    latency = call_latency(program, program.scenario)
    merged = _gathered_together(program, queues, latency)
    reductions = of_units(program, program.layout.joins.gradients & program.launched)
    last = np.full(reductions.size, NONE, dtype=np.intp)
    for parts in _queues(program, reductions):
        queue = Queue(parts, _blocks(program, parts))
        ends = np.append(queue.first[1:], parts.size) - 1
        last[parts] = parts[ends[queue.group]]
    merged = merged_into_last(merged, last, latency) or merged
    gone = sum(one.parts.size - one.first.size for one in queues) / int(chosen.sum())
    return merged.edited(lag=_less_hooks(program, merged, gone))


def _queues(program: RunProgram, chosen: Mask) -> Iterator[Index]:
    """Yield the chosen parts of each rank, stream and pass, in their order."""
    layout, joins = program.layout, program.layout.joins
    mine = np.flatnonzero(chosen)
    event = joins.event[mine]
    key = layout.lane(event) * 8 + np.minimum(layout.event_part[event], 7)
    for one in distinct(key).tolist():
        parts = mine[key == one]
        yield parts[np.argsort(joins.event[parts], kind="stable")]


def _blocks(program: RunProgram, parts: Index) -> Index:
    """The number of each part's block in a queue, of each its own where one is not known."""
    block = program.layout.joins.block[parts]
    return np.asarray(block if (block != NONE).all() else np.arange(parts.size))


def _gathered_together(
    program: RunProgram, queues: list[Queue], latency: npt.NDArray[np.int64]
) -> RunProgram:
    """Return the program with the gathers of each group as one, in the place of the first of them."""
    joins = program.layout.joins
    carrier = np.full(joins.event.size, NONE, dtype=np.intp)
    moved: list[tuple[Index, Index, Index]] = []
    for queue in queues:
        carrier[queue.parts] = queue.parts[queue.first[queue.group]]
        if program.scenario is not Scenario.SLOW:
            moved.append(_as_far_ahead(program, queue))
    gone = np.flatnonzero((carrier != NONE) & (carrier != np.arange(carrier.size)))
    transfer = program.transfer.copy()
    np.add.at(transfer, carrier[gone], np.maximum(program.transfer[gone] - latency[gone], 0))
    removed = np.zeros(carrier.size, dtype=bool)
    removed[gone] = True
    changed, layout = program.edited(transfer=transfer), program.layout
    if moved:
        changed = started_as(changed, *(np.concatenate(one) for one in zip(*moved, strict=True)))
    emptied = without_collectives(changed, removed)
    used = is_among(layout.cause_from, joins.event[gone]) & ~layout.to_host
    emptied = emptied.edited(active=emptied.active & ~used)
    return carried(emptied, program, gone, carrier, ~is_among(layout.cause_to, joins.event))


def _as_far_ahead(program: RunProgram, queue: Queue) -> tuple[Index, Index, Index]:
    """Return the groups' first gathers that start earlier, whose call each takes, and whose causes.

    Today a gather is called, and may start, some units ahead of its use: so many blocks ahead it does as a
    group. With one ahead that is in the first unit of the group before, where the second one is today.
    """
    called, caused = _distances(program, queue.parts)
    group = np.arange(1, queue.first.size)
    own = queue.first[group]

    def model(ahead: int) -> Index:
        before = queue.first[np.maximum(group - ahead, 0)] + ahead
        return queue.parts[np.where(ahead > 0, np.minimum(before, own), own)]

    return queue.parts[own], model(called), model(caused)


def _distances(program: RunProgram, parts: Index) -> tuple[int, int]:
    """Units between a gather's call and its use, and between its earliest start and its use (medians).

    A unit is used from the first compute on that waits for its gather. A gather may start before the unit
    before has computed if what it waits for was launched before the last compute of that unit; a copy into
    its buffer, on a stream of its own, is where that begins.
    """
    layout, joins = program.layout, program.layout.joins
    events = joins.event[parts]
    point = layout.point
    place = np.full(program.dur.size, NONE, dtype=np.intp)
    place[events] = np.arange(parts.size)
    inner = np.flatnonzero(~layout.to_host & program.active & ~layout.cause_back)
    inner = inner[~is_among(layout.cause_to[inner], joins.event) | (place[layout.cause_to[inner]] >= 0)]
    uses = inner[(place[layout.cause_from[inner]] >= 0) & (place[layout.cause_to[inner]] < 0)]
    never = np.iinfo(np.int64).max
    used = np.full(parts.size, never)
    np.minimum.at(used, place[layout.cause_from[uses]], point[layout.cause_to[uses]].astype(np.int64))
    if (used == never).all() or parts.size < 2:
        return 0, 0
    used = np.minimum.accumulate(used[::-1])[::-1]
    number = np.arange(parts.size)
    called = np.maximum(number - np.searchsorted(used, point[events], side="right"), 0)
    called[point[events] == NONE] = 0
    rank = int(layout.rank_of_event(int(events[0])))
    mine = np.arange(layout.event_base[rank], layout.event_base[rank + 1])
    launched = np.sort(point[mine[layout.computes[mine]]])
    last = launched[np.maximum(np.searchsorted(launched, used[1:]) - 1, 0)] if launched.size else used[1:]
    held = inner[(place[layout.cause_to[inner]] >= 0) & layout.computes[layout.cause_from[inner]]]
    beside = ~is_among(layout.lane(layout.cause_from[held]), layout.lane(layout.cause_to[uses]))
    place[layout.cause_from[held[beside]]] = place[layout.cause_to[held[beside]]]
    before = inner[(place[layout.cause_to[inner]] >= 0) & layout.computes[layout.cause_from[inner]]]
    held = before[place[layout.cause_from[before]] < 0]
    since = np.full(parts.size, NONE, dtype=np.int64)
    np.maximum.at(since, place[layout.cause_to[held]], point[layout.cause_from[held]].astype(np.int64))
    may = np.maximum(number - np.searchsorted(last, since, side="right"), 0)
    may = np.where(since == NONE, called, may)
    return int(median(called[1:])), int(median(may[1:]))


def _less_hooks(program: RunProgram, merged: RunProgram, gone: float) -> npt.NDArray[np.int64]:
    """Return the host's times without a share of its hooks; without hooks, without those before the calls."""
    layout = program.layout
    hooks, hook_ns = layout.at(Doing.HOOKS)
    if not hooks.size:
        return merged.lag.astype(np.int64)
    lag = program.lag.astype(np.int64)
    less = np.rint(hook_ns * (gone * of_scenario(program.scenario, *HOOKS_GONE))).astype(np.int64)
    lag[hooks] = np.maximum(lag[hooks] - less, 0)
    return lag
