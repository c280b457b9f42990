"""Changes of how large the messages are in which gradients travel, and of how often they do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, Layout, RunProgram
from tracedoc.play.scenarios import call_latency
from tracedoc.spans import Int64Array
from tracedoc.step.program import Group
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.phases import Phase
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.values import once
from tracedoc.whatif.changes.change import BACKWARD, Mask, NotApplicable, Parameter, as_change, of_scenario
from tracedoc.whatif.changes.gathers import CALLS_STAY, without_collectives

MIB = 2**20
MOST_PIECES = 64
"""A message is cut into so many pieces at most: more of them would change little."""


@as_change(Parameter("mib", "how large a message becomes at most", 25.0, 0.01, 65536))
def cap_buckets(program: RunProgram, mib: float) -> RunProgram:
    """Gradients travel in messages of a size, as with bucket_cap_mb: small ones together, large ones cut."""
    joins = program.layout.joins
    if not (joins.nbytes[_reductions(program)] > 0).all():
        raise NotApplicable("the sizes of the step's gradient messages are not known")
    merged = _merged(program, mib * MIB)
    edited = cut_reductions(merged or program, mib * MIB, program.split.fixed_ns) or merged
    if edited is None:
        raise NotApplicable("the step's gradient messages are about that large")
    return edited


def _reductions(program: RunProgram) -> Mask:
    return np.asarray(program.layout.joins.gradients & program.launched)


def _queues(program: RunProgram) -> Iterator[Index]:
    """Yield the gradient reductions of each rank, stream, kind and backward pass, in their order."""
    for parts in _all_queues(program.layout):
        launched = parts[program.launched[parts]]
        if launched.size:
            yield launched


@once
def _all_queues(layout: Layout) -> list[Index]:
    """:func:`_queues`, of a program that launches all of them."""
    joins = layout.joins
    parts = np.flatnonzero(joins.gradients)
    key = layout.lane(joins.event[parts]) * 64 + np.minimum(backward_pass(layout, joins.event[parts]), 63)
    key = key * 64 + joins.kind[parts]
    queues = [parts[key == one] for one in distinct(key).tolist()]
    return [mine[np.argsort(joins.event[mine], kind="stable")] for mine in queues]


def _filled(nbytes: Int64Array, largest: float) -> Index:
    """The message of each part, counted from 0, if each is filled before the next one is begun."""
    message, held = np.zeros(nbytes.size, dtype=np.intp), 0.0
    for place, size in enumerate(nbytes.tolist()):
        begins = held > 0 and held + size > largest
        held = size if begins else held + size
        message[place] = message[place - 1] + begins
    return message


def _merged(program: RunProgram, largest: float) -> RunProgram | None:
    """The program with small parts as one, which goes when the last of them is ready; ``None`` for none."""
    joins = program.layout.joins
    last = np.full(joins.event.size, NONE, dtype=np.intp)
    for parts in _queues(program):
        message = _filled(joins.nbytes[parts], largest)
        last[parts] = parts[np.searchsorted(message, message, side="right") - 1]
    return merged_into_last(program, last, call_latency(program, program.scenario))


def merged_into_last(program: RunProgram, last: Index, latency: Int64Array) -> RunProgram | None:
    """Return the program with parts carried by later ones, ``last`` (``NONE`` for parts that stay).

    Each part that is carried saves its ``latency``. ``None`` if none is.
    """
    joins = program.layout.joins
    gone = np.flatnonzero((last != NONE) & (last != np.arange(last.size)))
    if gone.size == 0:
        return None
    transfer = program.transfer.copy()
    apart, lag = _on_shared_cores(program, gone, last)
    more = np.maximum(program.transfer[gone] - latency[gone] - apart, 0)
    np.add.at(transfer, last[gone], more)
    removed = np.zeros(joins.event.size, dtype=bool)
    removed[gone] = True
    emptied = without_collectives(program.edited(transfer=transfer), removed)
    later = ~is_among(program.layout.cause_to, _of_backward(program.layout))
    return carried(emptied.edited(lag=lag), program, gone, last, later)


def _on_shared_cores(program: RunProgram, gone: Index, last: Index) -> tuple[Int64Array, Int64Array]:
    """What each part that is ``gone`` takes less in ns, and the lags of hosts, where both shared their cores.

    On CPUs a message that moves while the host goes on to the next ones takes half of a core from it, and has
    half of one itself. Behind that work both have a whole one: by the share of its time that it needs a core,
    for it also waits for its peer. That is all of it in the fast scenario and half in the slow one; where it
    is not known whether a core was free, nothing in the slow one. On GPUs, where operators leave cores free,
    and for what the step before called nothing changes.
    """
    layout, lag = program.layout, program.lag
    if not layout.is_cpu or layout.spare_cores:
        return np.zeros(gone.size, dtype=np.int64), lag
    least = 0.0 if layout.spare_cores is None else 0.5
    shared = of_scenario(program.scenario, 1.0, (1.0 + least) / 2, least) / 2
    host = np.cumsum(lag, dtype=np.int64)
    begin, end = (layout.point[layout.joins.event[parts]] for parts in (gone, last[gone]))
    called = (begin >= 0) & (end > begin)
    beside = np.where(called, np.minimum(program.transfer[gone], host[end] - host[begin]), 0)
    kept = np.ones(lag.size)
    for one in distinct(end[beside > 0]).tolist():
        mine = (end == one) & (beside > 0)
        first = int(begin[mine].min())
        share = 1.0 - shared * min(beside[mine].sum() / (host[one] - host[first]), 1.0)
        kept[first + 1 : one + 1] = np.minimum(kept[first + 1 : one + 1], share)
    return np.rint(shared * beside).astype(np.int64), np.rint(lag * kept).astype(np.int64)


def carried(program: RunProgram, before: RunProgram, gone: Index, carrier: Index, chosen: Mask) -> RunProgram:
    """The program in which what waited for a part waits for the one that now carries it.

    Of the causes of the program ``before`` those are ``chosen`` for which that can be said.
    """
    layout, joins = before.layout, before.layout.joins
    event = np.full(layout.events, NONE, dtype=np.intp)
    event[joins.event[gone]] = joins.event[carrier[gone]]
    uses = chosen & ~layout.to_host & before.active & ~layout.cause_back & (event[layout.cause_from] != NONE)
    return program.tied(event[layout.cause_from[uses]], layout.cause_to[uses], layout.cause_lag[uses])


def cut_reductions(program: RunProgram, largest: float, fixed: Int64Array) -> RunProgram | None:
    """Return the program with large messages in equal pieces; ``None`` if there is none to cut.

    Of each transfer ``fixed`` is not cut.

    The pieces become ready one after the other while the gradients since the message before are computed,
    which is slower beside them. The last one stays where the message is: those before it hold it up by what
    they take from when they are ready. In the slow scenario each is ready as late as the next one.
    """
    joins = program.layout.joins
    fixed = np.minimum(fixed, program.transfer)
    transfer, dur = program.transfer.copy(), program.dur.astype(np.int64)
    ties: list[tuple[int, int, int]] = []
    computed, launched = _computed_backward(program.layout)
    points = program.layout.point
    own_points = program.layout.point_base[program.layout.rank_of_event(joins.event)] - 1
    for part, before, pieces in _large(program, largest):
        event = int(joins.event[part])
        # All that its rank has launched since the part before, or since the beginning of the step.
        since = max(points[before], own_points[part]) if before != NONE else own_points[part]
        ready = computed[slice(*np.searchsorted(launched, (since + 1, points[event])))]
        if not ready.size:
            continue
        piece = int(fixed[part] + (program.transfer[part] - fixed[part]) / pieces)
        transfer[part] = piece
        done = np.cumsum(program.dur[ready], dtype=np.int64)
        number = np.arange(1, pieces)
        share = np.minimum(number + of_scenario(program.scenario, 0, 0, 1), pieces) / pieces
        place = nearest(done, share * done[-1])
        ties += [
            (int(one), event, int(left) * piece)
            for one, left in zip(ready[place], pieces - number, strict=True)
        ]
        if before != NONE:
            ties.append((before, event, (pieces - 1) * piece))
        beside = min((pieces - 1) * piece / max(int(done[-1]), 1), 1.0)
        dur[ready] = np.rint(program.dur[ready] * (1 + program.contention * beside))
    if not ties:
        return None
    return program.edited(transfer=transfer, dur=dur).tied(*np.array(ties, dtype=np.int64).T)


def _large(program: RunProgram, largest: float) -> Iterator[tuple[int, int, int]]:
    """Yield each larger part, the event of the one before it (or ``NONE``), and how many it becomes."""
    joins = program.layout.joins
    for parts in _queues(program):
        before = NONE
        for part in parts.tolist():
            pieces = min(int(-(-joins.nbytes[part] // largest)), MOST_PIECES)
            if pieces > 1:
                yield part, before, pieces
            before = int(joins.event[part])


def nearest(rising: Int64Array, values: npt.NDArray[np.float64]) -> Index:
    """The index of the entry of a rising column that is nearest to each value."""
    after = np.minimum(np.searchsorted(rising, values), rising.size - 1)
    before = np.maximum(after - 1, 0)
    return np.where(values - rising[before] < rising[after] - values, before, after)


@once
def _of_backward(layout: Layout) -> Index:
    """The events of backward passes."""
    return np.flatnonzero(layout.event_part == int(Phase.BACKWARD))


@once
def _computed_backward(layout: Layout) -> tuple[Index, Index]:
    """The compute events of backward passes in the order in which they are launched, and their points."""
    backward = is_among(layout.event_part, BACKWARD)
    events = np.flatnonzero(layout.computes & backward & (layout.point != NONE))
    events = events[np.argsort(layout.point[events], kind="stable")]
    return events, layout.point[events]


@as_change()
def reduce_once(program: RunProgram) -> RunProgram:
    """Gradients are reduced once a step, in its last backward pass, as with no_sync().

    Before it they are not brought into buckets either.
    """
    layout, joins = program.layout, program.layout.joins
    number, rank = backward_pass(layout, joins.event), layout.rank_of_event(joins.event)
    last = np.zeros(len(layout.ranks), dtype=np.intp)
    np.maximum.at(last, rank[joins.gradients], number[joins.gradients])
    early = joins.gradients & (number < last[rank])
    if not early.any():
        raise NotApplicable("gradients are reduced in one backward pass of the step only")
    edited = without_collectives(program, early)
    copies = np.flatnonzero((layout.group == Group.BUCKETS) & (layout.point >= 0))
    gone = copies[backward_pass(layout, copies) < last[layout.rank_of_event(copies)]]
    dur, delay, lag = (one.astype(np.int64) for one in (edited.dur, edited.delay, edited.lag))
    dur[gone] = 0
    delay[gone] -= layout.gap[gone]
    calls = layout.point[gone]
    lag[calls] = np.rint(lag[calls] * of_scenario(program.scenario, *CALLS_STAY)).astype(np.int64)
    return edited.edited(dur=dur, delay=delay, lag=lag)


def backward_pass(layout: Layout, events: Index) -> Index:
    """The number of the backward pass of its rank's step that each of some events was called in.

    0 where no call is known.
    """
    begins, point = _passes(layout), layout.point[events]
    number, first = (
        np.searchsorted(begins, points, side="right")
        for points in (point, layout.point_base[layout.rank_of_event(events)])
    )
    return np.asarray(np.where(point >= 0, number - first, 0), dtype=np.intp)


@once
def _passes(layout: Layout) -> Index:
    """The points at which the backward passes of all ranks begin."""
    backward = is_among(layout.part, BACKWARD)
    forward = layout.part == Phase.FORWARD
    marked = np.flatnonzero(backward | forward)
    after_forward = np.append(True, forward[marked])[:-1]
    found: Index = marked[backward[marked] & after_forward]
    return found
