"""How long things take where every rank is like its peers: the others of its stage, and what stages share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.play.run_program import Index, Layout, RunProgram
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Call, Doing, narrow
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.lags import SLOWEST_LAUNCH_NS
from tracedoc.timeline.stalls import away_after_ns
from tracedoc.topics.pipeline.balance import slow_stages
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.trace.distinct import distinct, is_among, median
from tracedoc.whatif.changes.change import PASSES, Mask
from tracedoc.whatif.changes.ranks import EXCESS_NS, EXCESS_SHARE, POINT_TO_POINT, evened, usual_host
from tracedoc.whatif.removal import Part, Times


class Even(msgspec.Struct, frozen=True, eq=False):
    """The times of a program in which no rank takes longer than its peers; columns as in the program.

    ``stages`` are the positions of each stage's ranks: all are peers without a pipeline. ``unseen`` is what
    the parts of collectives take on ranks that wait for one that is missing, where their peers wait for none.
    ``bubble_frac`` is what equal stages wait by their schedule (:attr:`Pipeline.bubble_frac`).
    """

    lag: Times
    own: Times
    ready: Times
    dur: Times
    unseen: Times
    stages: tuple[tuple[int, ...], ...]
    bubble_frac: float | None


def even_times(run: RunView, program: RunProgram) -> Even:
    """The times of a program in which no rank takes longer than its peers.

    In a pipeline these are the others of its stage, and each of its passes takes as long as those like it do
    on average. What has nothing to do with a stage's layers is as on the other stages: the pauses of hosts,
    and the loader and the speed of the GPU of a rank that is alone in its stage.
    """
    layout, even = program.layout, program
    stages = pipeline(run)
    place_of = {rank: place for place, rank in enumerate(layout.ranks)}
    groups = (tuple(range(len(run.digests))),) if stages is None else stages.stages
    peers = tuple(_places(run, stage, place_of) for stage in groups)
    ready = program.ready
    for places in peers:
        if len(places) < 2:
            continue
        even = evened(even, places, places)
        if (ready >= 0).any():
            waits, part = np.maximum(ready, 0), np.zeros_like(layout.part)
            usual = usual_host(waits, part, layout.point_base, places, np.array(places))
            ready = np.where(ready >= 0, usual, ready)
    lag, dur, own = even.lag, even.dur, even.own
    if stages is not None:
        every, loads = tuple(range(len(layout.ranks))), layout.kind == Call.INPUT
        loading = distinct(layout.point_rank[loads]).tolist()
        alone = [place for one in peers if len(one) == 1 for place in one if place in loading]
        lag, dur = lag - _beyond_others(layout, pauses(program, lag), every), dur.astype(np.int64)
        own = own - _beyond_others(layout, np.where(loads, own, 0), alone)
        ready = ready - _beyond_others(layout, np.maximum(ready, 0), alone)
        for slow, ratio in slow_stages(run).items():
            (place,) = _places(run, (slow,), place_of)
            mine = layout.computes & (layout.event_rank == place)
            dur[mine] = np.rint(dur[mine] / ratio)
        for places in peers:
            dur = _even_passes(program, places, dur)
    unseen, bubble_frac = _waits_for_missing(program, peers), stages.bubble_frac if stages else None
    return Even(narrow(lag), narrow(own), narrow(ready), narrow(dur), unseen, peers, bubble_frac)


def _waits_for_missing(program: RunProgram, peers: Sequence[tuple[int, ...]]) -> Times:
    """What sends and receives take whose other end was not captured, of ranks with a peer that has none such.

    A rank that is missing is late where its peers are: without late ranks nobody waits longer for it than
    for them, and what these pass on sets the pace.
    """
    joins, found = program.layout.joins, np.zeros(program.transfer.size, dtype=np.int64)
    lone = between_stages(program) & ~joins.complete
    if not lone.any():
        return found
    rank = program.layout.rank_of_event(joins.event)
    waiting = distinct(rank[lone]).tolist()
    for places in peers:
        if not set(places) <= set(waiting):
            mine = lone & is_among(rank, places)
            found[mine] = program.transfer[mine]
    return found


def _places(run: RunView, stage: tuple[int, ...], place_of: dict[int, int]) -> tuple[int, ...]:
    """The positions in a program of some ranks of a run (positions too)."""
    found = (place_of.get(run.digests[place].rank) for place in stage)
    return tuple(place for place in found if place is not None)


def spent(layout: Layout, doing: Doing, lag: Times) -> Part:
    """What of the host's time between its calls goes to one thing."""
    points, ns = layout.at(doing)
    return Part(points, np.minimum(ns, lag[points]))


def pauses(program: RunProgram, lag: Times) -> Times:
    """What of the host's time is no launching: what operators compute on the CPU, and long gaps.

    On a CPU, where operators are the work, it is what lies between them. Hooks of sharded units, and what
    DTensors are dispatched by, are a part of launching them, however long they take.
    """
    if program.layout.is_cpu:
        return spent(program.layout, Doing.NOTHING, lag).whole(lag)
    found = spent(program.layout, Doing.COMPUTING, lag).whole(lag)
    launch = program.layout.kind == Call.LAUNCH
    if not launch.any():
        return found
    usual = float(median(lag[launch] - found[launch]))
    if usual > away_after_ns(usual):  # as of a graph that is launched once a step
        usual = SLOWEST_LAUNCH_NS
    beyond = lag.copy()
    for doing in (Doing.HOOKS, Doing.DISPATCHING):  # parts of launching
        spent(program.layout, doing, lag).take_from(beyond)
    away = beyond > away_after_ns(usual)
    found[away] = np.rint(lag[away] - usual)
    return found


WORK = (Doing.OFFLOADED, Doing.LOADING, Doing.COMPILING, Doing.COLLECTING)
"""What a host is known to be at, whatever it waited for before."""


def after_waits(program: RunProgram, waits: Mask) -> Times:
    """What of the host's time right after some of its waits is no launching, in ns of points.

    It may be for what the host waited for: a value that is read is then looked at, logged or decided on.
    """
    layout = program.layout
    lag = program.lag.copy()
    for doing in WORK:
        spent(layout, doing, lag).take_from(lag)
    found: Times = np.where(waits[_before(layout)] & layout.after_return, pauses(program, lag), 0)
    return found


def waits_before(layout: Layout, waits: Mask, pause: Times) -> Mask:
    """Which of some waits of the host come right before it pauses: these may be all that it waits for."""
    asked = np.zeros(layout.points, dtype=bool)
    asked[_before(layout)[(pause > 0) & layout.after_return]] = True
    return np.asarray(waits & layout.to_host & asked[np.where(layout.to_host, layout.cause_to, 0)])


def _before(layout: Layout) -> Index:
    """The point before each on the same host; before the first is the last one."""
    found = np.arange(layout.points) - 1
    first, last = layout.point_base[:-1], layout.point_base[1:] - 1
    found[first[last >= first]] = last[last >= first]
    return found


def _beyond_others(layout: Layout, part: Times, places: Sequence[int]) -> Times:
    """What of a part of hosts' time each of some ranks takes beyond the median of the others of these."""
    rank, longer = layout.point_rank, np.zeros(len(layout.ranks))
    sums = np.bincount(rank, weights=part, minlength=longer.size)
    for place in places if len(places) > 1 else ():
        usual = float(median([sums[other] for other in places if other != place]))
        if sums[place] - usual > max(EXCESS_NS, EXCESS_SHARE * usual):
            longer[place] = 1.0 - usual / sums[place]
    return np.rint(part * longer[rank]).astype(np.int64)


def _even_passes(program: RunProgram, stage: tuple[int, ...], dur: Times) -> Times:
    """Durations in which all passes of one kind through a stage compute equally long.

    A pass is what is launched between two sends or receives. Those with as many kernels of the same parts of
    the step are of one kind, whatever the lengths of their samples.
    """
    found: Times = dur.copy()
    alike: dict[tuple[int, int], list[Index]] = {}
    for place in stage:
        events, segment = passes_of(program, place)
        for number in distinct(segment).tolist():
            mine = events[segment == number]
            alike.setdefault((mine.size, int(program.layout.event_part[mine].sum())), []).append(mine)
    for passes in alike.values():
        sums = np.array([float(found[events].sum()) for events in passes])
        scale_to(found, passes, sums, float(sums.mean()))
    return found


def even_pauses(program: RunProgram, even_lag: Times) -> Times:
    """What ranks on CPUs pause where none takes longer than its peers: what they pause longer is gone."""
    found = pauses(program, program.lag.astype(np.int64)) - np.maximum(program.lag - even_lag, 0)
    return np.asarray(np.clip(found, 0, even_lag), dtype=np.int64)


def balanced_hosts(program: RunProgram, even: Even) -> Times:
    """Host times of ranks on CPUs that compute as long on their passes as the mean stage."""
    layout = program.layout
    passes = is_among(layout.part, PASSES)
    work = np.where(passes, even.lag - even_pauses(program, even.lag), 0)
    rank = layout.point_rank
    sums = np.bincount(rank, weights=work.astype(np.float64), minlength=len(layout.ranks))
    share = _mean_stage(sums, even) / np.maximum(sums, 1.0) - 1.0
    return np.asarray(even.lag + np.rint(work * share[rank]), dtype=np.int64)


def balanced_stages(program: RunProgram, even: Even) -> Times:
    """Durations in which every rank computes as long on its passes as the mean stage."""
    found = even.dur.astype(np.int64)
    passes, sums = all_passes(program, found)
    scale_to(found, passes, sums, _mean_stage(sums, even))
    return found


def _mean_stage(sums: npt.NDArray[np.float64] | npt.NDArray[np.int64], even: Even) -> float:
    """The mean over stages of what each rank takes: of some fewer ranks may have been captured."""
    return float(np.mean([sums[list(stage)].mean() for stage in even.stages if stage]))


def waits_beyond_schedule(program: RunProgram, even: Even) -> Times:
    """What sends and receives whose other end was not captured take beyond the bubble of the schedule.

    A stage of which no rank was captured is slow where the step takes longer than the passes of the longest
    one that was, what travels between two stages meanwhile, and that bubble. Nothing is known of it where the
    stages or the number of micro-batches are not.
    """
    layout, joins = program.layout, program.layout.joins
    lone = np.where(between_stages(program) & ~joins.complete, program.transfer, 0)
    if even.bubble_frac is None or not lone.any():
        return np.zeros_like(lone)
    longest = float(all_passes(program, program.dur)[1].max())
    # Each of two neighbours has its part of what they send each other.
    sent = between_stages(program) & joins.complete
    longest += float(np.bincount(joins.group[sent], weights=program.transfer[sent]).max(initial=0.0))
    beyond = max(max(one.step_ns for one in layout.notes) - longest / (1.0 - even.bubble_frac), 0.0)
    rank = layout.rank_of_event(joins.event)
    waits = np.bincount(rank, weights=lone, minlength=len(layout.ranks))[rank]
    return np.asarray(np.rint(lone * np.minimum(beyond / np.maximum(waits, 1.0), 1.0)), dtype=np.int64)


def between_stages(program: RunProgram) -> Mask:
    """Which parts of collectives pass data to another stage: sends, receives, and both at once."""
    joins = program.layout.joins
    if not joins.kind.size or not joins.staged:
        return np.zeros(joins.kind.size, dtype=bool)
    sent, sizes = joins.named(*POINT_TO_POINT), np.array([*joins.group_sizes, 0])[joins.group]
    return np.asarray(sent | (joins.named("send_recv") & (sizes == 2) & sent.any()))


def scale_to(dur: Times, parts: list[Index], sums: npt.NDArray[np.float64], length: float) -> None:
    """Let several lists of events, which take ``sums``, each take a length together."""
    for events, now in zip(parts, sums.tolist(), strict=True):
        if now > 0:
            dur[events] = np.rint(dur[events] * (length / now))


def all_passes(program: RunProgram, dur: Times) -> tuple[list[Index], npt.NDArray[np.float64]]:
    """The compute of the passes of each rank, and what that takes together."""
    passes = [passes_of(program, place)[0] for place in range(len(program.layout.ranks))]
    return passes, np.array([float(dur[events].sum()) for events in passes])


def passes_of(program: RunProgram, place: int) -> tuple[Index, Index]:
    """The compute of a rank's passes through micro-batches, and how many sends and receives come before each.

    Where the phases of the step are not known, passes end with the last reduction of gradients that follows
    the last send, or with what else follows it.
    """
    layout, joins = program.layout, program.layout.joins
    events = np.arange(layout.event_base[place], layout.event_base[place + 1])
    own = (joins.event >= events[0]) & (joins.event <= events[-1]) if events.size else np.zeros(0, dtype=bool)
    passes = between_stages(program)
    point = layout.point[events]
    of_join = layout.point[joins.event]
    sends = np.sort(of_join[own & passes])
    events = events[layout.computes[events] & (point != NONE)]
    if not sends.size or sends[-1] == NONE:  # what was launched in the step before comes first
        return events[:0], events[:0]
    parts = layout.event_part[events]
    if parts.any():
        events = events[is_among(parts, PASSES)]
    else:
        after = own & ~passes & (of_join > sends[-1])
        reduced, others = np.sort(of_join[after & joins.gradients]), np.sort(of_join[after])
        ends = reduced[-1:] if reduced.size else others[:1]
        events = events[layout.point[events] < ends[0]] if ends.size else events
    return events, np.searchsorted(sends, layout.point[events])
