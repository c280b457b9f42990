"""Facts about the phases of a step: what forward, backward and optimizer compute and what they expose."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMPUTE
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.collective_roles import REDUCTIONS, gradient_rows
from tracedoc.timeline.collective_table import CollectiveTable, Held
from tracedoc.timeline.phases import Phase, PhaseBudget
from tracedoc.timeline.steps import HostStep
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import is_among
from tracedoc.trace.vocabulary import optimizer_step_class
from tracedoc.values import Unknown, Value

NO_PHASES = Unknown("no backward pass was captured, so phases are not known")


@rank_fact("forward_compute_ms", unit="ms", needs=("kernels", "host_ops"))
def forward_compute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that the forward pass launched; recomputation is not in it."""
    return _part(timeline, "compute_ns", Phase.FORWARD)


@rank_fact("backward_compute_ms", unit="ms", needs=("kernels", "host_ops"))
def backward_compute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that the backward pass launched; recomputation is not in it."""
    return _part(timeline, "compute_ns", Phase.BACKWARD)


@rank_fact("optimizer_compute_ms", unit="ms", needs=("kernels", "host_ops"))
def optimizer_compute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that the optimizer's ``step`` launched; clipping is not in it."""
    return _part(timeline, "compute_ns", Phase.OPTIMIZER)


@rank_fact("recompute_frac", unit="fraction", needs=("kernels", "host_ops"))
def recompute_frac(timeline: RankTimeline) -> Value:
    """Share of the median step's compute that repeats the forward pass inside backward (checkpointing).

    Recomputation that a compiler fused into the backward graph cannot be seen and counts as backward.
    """
    total = sum(budget.compute_ns for budget in timeline.phase_budgets)
    if total == 0:
        return NO_PHASES if timeline.phases is None else Unknown("the step holds no compute")
    return sum(b.compute_ns for b in timeline.phase_budgets if b.phase is Phase.RECOMPUTE) / total


@rank_fact("recompute_ms", unit="ms", needs=("kernels", "host_ops"))
def recompute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that repeats the forward pass inside backward (checkpointing)."""
    return _part(timeline, "compute_ns", Phase.RECOMPUTE)


@rank_fact("forward_exposed_comm_ms", unit="ms", needs=("kernels", "host_ops"))
def forward_exposed_comm_ms(timeline: RankTimeline) -> Value:
    """Communication of the median step that forward launched and that no compute hides."""
    return _part(timeline, "exposed_comm_ns", Phase.FORWARD)


@rank_fact("backward_exposed_comm_ms", unit="ms", needs=("kernels", "host_ops"))
def backward_exposed_comm_ms(timeline: RankTimeline) -> Value:
    """Communication of the median step that backward (recomputation too) launched and nothing hides."""
    return _part(timeline, "exposed_comm_ns", Phase.BACKWARD, Phase.RECOMPUTE)


@rank_fact("optimizer_exposed_comm_ms", unit="ms", needs=("kernels", "host_ops"))
def optimizer_exposed_comm_ms(timeline: RankTimeline) -> Value:
    """Communication of the median step that the optimizer launched and that no compute hides.

    Parameters gathered right after the optimizer (ZeRO-1 and ZeRO-2) count here.
    """
    return _part(timeline, "exposed_comm_ns", Phase.OPTIMIZER)


@rank_fact("comm_after_backward_ms", unit="ms", needs=("kernels", "host_ops", "collectives"))
def comm_after_backward_ms(timeline: RankTimeline) -> Value:
    """Exposed gradient reduction after the last compute that a node of the backward graph launched.

    Reductions are all-reduce, reduce-scatter and reduce that neither forward nor optimizer launched. They
    end a step in which nothing is left to hide them: waiting for the other ranks is part of it.
    """
    window, activity, phases = timeline.judged, timeline.activity, timeline.phases
    if window is None or activity is None or phases is None:
        return NO_PHASES
    last = last_backward_ns(timeline)
    if last is None:
        return Unknown("no compute of a backward node lies in the step")
    table, labels = timeline.collectives, phases.of_collectives
    reduces = table.is_op(*REDUCTIONS) & (labels != Phase.FORWARD) & (labels != Phase.OPTIMIZER)
    late = Spans.of(table.start_ns[reduces], table.end_ns[reduces])
    return (late & activity.exposed_comm).clip(last, window.end_ns).total_ns / 1e6


@rank_fact("micro_batches", unit="count", needs=("host_ops",))
def micro_batches(timeline: RankTimeline) -> Value:
    """Backward passes for each step of the optimizer, in the median step: gradient accumulation.

    With several optimizers (a GAN) each counts by itself, and this is the lower median.
    """
    step = _whole_host_step(timeline)
    if isinstance(step, Unknown):
        return step
    return micro_batch_count(timeline, step) or Unknown("the step holds no backward pass")


@rank_fact("reducing_micro_batches", unit="count", needs=("host_ops", "collectives"))
def reducing_micro_batches(timeline: RankTimeline) -> Value:
    """Backward passes of the median step in which gradients are reduced over ranks.

    With gradient accumulation one is enough: DDP under ``no_sync``, FSDP2 with
    ``set_requires_gradient_sync(False)``. Each further one moves the same bytes again.
    """
    step = _whole_host_step(timeline)
    if isinstance(step, Unknown) or timeline.phases is None:
        return step if isinstance(step, Unknown) else NO_PHASES
    asked = np.sort(timeline.phases.asked_ns[timeline.collectives.is_op(*REDUCTIONS)]).tolist()
    passes = [at for at in _summed_passes(timeline) if step.start_ns <= at[0] < step.end_ns]
    return sum(bisect_left(asked, start) < bisect_left(asked, end) for start, end in passes)


@rank_fact("reductions_per_micro_batch", unit="count", needs=("host_ops", "collectives"))
def reductions_per_micro_batch(timeline: RankTimeline) -> Value:
    """Gradient reductions that backward launched in the median step, over its backward passes."""
    return _per_pass(timeline, REDUCTIONS, (Phase.BACKWARD, Phase.RECOMPUTE))


@rank_fact("gathers_per_micro_batch", unit="count", needs=("host_ops", "collectives"))
def gathers_per_micro_batch(timeline: RankTimeline) -> Value:
    """All-gathers that forward and backward launched in the median step, over its backward passes."""
    return _per_pass(timeline, frozenset({"all_gather"}), (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))


def micro_batch_count(timeline: RankTimeline, step: HostStep) -> int:
    """Return the backward passes of a host step for each step of its optimizer, 0 without any."""
    phases = timeline.phases
    starts = [start for start, _ in _summed_passes(timeline) if step.start_ns <= start < step.end_ns]
    if phases is None or not starts:
        return 0
    updates = phases.host_spans(Phase.OPTIMIZER).starts
    held = np.searchsorted(updates, starts)
    cuts = [number + 1 for number, (a, b) in enumerate(pairwise(held.tolist())) if a != b]
    sizes = sorted(end - start for start, end in pairwise([0, *cuts, len(starts)]))
    return int(statistics.median_low(sizes))


def _summed_passes(timeline: RankTimeline) -> list[tuple[int, int]]:
    """Return the backward passes whose gradients may be summed; of a line search's evaluations the last.

    L-BFGS calls its closure several times a step, and needs the whole gradient each time.
    """
    if timeline.phases is None:
        return []
    trace, passes = timeline.trace, list(timeline.phases.passes)
    rows = trace.rows_named(lambda name: "LBFGS" in (optimizer_step_class(name) or ""), Kind.ANNOTATION)
    for start, end in zip(trace.ts_ns[rows].tolist(), trace.end_ns[rows].tolist(), strict=True):
        again = [at for at in passes if start <= at[0] < end][:-1]
        passes = [at for at in passes if at not in again]
    return passes


def _part(timeline: RankTimeline, part: str, *phases: Phase) -> Value:
    if not timeline.phase_budgets:
        return NO_PHASES
    mine = (budget for budget in timeline.phase_budgets if budget.phase in phases)
    return sum(_ns(budget, part) for budget in mine) / 1e6


def _ns(budget: PhaseBudget, part: str) -> int:
    return int(getattr(budget, part))


def _whole_host_step(timeline: RankTimeline) -> HostStep | Unknown:
    step = timeline.judged_host_step
    if timeline.phases is None:
        return NO_PHASES
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    return step


def _per_pass(timeline: RankTimeline, ops: frozenset[str], wanted: tuple[Phase, ...]) -> Value:
    step = _whole_host_step(timeline)
    if isinstance(step, Unknown) or timeline.phases is None:
        return step if isinstance(step, Unknown) else NO_PHASES
    passes = sum(step.start_ns <= start < step.end_ns for start, _ in timeline.phases.passes)
    if passes == 0:
        return Unknown("the step holds no backward pass")
    table = timeline.collectives
    counted = table.is_op(*ops) & (table.step == step.index)
    counted &= is_among(timeline.phases.of_collectives, np.array(wanted, dtype=np.uint8))
    return int(counted.sum()) / passes


def last_backward_ns(timeline: RankTimeline) -> int | None:
    """Return where the last compute of a backward node ends in the analysed step."""
    window, phases, activity = timeline.judged, timeline.phases, timeline.activity
    assert window is not None
    assert phases is not None
    assert activity is not None
    if timeline.is_cpu:
        own = (activity.compute & phases.nodes).clip(window.start_ns, window.end_ns)
        return int(own.ends[-1]) if len(own) else None
    events = timeline.events
    candidates = (events.classes == COMPUTE) & events.linked & (events.device == timeline.device)
    candidates &= (events.stream == timeline.stream) & (events.start_ns >= window.start_ns)
    candidates &= events.start_ns < window.end_ns
    launched = events.launch_ns[candidates]
    inside = phases.nodes.covered_ns(launched, launched + 1) > 0
    ends = events.end_ns[candidates][inside]
    return int(ends.max()) if ends.size else None


@rank_fact("late_reductions_frac", unit="fraction", needs=("kernels", "host_ops", "collectives"))
def late_reductions_frac(timeline: RankTimeline) -> Value:
    """Share of the median step's gradient reductions that start when backward's last compute has ended.

    In DDP and FSDP all but the last start earlier, beside the rest of the backward pass. One that stands
    behind others on its stream starts when the first of them does: they may wait for a late rank, or for the
    link. 0 for a single one, which cannot start before its last gradient.
    """
    window = timeline.judged
    if window is None or timeline.phases is None or timeline.activity is None:
        return NO_PHASES
    table = timeline.collectives
    mine = gradient_rows(timeline) & table.in_window(window.start_ns, window.end_ns)
    if int(mine.sum()) < 2:
        return 0.0
    last = last_backward_ns(timeline)
    if last is None:
        return Unknown("no compute of a backward node lies in the step")
    return float((_queue_starts(table)[mine] >= last).mean())


def _queue_starts(table: CollectiveTable) -> npt.NDArray[np.int64]:
    """Return when the queue of operations begins that each one stands in, on its stream."""
    order = np.lexsort((table.start_ns, table.stream))
    opens = table.held[order] != int(Held.COMMUNICATION)
    opens[np.concatenate(([0], np.flatnonzero(np.diff(table.stream[order])) + 1))] = True
    head = np.maximum.accumulate(np.where(opens, np.arange(order.size), 0))
    starts = np.empty(order.size, dtype=np.int64)
    starts[order] = table.start_ns[order[head]]
    return starts
