"""Tell what the collectives of one rank are for, beside moving gradients and sharded parameters."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_table import NONE, CollectiveTable
from tracedoc.timeline.host import optimizer_spans
from tracedoc.timeline.phases import Phase, Phases
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.frameworks import is_forward_operator, is_zero3_mark

BOOKKEEPING_BYTES = 1 << 20
"""Metrics, flags and pickled objects are smaller; what is larger is part of the training, or a checkpoint,
but for what a script gathers beside DDP."""

OF_A_NORM = 8
"""A norm over all gradients and a check for overflow take at most so many messages: one a group of ranks."""

_OBJECT_DTYPES = ("byte", "unsigned char", "uint8", "long", "long int", "int64", "int", "int32")
_BYTES = ("byte", "unsigned char", "uint8")
"""Element types of pickled objects, as all_gather_object sends them; parameters and gradients are none."""

_LAYER_OPS = ("all_reduce", "reduce_scatter", "all_gather")
_MESSAGES = ("all_reduce", "all_gather", "broadcast", "gather", "reduce", "scatter")


class Role(IntEnum):
    """What a collective is for. ``OTHER`` is the rest: gradients, sharded parameters, pipelines, experts."""

    OTHER = 0
    BOOKKEEPING = 1
    """A barrier, or a small message outside of the passes, of clipping and of the optimizer."""
    BUFFERS = 2
    """DDP's broadcast of the module's buffers before a forward pass."""
    OPTIMIZER_GATHER = 3
    """Updated parameters, handed out by a sharded optimizer."""
    LAYER = 4
    """Activations (and their gradients) of a layer that is split over ranks."""
    UNUSED_MAP = 5
    """DDP's map of the parameters that got a gradient, one integer each."""
    NORM = 6
    """A norm that is reduced between backward pass and optimizer, one of many one by one."""


def is_extra(roles: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Mask of the collectives that training does not need, shape of ``roles``."""
    return np.asarray((roles == Role.BOOKKEEPING) | (roles == Role.NORM))


def collective_roles(timeline: RankTimeline) -> npt.NDArray[np.uint8]:
    """Return the :class:`Role` of each of the rank's collectives; barriers only without a backward pass."""
    table, phases = timeline.collectives, timeline.phases
    roles = np.zeros(len(table), dtype=np.uint8)
    if phases is not None:
        launched, asked = phases.of_collectives, phases.asked_ns
        passes = is_in(launched, Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
        sharded = _sharded(timeline)
        layers = _layer_kinds(timeline, launched, sharded)
        roles[layers[table.kind] & passes & ~sharded & (table.nbytes >= FLAG_BYTES)] = Role.LAYER
        is_map = table.is_op("all_reduce") & _has_dtype(table, "int", "int32")
        roles[is_map & (launched == Phase.BACKWARD)] = Role.UNUSED_MAP
        handed_out = table.is_op("all_gather", "broadcast") & (launched == Phase.OPTIMIZER)
        wrapper = _wrapper(timeline)
        # DDP reduces all gradients on all ranks: what a script sends behind its update is its own.
        if len(wrapper):
            handed_out &= optimizer_spans(timeline).covered_ns(asked, asked + 1) > 0
        roles[handed_out & (table.nbytes >= FLAG_BYTES) & ~sharded] = Role.OPTIMIZER_GATHER
        before_update = _leads_to_update(phases, asked)
        extra = _bookkeeping(timeline, phases, before_update, by_ddp=len(wrapper) > 0)
        is_norm = before_update & _behind_norms(timeline, phases)
        roles[extra] = np.where(is_norm, Role.NORM, Role.BOOKKEEPING)[extra]
        inside = wrapper.covered_ns(asked, asked + 1) > 0
        roles[table.is_op("broadcast") & inside] = Role.BUFFERS
    roles[table.is_op("barrier")] = Role.BOOKKEEPING
    return roles


def is_in(labels: npt.NDArray[np.uint8], *phases: Phase) -> npt.NDArray[np.bool_]:
    """Mask of the labels that are one of ``phases``, shape of ``labels``."""
    return is_among(labels, np.array([int(phase) for phase in phases]))


def _bookkeeping(
    timeline: RankTimeline, phases: Phases, before_update: npt.NDArray[np.bool_], *, by_ddp: bool
) -> npt.NDArray[np.bool_]:
    """Return the small messages, and pickled objects of any size, that no pass, clipping or optimizer needs.

    Between the backward pass and the optimizer gradients are clipped and checked for overflow: what is
    small there belongs to the step, but for numbers that are added up one by one. In the forward pass only a
    number or two count: a logged loss. What has no size is small where DDP reduces the gradients: the rest is
    the script's own (:func:`gradient_rows`).
    """
    table, launched = timeline.collectives, phases.of_collectives
    updates = phases.host_spans(Phase.OPTIMIZER)
    sized = table.nbytes != NONE
    small = table.is_op(*_MESSAGES) & (sized | by_ddp)
    pickled = table.is_op("all_gather", "broadcast", "gather", "scatter") & _has_dtype(table, *_BYTES)
    # DDP gathers nothing, and parameters are whole: what a script gathers outside of passes is for a metric.
    gathered = table.is_op("all_gather", "gather") & by_ddp
    little = (table.nbytes <= BOOKKEEPING_BYTES) | pickled | gathered
    outside = small & (launched == Phase.OTHER) & little
    if len(updates) == 0:  # where clipping ends cannot be told
        return np.zeros(len(table), dtype=bool)
    by_script = not any(map(is_zero3_mark, timeline.trace.names))  # its engine has a norm for each group
    outside &= ~before_update | (_one_by_one(table, outside & before_update) & by_script)
    logged = small & sized & (launched == Phase.FORWARD) & (table.nbytes < FLAG_BYTES)
    # Gathers behind the optimizer count to it, for they may hand out parameters: not those of integers.
    steps = optimizer_spans(timeline)
    behind = (launched == Phase.OPTIMIZER) & (steps.covered_ns(phases.asked_ns, phases.asked_ns + 1) == 0)
    metric = table.is_op("all_reduce") | _has_dtype(table, *_OBJECT_DTYPES) | gathered
    after = small & behind & metric & little
    return np.asarray(outside | logged | after)


_NORMS = frozenset({"aten::norm", "aten::linalg_norm", "aten::linalg_vector_norm", "aten::_foreach_norm"})


def _behind_norms(timeline: RankTimeline, phases: Phases) -> npt.NDArray[np.bool_]:
    """Mask of the collectives before which a norm is computed: after the one before, and the last phase."""
    rows = timeline.trace.rows_named(_NORMS.__contains__, Kind.CPU_OP)
    norms, asked = np.sort(timeline.trace.ts_ns[rows]), phases.asked_ns
    edges = np.sort(np.concatenate((phases.edges_ns, asked)))
    since = np.append(edges, 0)[np.searchsorted(edges, asked) - 1]
    return np.asarray(np.searchsorted(norms, asked) > np.searchsorted(norms, since))


def _one_by_one(table: CollectiveTable, small: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the calls of a number or two in steps that make more of them than a norm needs."""
    numbers = small & (table.nbytes < FLAG_BYTES)
    steps, counts = np.unique(table.step[numbers], return_counts=True)
    return np.asarray(numbers & is_among(table.step, steps[counts > OF_A_NORM]))


def _has_dtype(table: CollectiveTable, *names: str) -> npt.NDArray[np.bool_]:
    """Mask of the rows whose element type is one of some, named as Kineto and c10d do."""
    found = [kind.dtype.replace("c10::", "").lower() in names for kind in table.kinds]
    return np.array(found or [False], dtype=bool)[table.kind]


def _leads_to_update(phases: Phases, times: Int64Array) -> npt.NDArray[np.bool_]:
    """Mask of the times between a backward pass and the optimizer, with no other phase between."""
    last = np.searchsorted(phases.edges_ns, times, side="right") - 1
    following = np.clip(last + 1, 0, phases.labels.size - 1)
    leads = (last + 1 < phases.labels.size) & (phases.labels[following] == Phase.OPTIMIZER)
    return np.asarray(leads & _follow(phases, times, Phase.BACKWARD, Phase.RECOMPUTE))


def _follow(phases: Phases, times: Int64Array, *before: Phase) -> npt.NDArray[np.bool_]:
    """Mask of the times whose phase comes right after one of ``before``."""
    last = np.searchsorted(phases.edges_ns, times, side="right") - 1
    return (last >= 1) & is_in(phases.labels[np.maximum(last - 1, 0)], *before)


def _sharded(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Mask of the collectives that move sharded parameters or their gradients."""
    found = np.zeros(len(timeline.collectives), dtype=bool)
    if timeline.units is not None:
        found[timeline.units.units.gathers.row] = True
        found[timeline.units.units.reductions.row] = True
    return found


def _layer_kinds(
    timeline: RankTimeline, launched: npt.NDArray[np.uint8], sharded: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return the kinds whose group adds up activations in the forward pass, as tensor parallelism does."""
    table = timeline.collectives
    adds = table.is_op("all_reduce", "reduce_scatter") & (launched == Phase.FORWARD) & ~sharded
    adds &= ~_before_layers(timeline)
    splitting = {
        (table.kinds[kind].group, table.kinds[kind].group_name)
        for kind in distinct(table.kind[adds & (table.nbytes >= LAYER_BYTES)]).tolist()
    }
    found = [kind.op in _LAYER_OPS and (kind.group, kind.group_name) in splitting for kind in table.kinds]
    return np.array(found or [False], dtype=bool)


def _before_layers(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Mask of the collectives between a backward pass and the first operator of a layer behind it.

    They are no layer's: a script averages parameters there. None where no such operator is known.
    """
    phases, trace = timeline.phases, timeline.trace
    assert phases is not None
    asked, edges = phases.asked_ns, np.array(phases.passes, dtype=np.int64).reshape(-1, 2)
    layers = np.sort(trace.ts_ns[trace.rows_named(is_forward_operator, Kind.CPU_OP)])
    since = np.append(edges[:, 1], 0)[np.searchsorted(edges[:, 1], asked, side="right") - 1]
    until = np.append(edges[:, 0], layers.max(initial=0))[np.searchsorted(edges[:, 0], asked)]
    begun, of_pass, all_begun = (np.searchsorted(layers, ns) for ns in (asked, since, until))
    return np.asarray((begun == of_pass) & (all_begun > begun))


def _wrapper(timeline: RankTimeline) -> Spans:
    """The time inside the forward passes of DDP's wrapper."""
    trace = timeline.trace
    named = trace.rows_named("DistributedDataParallel.forward".__eq__, Kind.ANNOTATION, Kind.CPU_OP)
    return trace.spans(named)


REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

FLAG_BYTES = 64
"""Fewer bytes than this are a norm, an overflow flag or a metric: a number or two, no layer's gradient."""

LAYER_BYTES = 1 << 16
"""A layer that is split over ranks exchanges activations of this size and more; SyncBatchNorm's statistics
(a few values a channel), and what a loss function counts, are smaller."""


def gradient_rows(timeline: RankTimeline) -> npt.NDArray[np.bool_]:
    """Mask of the collectives that reduce gradients: reductions that neither forward nor optimizer launched.

    Reductions are all-reduce, reduce-scatter and reduce. Those of the forward pass belong to tensor
    parallelism or to layers that normalise over ranks, and so do those in which the backward pass returns
    them; those of the optimizer, and those of a few bytes, are norms and flags. What follows the optimizer
    comes too late for gradients: local SGD averages parameters there. DDP reduces gradients in the backward
    pass: what has no size and is sent elsewhere is the script's own.
    """
    if timeline.phases is None:
        return np.zeros(len(timeline.collectives), dtype=bool)
    launched, table = timeline.phases.of_collectives, timeline.collectives
    unsized = table.nbytes == NONE
    if len(_wrapper(timeline)):
        unsized &= launched == Phase.BACKWARD
    reductions = table.is_op(*REDUCTIONS) & (unsized | (table.nbytes >= FLAG_BYTES))
    passes = reductions & (launched != Phase.FORWARD) & (launched != Phase.OPTIMIZER)
    passes &= (launched != Phase.OTHER) | ~_follow(timeline.phases, timeline.phases.asked_ns, Phase.OPTIMIZER)
    return np.asarray(passes & ~_returned(table, reductions & (launched == Phase.FORWARD), passes))


def _returned(
    table: CollectiveTable, forward: npt.NDArray[np.bool_], rest: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Mask of small calls that are as many as those of one group and size in the forward pass, or fewer."""
    returned = np.zeros(len(table), dtype=bool)
    small = (table.nbytes != NONE) & (table.nbytes < LAYER_BYTES)
    for kind in distinct(table.kind[forward & small]).tolist():
        for nbytes in distinct(table.nbytes[forward & small & (table.kind == kind)]).tolist():
            alike = (table.kind == kind) & (table.nbytes == nbytes)
            if (alike & rest).sum() <= (alike & forward).sum():
                returned |= alike & rest
    return returned
