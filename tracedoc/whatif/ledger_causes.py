"""The causes of the ledger: what each of them takes of a run's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.ledger import BUBBLE, TRANSFER, UNSEEN, UNSPLIT
from tracedoc.play.run_program import Layout, RunProgram, Scenario
from tracedoc.play.run_replay import RunReplay
from tracedoc.play.scenarios import call_latency
from tracedoc.ranks.run_view import RunView
from tracedoc.step.program import Call, Cause, Doing, Group
from tracedoc.timeline.phases import Phase
from tracedoc.topics.communication.run import comm_split
from tracedoc.trace.distinct import is_among, median
from tracedoc.trace.vocabulary import busbw_factor
from tracedoc.whatif.changes.buckets import cap_buckets, reduce_once
from tracedoc.whatif.changes.change import Edit, Mask, Value, of_scenario, where_possible
from tracedoc.whatif.changes.gathers import no_offload, unit_gathers
from tracedoc.whatif.changes.host import allocated, operators_in, synced
from tracedoc.whatif.changes.order import (
    deferred_reductions,
    gather_in_time,
    no_extra_messages,
    reduce_when_ready,
)
from tracedoc.whatif.changes.units import merge_units, split_units
from tracedoc.whatif.compute_causes import called_beside, compute_causes, pauses_more
from tracedoc.whatif.even_ranks import (
    Even,
    balanced_hosts,
    balanced_stages,
    between_stages,
    even_pauses,
    even_times,
    pauses,
    spent,
    waits_before,
    waits_beyond_schedule,
)
from tracedoc.whatif.ledger_places import taken_by_rank
from tracedoc.whatif.removal import OverSteps, Part, Removal, Times

SPLIT_FROM = 0.005
"""Families that cost less than this share of the step are not split, and causes inside compute that take less
are none; no range is played for causes that cost less."""

T = TypeVar("T")


class Family(msgspec.Struct, Generic[T], frozen=True, eq=False):
    """Causes of one kind. ``whole`` is what all of them take, ``members`` what each does, by id.

    ``rest`` is the id of what remains of the family when its members are gone, "" where nothing does.
    ``after`` names a family whose cost is not its own: alone it costs what it does when that one is gone.
    """

    whole: tuple[T, ...]
    members: Mapping[str, T]
    rest: str = ""
    after: str = ""


def find_families(run: RunView, replays: Sequence[RunReplay]) -> dict[str, Family[OverSteps]]:
    """The families of causes that the played steps of a run have."""
    of_steps = [_of_step(run, one) for one in replays]
    names = dict.fromkeys(name for families in of_steps for name in families)
    found = {name: _over_steps([families.get(name) for families in of_steps]) for name in names}
    if "compute" in found:
        # Its members are many, and most take too little of any rank to be worth a play.
        programs = [one.program for one in replays]
        least_ns = SPLIT_FROM * float(np.mean([one.step_ms for one in replays])) * 1e6
        members = {
            name: one
            for name, one in found.pop("compute").members.items()
            if taken_by_rank(programs, [one]).max(axis=1).mean() >= least_ns
        }
        if members:
            found["compute"] = Family(tuple(members.values()), members)
    return found


def _over_steps(families: Sequence[Family[Removal] | None]) -> Family[OverSteps]:
    """One family of several steps. What it takes beside its members is one thing."""
    there = [one for one in families if one is not None]
    ids = dict.fromkeys(name for one in there for name in one.members)
    members = {
        name: tuple(None if one is None else one.members.get(name) for one in families) for name in ids
    }
    beside = tuple(
        None if one is None else next((part for part in one.whole if part not in one.members.values()), None)
        for one in families
    )
    whole = [beside] if any(beside) else []
    whole += [members[name] for name in ids if any(one.members.get(name) in one.whole for one in there)]
    return Family(tuple(whole), members, there[0].rest, there[0].after)


def _of_step(run: RunView, replay: RunReplay) -> dict[str, Family[Removal]]:
    """The families of causes that one step has."""
    program = replay.program
    if program.layout.batch_point.size:
        # What a wait for a batch takes, whether workers keep up or not.
        own = program.own.astype(np.int64)
        own[program.layout.batch_point] = program.layout.batch_ns
        program = program.edited(own=own, ready=replay.base[Scenario.SLOW].program.ready)
    even = even_times(run, program)
    found = {
        "ranks": _ranks(program, even),
        "pipeline": _pipeline(run, program, even),
        "input": _input(program, even),
        "host": _host(run, program, even),
        "offload": _family({"host.offload": _rewired(program, no_offload)}),
        "communication": _communication(run, program),
        "compute": _family(compute_causes(run, program, even)),
    }
    return {name: family for name, family in found.items() if family is not None}


def _family(
    members: Mapping[str, Removal | None], rest: str = "", whole: Removal | None = None
) -> Family[Removal] | None:
    """A family of the members that are there; ``whole`` is what all take, if that is more than they do."""
    there = {name: one for name, one in members.items() if one is not None}
    if whole is not None:
        return Family((whole, *(one for one in there.values() if one.calls_less)), there, rest)
    return Family(tuple(there.values()), there, rest) if there else None


def _taken(before: np.ndarray, after: np.ndarray) -> Times:
    """What one column is longer than another; below 0 where it is shorter."""
    taken: Times = before - after
    return taken


# --- ranks that take longer than their peers


def _ranks(program: RunProgram, even: Even) -> Family[Removal] | None:
    loads = program.layout.kind == Call.INPUT
    lag, own = _taken(program.lag, even.lag), _taken(program.own, even.own)
    dur = _taken(program.dur, even.dur)
    # Who waits for a rank that is missing does so for what makes its peers late, as in an uneven pipeline.
    computes = np.maximum(dur, 0).sum() >= np.maximum(lag, 0).sum()
    return _family(
        {
            "ranks.compute": Removal.of(dur=dur, transfer=even.unseen if computes else None),
            "ranks.host": Removal.of(
                lag=lag, own=Part.within(~loads, own), transfer=None if computes else even.unseen
            ),
            "ranks.input": Removal.of(own=Part.within(loads, own), ready=_taken(program.ready, even.ready)),
        }
    )


# --- input


def _batch_copies(program: RunProgram) -> Mask:
    """Which events copy to the device, but for what is offloaded."""
    copies = np.asarray(program.layout.group == Group.COPY_IN)
    copies[program.layout.offload_event] = False
    return copies


def _input(program: RunProgram, even: Even) -> Family[Removal] | None:
    layout = program.layout
    loads = layout.kind == Call.INPUT
    copies = _batch_copies(program)
    blocking = np.asarray((layout.cause_kind == Cause.COPY) & copies[layout.cause_from])
    return _family(
        {
            "input.wait": Removal.of(
                own=Part.within(loads, even.own), ready=Part.within(loads, np.maximum(even.ready, 0))
            ),
            "input.copies": Removal.of(
                own=Part.within(layout.returns(blocking), even.own),
                dur=Part.within(copies, even.dur),
                dropped=blocking,
            ),
        }
    )


# --- the host

KNOWN_DOINGS = {
    "host.first_calls": Doing.LOADING,
    "host.compile": Doing.COMPILING,
    "host.gc": Doing.COLLECTING,
}
"""Causes that are what the host is known to do between its calls."""

BETWEEN_DOUBT = 0.5
"""So much of what lies between operators may be the profiler, which records each of them. As much more may go
with it, as short operators are mostly calls, too. Small models took half as long without the profiler."""


def _known(layout: Layout, lag: Times) -> tuple[dict[str, Part], Times]:
    """What of the host's time is known to go to each of :data:`KNOWN_DOINGS`, and what is left."""
    known, left = {}, lag.copy()
    for name, doing in KNOWN_DOINGS.items():
        known[name] = spent(layout, doing, left)
        known[name].take_from(left)
    return known, left


def _not_offloaded(layout: Layout, lag: Times) -> Times:
    """The host's time but for an optimizer on the CPU."""
    left: Times = lag.copy()
    spent(layout, Doing.OFFLOADED, lag).take_from(left)
    return left


def _of_lags(lags: Mapping[str, Part]) -> dict[str, Removal | None]:
    return {name: Removal.of(lag=lag) for name, lag in lags.items()}


def _host(run: RunView, program: RunProgram, even: Even) -> Family[Removal] | None:
    """What the host costs; nothing is known of it in a capture without the launches of its kernels.

    On a CPU operators are the work: the host pauses between them, or runs the Python that calls them. What it
    pauses longer than its peers is theirs to tell.
    """
    layout = program.layout
    if layout.is_cpu:
        known, left = _known(layout, even.lag)
        pause = even_pauses(program, even.lag)
        known["host.gc"].take_from(pause)
        pause = np.clip(pause, 0, left)
        between = spent(layout, Doing.BETWEEN, left - pause)
        # Operators that the script calls beside training go with what lies between them.
        beside = called_beside(run, program, even)
        of_training = 1.0 - beside / np.maximum(operators_in(layout, even.lag, 1, 1), 1)
        pause = np.minimum(pause + beside, left) if pauses_more(run) else pause
        training = np.rint(between.ns * np.clip(of_training, 0, 1)[between.where]).astype(np.int64)
        between = Part(between.where, training)
        members = {**_of_lags(known), "host.pause": Removal.of(lag=pause)}
        return _family({**members, "host.between": Removal.of(lag=between, doubt=BETWEEN_DOUBT)})
    if not layout.points or not any("launches" in one.present for one in run.digests):
        return None
    loads = layout.kind == Call.INPUT
    of_input = (layout.cause_kind == Cause.COPY) & _batch_copies(program)[layout.cause_from]
    waits = layout.to_host & ~of_input & ~is_among(layout.cause_from, layout.offload_event)
    own = np.where(loads | layout.returns(of_input), 0, even.own)
    waited, allocates = synced(program, own), allocated(program, own)
    lag = _not_offloaded(layout, even.lag)
    known, left = _known(layout, lag)
    pause = pauses(program, left)
    # What a late rank pauses longer may be the same code, and what looks at a value why hosts wait for it.
    as_it_is = pauses(program, _known(layout, _not_offloaded(layout, program.lag))[1])
    asked = None if waited is None else waited.dropped
    unasked = None if asked is None else waits_before(layout, asked, pause)
    return _family(
        {
            **_of_lags(known),
            "host.pause": Removal.of(lag=pause, perhaps=as_it_is, unasked=unasked) if pause.any() else None,
            "host.sync": waited,
            "host.allocator": allocates,
            "host.launch": Removal.of(lag=left - pause),
        },
        whole=Removal.of(lag=lag, own=own, dropped=waits),
    )


# --- communication


def _rewired(program: RunProgram, edit: Edit, *values: Value) -> Removal | None:
    """What an edit does, ``None`` where it cannot be made."""
    possible = where_possible(edit, program, *values) is not program
    return Removal(rewired=lambda given: where_possible(edit, given, *values)) if possible else None


CALL_SHARES = (1.0, 0.5, 0.0)
"""So much of the host's time before a collective's call goes with the call."""


def _calls_less(removal: Removal | None) -> Removal | None:
    """A removal that saves the host calls of collectives by itself."""
    return None if removal is None else replace(removal, calls_less=True)


def _calling_less(program: RunProgram, removal: Removal | None) -> Removal | None:
    """A removal that saves the host the calls of collectives that go, if any do."""
    if removal is None or removal.rewired is None:
        return None
    rewired = removal.rewired
    if not _gone(program, rewired(program)).any():
        return removal

    def made(given: RunProgram) -> RunProgram:
        edited, layout = rewired(given), given.layout
        points = layout.point[layout.joins.event[_gone(given, edited)]]
        points = points[points >= 0]
        if edited.lag is not given.lag or not points.size:
            return edited  # units, whose hooks it knows
        lag = given.lag.astype(np.int64)
        usual = float(median(lag[layout.kind == Call.COMM]))
        saved = np.minimum(lag[points], usual) * of_scenario(given.scenario, *CALL_SHARES)
        lag[points] -= np.rint(saved).astype(np.int64)
        return edited.edited(lag=lag)

    return Removal(rewired=made, calls_less=True)


def _gone(before: RunProgram, after: RunProgram) -> Mask:
    """Which parts of collectives an edit has taken away."""
    return np.asarray(before.launched & ~after.launched & before.joined & ~after.joined)


def _communication(run: RunView, program: RunProgram) -> Family[Removal] | None:
    joins = program.layout.joins
    mine = ~between_stages(program)
    if not mine.any():
        return None
    slower = np.where(mine, _below_link(run, program), 0.0)
    # Where ranks are missing, what a part takes beyond its bytes may be waiting.
    latency = np.where(mine & joins.complete, call_latency(program, program.scenario), 0)
    latency = np.rint(latency * (1.0 - slower[0])).astype(np.int64)
    deferred = program.edited(
        layout=replace(program.layout, joins=replace(joins, gradients=deferred_reductions(program)))
    )
    return _family(
        {
            "order.every_micro_batch": _calling_less(program, _rewired(program, reduce_once)),
            "order.extra": _calls_less(_rewired(program, no_extra_messages)),
            "order.reductions": _rewired(program, reduce_when_ready),
            "order.messages": _calling_less(program, _messages(deferred)),
            "order.gathers": _rewired(program, gather_in_time),
            "link.slow": Removal(slower=slower) if slower.any() else None,
            "link.latency": Removal.of(transfer=latency),
        },
        # Where ranks are missing, what remains may be waiting for them.
        rest=TRANSFER if comm_split(run) == "transfer" else UNSPLIT,
        whole=Removal.of(
            transfer=np.where(mine, program.transfer, 0), dropped=_answers(program.layout, mine)
        ),
    )


def _answers(layout: Layout, parts: Mask) -> Mask:
    """Which causes let parts of collectives begin no sooner after others than unknown ranks let them."""
    return np.asarray(
        (layout.cause_kind == Cause.ANSWER) & is_among(layout.cause_to, layout.joins.event[parts])
    )


BUCKET_MIB = 25.0
"""Gradients travel in messages of this size unless a script asks for others (DistributedDataParallel)."""

LARGE_UNIT = 0.5
"""A unit with this share of all gathered bytes of a pass is gathered and reduced with nothing to hide it."""

PIECES = 8.0


def _messages(program: RunProgram) -> Removal | None:
    """What messages of a usual size do: units of a block each, and buckets of some MiB."""
    gathers = unit_gathers(program)
    if not gathers.any():
        return _with_layout(program, _rewired(program, cap_buckets, BUCKET_MIB))
    merged = _rewired(program, merge_units)
    if merged is not None:
        return merged
    joins = program.layout.joins
    part = program.layout.event_part[joins.event]
    forward = gathers & (part == Phase.FORWARD) & (joins.nbytes > 0)
    rank = program.layout.rank_of_event(joins.event)
    sums = np.bincount(rank[forward], weights=joins.nbytes[forward], minlength=1)
    most = np.zeros(sums.size)
    np.maximum.at(most, rank[forward], joins.nbytes[forward])
    if not forward.any() or not (most > LARGE_UNIT * np.maximum(sums, 1)).any():
        return None
    return _rewired(program, split_units, PIECES)


def _with_layout(program: RunProgram, removal: Removal | None) -> Removal | None:
    """A removal that is made with another layout's collectives."""
    if removal is None or removal.rewired is None:
        return None
    rewired, layout = removal.rewired, program.layout

    def made(given: RunProgram) -> RunProgram:
        return rewired(given.edited(layout=layout)).edited(layout=given.layout)

    return Removal(rewired=made)


SLOW_LINK = 0.7
"""A group that reaches less than this share of what its link should give is on a slow link."""


def _below_link(run: RunView, program: RunProgram) -> npt.NDArray[np.float64]:
    """The shares of each part's transfer that a link saves which does what it should: likely, and at best."""
    joins = program.layout.joins
    found = np.zeros((2, joins.event.size))
    for group, curve in enumerate(run.curves):
        mine = np.flatnonzero(
            (joins.group == group) & (joins.nbytes > 0) & (program.transfer > 0) & joins.complete
        )
        if curve is None or curve.peak_gbps is None or not mine.size:
            continue
        sizes = joins.nbytes[mine].astype(np.float64)
        factor = np.array([busbw_factor(kind, joins.group_sizes[group]) for kind in joins.kinds])[
            joins.kind[mine]
        ]
        gbps = np.array(
            [[curve.expected_gbps(size, at_best=best) for size in sizes.tolist()] for best in (False, True)]
        )
        should = factor * sizes / gbps
        if should[0].sum() < SLOW_LINK * program.transfer[mine].sum():
            found[:, mine] = np.clip(1.0 - should / program.transfer[mine], 0.0, 1.0)
    return found


def _pipeline(run: RunView, program: RunProgram, even: Even) -> Family[Removal] | None:
    passes = between_stages(program)
    if not passes.any():
        return None
    transfer = np.where(passes, program.transfer, 0)
    # What a part takes whose other end is not known may be waiting, by the schedule or for a slow stage.
    sent = np.where(program.layout.joins.complete, transfer, 0)
    # The longest stages give to the others what they compute more than the mean one.
    dur = _taken(even.dur, balanced_stages(program, even))
    lag = _taken(even.lag, balanced_hosts(program, even)) if program.layout.is_cpu else None
    moved, waits = dur.any() or (lag is not None and lag.any()), transfer - sent
    if even.bubble_frac is None or not all(even.stages):
        waits = waits_beyond_schedule(program, even)
        moved = moved or waits.any()
    members = {
        "pipeline.transfer": Removal.of(transfer=sent),
        "pipeline.imbalance": Removal.of(dur=dur, lag=lag, transfer=waits) if moved else None,
    }
    there = {name: one for name, one in members.items() if one is not None}
    # A stage that nobody waits for still takes as long as its work.
    uneven = [there[name] for name in ("pipeline.imbalance",) if name in there]
    # Stages wait for a slow rank as well: the bubble is what remains when all are equal.
    whole = Removal.of(transfer=transfer, alone=passes, dropped=_answers(program.layout, passes))
    assert whole is not None
    # How long the schedule lets a stage wait is known where all stages are.
    missing = (run.world_size is None or len(run.digests) < run.world_size) and (sent < transfer).any()
    unseen = missing and even.bubble_frac is None
    return Family((whole, *uneven), there, UNSEEN if unseen else BUBBLE, "ranks")
