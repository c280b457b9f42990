"""Facts of one rank about its steps: their length and parts, what phases compute, and the longest one."""

from __future__ import annotations

import statistics
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.activity import Activity
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.script_code import OF_A_FRAMEWORK, place_of_row
from tracedoc.timeline.stalls import idle_of
from tracedoc.timeline.steps import HostStep
from tracedoc.timeline.windows import Window
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import median
from tracedoc.trace.vocabulary import RuntimeRole, optimizer_step_class
from tracedoc.values import Unknown, Value, needed, needed_number, once

NO_STEP = Unknown("no step and no device activity to analyse")

QUEUE_FULL_NS = 200_000
"""A launch call takes some 5-10 us; one that takes this long waited for room in the launch queue."""


def idle_of_cause(timeline: RankTimeline, cause: str) -> Spans | Unknown:
    """The idle time of the median step that has one of the causes of :mod:`tracedoc.timeline.idle`."""
    if timeline.judged is None or timeline.idle is None:
        return NO_STEP
    return idle_of(timeline, cause)


@once
def in_step(timeline: RankTimeline) -> Activity | Unknown:
    """What the device did in the analysed step of a rank."""
    if timeline.judged is None or timeline.activity is None:
        return NO_STEP
    return timeline.activity.within(timeline.judged.start_ns, timeline.judged.end_ns)


def host_step(timeline: RankTimeline) -> HostStep | Unknown:
    """The host's side of the analysed step."""
    return timeline.judged_host_step or NO_STEP


def _part(timeline: RankTimeline, part: str) -> Value:
    budget = timeline.judged_budget
    return NO_STEP if budget is None else getattr(budget, part) / 1e6


@rank_fact(unit="ms")
def step_ms(timeline: RankTimeline) -> Value:
    """Length of the rank's median step: the lower median of its complete steps.

    On a GPU a step runs from its first kernel on the compute stream to that of the next step. Where no
    step is complete: the longest part, from its first to its last own event.
    """
    return _part(timeline, "window_ns")


@rank_fact(unit="ms", needs=("kernels",))
def compute_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which a compute kernel or a memset runs (union over streams).

    In a CPU trace: in which an operator works on the stepping threads.
    """
    return _part(timeline, "compute_ns")


@rank_fact(unit="ms", needs=("kernels",), interval="no compute runs")
def non_compute_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which no compute runs: communication, copies and idle time."""
    step = needed(in_step(timeline))
    return step.compute.complement(step.start_ns, step.end_ns)


@rank_fact(unit="ms", needs=("kernels",), interval="communication with no compute beside it")
def exposed_comm_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which communication runs and no compute does. Copies hide nothing."""
    return needed(in_step(timeline)).exposed_comm


@rank_fact(unit="ms", needs=("kernels",), interval="copy with neither compute nor communication beside it")
def exposed_copy_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which a copy runs and neither compute nor communication does."""
    return needed(in_step(timeline)).exposed_copy


@rank_fact(unit="ms", needs=("kernels",))
def idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which nothing runs on the device."""
    return _part(timeline, "idle_ns")


@rank_fact(unit="ms", needs=("kernels",))
def comm_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which communication runs, hidden or not; waiting for peers included."""
    return _part(timeline, "comm_ns")


@rank_fact(unit="fraction", needs=("kernels",))
def exposed_comm_frac(timeline: RankTimeline) -> Value:
    """Share of the median step in which communication runs and no compute does. Copies hide nothing."""
    step = needed(in_step(timeline))
    if step.end_ns <= step.start_ns:
        return Unknown("the step takes no time")
    return step.exposed_comm.total_ns / (step.end_ns - step.start_ns)


@rank_fact(unit="bool", needs=("kernels", exposed_comm_frac))
def mostly_communication(timeline: RankTimeline) -> Value:
    """Whether half of the median step or more is communication with no compute beside it."""
    return needed_number(exposed_comm_frac(timeline)) >= 0.5


@rank_fact(unit="fraction", needs=("kernels", "collectives"))
def overlap_frac(timeline: RankTimeline) -> Value:
    """Share of the communication time that compute hides, in the median step.

    HTA's comm_comp_overlap is the same share over the whole trace.
    """
    budget = timeline.judged_budget
    if budget is None:
        return NO_STEP
    if budget.comm_ns == 0:
        return Unknown("the step holds no communication")
    return 1.0 - budget.exposed_comm_ns / budget.comm_ns


@rank_fact(unit="fraction")
def step_jitter_frac(timeline: RankTimeline) -> Value:
    """95th percentile of the complete steps' lengths over their median, minus 1. Needs three steps."""
    lengths = [window.end_ns - window.start_ns for window in timeline.complete_windows]
    if len(lengths) < 3:
        return Unknown(f"{len(lengths)} complete steps; three are needed")
    usual = float(median(lengths))
    if usual == 0.0:
        return Unknown("half of the steps take no time")
    # Not np.percentile: its first call imports numpy.ma.
    long = np.interp(0.95 * (len(lengths) - 1), np.arange(len(lengths)), np.sort(lengths))
    return float(long / usual - 1.0)


@rank_fact(unit="ms", needs=("host_ops", "launches"))
def host_floor_ms(timeline: RankTimeline) -> Value:
    """The host's own work in the median step: its length minus the time it was blocked.

    Blocked is a synchronising call or a copy that waits for the GPU, the allocation or release of device
    memory (which may wait for the GPU too), a full launch queue (a launch of 0.2 ms and more), or waiting
    for the data loader. No fix that leaves the host's work as it is makes the step shorter than this.
    """
    step = timeline.judged_host_step
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    delays = timeline.host_delays
    blocked = delays.sync | delays.input | delays.allocator | _full_queue(timeline)
    if timeline.syncs is not None:
        blocked |= timeline.syncs.calls
    return (step.end_ns - step.start_ns - blocked.clip(step.start_ns, step.end_ns).total_ns) / 1e6


def _full_queue(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    roles = (RuntimeRole.LAUNCH, RuntimeRole.GRAPH_LAUNCH, RuntimeRole.COPY)
    rows = np.flatnonzero((trace.kind == int(Kind.RUNTIME)) & (trace.dur_ns >= QUEUE_FULL_NS))
    rows = rows[trace.named_among(rows, lambda name: vocabulary.runtime_role(name) in roles)]
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])


# -- phases


NO_PHASES = Unknown("no backward pass was captured, so phases are not known")


@rank_fact(unit="ms", needs=("kernels", "host_ops"))
def backward_compute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that the backward pass launched; recomputation is not in it."""
    return _compute_ms(timeline, Phase.BACKWARD)


@rank_fact(unit="ms", needs=("kernels", "host_ops"))
def optimizer_compute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that the optimizer's ``step`` launched; clipping is not in it."""
    return _compute_ms(timeline, Phase.OPTIMIZER)


@rank_fact(unit="ms", needs=("kernels", "host_ops"))
def recompute_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step that repeats the forward pass inside backward (checkpointing).

    Recomputation that a compiler fused into the backward graph cannot be seen and counts as backward.
    """
    return _compute_ms(timeline, Phase.RECOMPUTE)


@rank_fact(unit="count", needs=("host_ops",))
def micro_batches(timeline: RankTimeline) -> Value:
    """Backward passes for each step of the optimizer, in the median step: gradient accumulation.

    With several optimizers (a GAN) each counts by itself, and this is the lower median.
    """
    step = needed(whole_host_step(timeline))
    return micro_batch_count(timeline, step) or Unknown("the step holds no backward pass")


def micro_batch_count(timeline: RankTimeline, step: HostStep) -> int:
    """The backward passes of a host step for each step of its optimizer, 0 without any."""
    phases = timeline.phases
    starts = [start for start, _ in summed_passes(timeline) if step.start_ns <= start < step.end_ns]
    if phases is None or not starts:
        return 0
    updates = phases.host_spans(Phase.OPTIMIZER).starts
    held = np.searchsorted(updates, starts)
    cuts = [number + 1 for number, (a, b) in enumerate(pairwise(held.tolist())) if a != b]
    sizes = sorted(end - start for start, end in pairwise([0, *cuts, len(starts)]))
    return int(statistics.median_low(sizes))


def summed_passes(timeline: RankTimeline) -> list[tuple[int, int]]:
    """The backward passes whose gradients may be summed; of a line search's evaluations the last.

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


def _compute_ms(timeline: RankTimeline, phase: Phase) -> Value:
    if not timeline.phase_budgets:
        return NO_PHASES
    return sum(budget.compute_ns for budget in timeline.phase_budgets if budget.phase is phase) / 1e6


def whole_host_step(timeline: RankTimeline) -> HostStep | Unknown:
    """The host's analysed step, where it was captured to its end and phases are known."""
    step = timeline.judged_host_step
    if timeline.phases is None:
        return NO_PHASES
    if step is None or not step.finished:
        return Unknown("the host's step is not complete")
    return step


# -- the longest captured step


LONGER = 0.10
"""A step longer than the usual one by less than this share is like the others."""

FILLS = 0.5
"""What takes this share of what a step takes longer explains it, if nowhere else it takes half as long."""

ALIKE = Unknown("no captured step is longer than the others")


@rank_fact(unit="count")
def longest_step(timeline: RankTimeline) -> Value:
    """The number of the longest complete step, if it is longer than the lower quartile by a tenth."""
    window, _ = _longest(timeline)
    return ALIKE if window is None else window.index


@rank_fact(unit="text")
def longest_step_doing(timeline: RankTimeline) -> Value:
    """What the host does in the longest step that takes half of what it is longer, and in no usual one.

    The innermost function of the script or range that a person named; else the innermost operator, call or
    function of a library, by its name. In steps not longer by half as much nothing of that name takes half as
    long. Waits for the GPU and for other ranks, and what frameworks write around parts of the step,
    do not count.
    """
    window, excess = _longest(timeline)
    if window is None:
        return ALIKE
    trace, least = timeline.trace, FILLS * excess
    rows = np.flatnonzero(
        (trace.dur_ns >= least)
        & (trace.dur_ns <= window.end_ns - window.start_ns)
        & trace.is_kind(Kind.PYTHON, Kind.ANNOTATION, Kind.CPU_OP, Kind.RUNTIME)
    )
    rows = rows[trace.thread.among(trace.thread.distinct(trace.is_kind(Kind.CPU_OP)), rows)]
    inside = _overlap_ns(trace, rows, window) >= least
    of_usual = np.any([_overlap_ns(trace, rows, one) >= least for one in _usual(timeline)], axis=0)
    elsewhere = set(trace.name[rows[of_usual]].tolist())
    mine = [row for row in rows[inside].tolist() if int(trace.name[row]) not in elsewhere]
    mine.sort(key=lambda row: int(trace.dur_ns[row]))
    mine = [row for row in mine if not _waits(trace.row_name(row))]
    places = [place_of_row(trace, row) for row in mine]
    named = next((str(place) for place in places if place is not None), "")
    if not named and not mine:
        return Unknown("nothing fills what the step takes longer")
    return named or f"`{trace.row_name(mine[0])}`"


@rank_fact(unit="ms")
def longest_step_pause_ms(timeline: RankTimeline) -> Value:
    """The longest time in the longest step in which the device does nothing, if that makes it long; else 0.

    It takes half of what the step is longer, and steps that are not longer by half as much have none of half
    its length.
    """
    window, excess = _longest(timeline)
    if window is None or timeline.activity is None:
        return ALIKE
    busy = timeline.activity.busy

    def pause_ns(one: Window) -> int:
        idle = busy.complement(one.start_ns, one.end_ns)
        return int((idle.ends - idle.starts).max(initial=0))

    pause = pause_ns(window)
    alone = pause >= FILLS * excess and all(pause_ns(one) < FILLS * pause for one in _usual(timeline))
    return pause / 1e6 if alone else 0.0


def _usual(timeline: RankTimeline) -> list[Window]:
    """The complete steps that are not longer than usual by half of what the longest one is."""
    window, excess = _longest(timeline)
    longest = 0 if window is None else window.end_ns - window.start_ns
    least = longest - FILLS * excess
    return [one for one in timeline.complete_windows if one.end_ns - one.start_ns < least]


def _overlap_ns(trace: Trace, rows: npt.NDArray[np.intp], window: Window) -> npt.NDArray[np.int64]:
    """How much of each row lies in a window, negative where none does."""
    ends, starts = trace.end_ns[rows], trace.ts_ns[rows]
    return np.asarray(np.minimum(ends, window.end_ns) - np.maximum(starts, window.start_ns))


def _waits(name: str) -> bool:
    """Whether the host waits in a range or call, or it holds a part of every step."""
    return (
        vocabulary.runtime_role(name) is RuntimeRole.SYNC
        or vocabulary.collective_op(name) is not None
        or vocabulary.is_backward_node(name)
        or OF_A_FRAMEWORK.match(name) is not None
    )


def _longest(timeline: RankTimeline) -> tuple[Window | None, int]:
    """The longest complete step, and what it has beyond the lower quartile; ``None`` if all are alike."""
    windows = sorted(timeline.complete_windows, key=lambda one: one.end_ns - one.start_ns)
    if len(windows) < 2:
        return None, 0
    lengths = [one.end_ns - one.start_ns for one in windows]
    usual = lengths[(len(lengths) - 1) // 4]
    excess = lengths[-1] - usual
    return (windows[-1], excess) if excess > LONGER * usual else (None, 0)
