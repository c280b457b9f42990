"""Facts of one rank about its host: how late it launches, how short the kernels are, what it compiles."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import rank_fact, total_ms
from tracedoc.spans import Spans
from tracedoc.step.kernel_times import judged_kernels, small_kernel_rows
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.host import dtensor_dispatch, optimizer_spans
from tracedoc.timeline.lags import CPU_IDLE_NS
from tracedoc.timeline.launches import NO_ROW
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.script_code import place_around
from tracedoc.timeline.stalls import away_after_ns, idle_of
from tracedoc.timeline.steps import HostStep
from tracedoc.topics.step.rank import NO_STEP, idle_of_cause
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, intersection, is_among, median
from tracedoc.trace.kernels import MATRIX
from tracedoc.values import Unknown, Value, needed, once

NO_LAUNCH = Unknown("no launch belongs to the step")
ON_GPUS = Unknown("on a GPU host_away_idle_ms says as much")

LAUNCH_NS = 10_000
"""Issuing one PyTorch kernel takes the host 5 to 10 us."""

EVENT_COST_NS = 500
"""What recording one event on the host costs it."""

CLEARLY_LOW, CLEARLY_HIGH = 0.10, 0.20
"""The profiler itself slows the host (:data:`EVENT_COST_NS`). Idle shares below the first are a pass with it,
above the second a finding without it; between them only a step time without the profiler can decide."""


@rank_fact(unit="ms", needs=("launches",))
def late_launch_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle because the next kernel is not launched yet.

    Time that input, allocation, a blocking sync, compilation or garbage collection explains is not in it.
    """
    return needed(late_idle(timeline)).total_ns / 1e6


@once
def late_idle(timeline: RankTimeline) -> Spans | Unknown:
    """Idle time of the analysed step for want of a launch."""
    if timeline.judged is None or timeline.idle is None:
        return NO_STEP
    return idle_of(timeline, "launch") | idle_of(timeline, "operator")


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle: the next kernel is not launched yet")
def launch_pace_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """GPU idle time of the median step that the pace of the host's launches explains.

    Late-launch gaps up to twenty times the median time between two launches, or 2 ms if that is less; in a
    longer gap, and in an operator that computes on the CPU, the host is not slow at launching, it does
    something else (:func:`host_away_idle_ms`). Unknown between 10 % and 20 % of
    the step where less than 10 % is left without the profiler's own cost on the host (0.5 us for each event
    that it recorded there): a trace alone does not show whether an unprofiled step has such gaps.
    """
    budget = timeline.judged_budget
    if budget is None:
        return NO_STEP
    spans = needed(_paced(timeline))
    share = spans.total_ns / budget.window_ns if budget.window_ns else 0.0
    less = share - _profiler_cost_ns(timeline) / max(budget.window_ns, 1)
    if CLEARLY_LOW <= share < CLEARLY_HIGH and less < CLEARLY_LOW:
        return Unknown("the profiler's own cost on the host may explain this much idle time")
    return spans


def _profiler_cost_ns(timeline: RankTimeline) -> int:
    """The host's time, in ns, that recording the analysed step took; 0 where the step is not known."""
    step, trace = timeline.judged_host_step, timeline.trace
    if step is None:
        return 0
    recorded = trace.is_kind(Kind.CPU_OP, Kind.RUNTIME, Kind.ANNOTATION, Kind.PYTHON)
    inside = (trace.ts_ns >= step.start_ns) & (trace.ts_ns < step.end_ns)
    return int((recorded & inside).sum()) * EVENT_COST_NS


@once
def _paced(timeline: RankTimeline) -> Spans | Unknown:
    """Late-launch idle time that the pace of launches explains, whatever the profiler costs."""
    late, interval = late_idle(timeline), launch_interval_ns(timeline)
    if isinstance(late, Unknown) or not timeline.launches.linked.any():
        return NO_LAUNCH
    if interval is None:
        return Spans.empty()
    lengths = late.ends - late.starts
    # Where DTensors are dispatched the host is slow at launching, however long a gap is.
    dispatched = dtensor_dispatch(timeline).covered_ns(late.starts, late.ends)
    paced = lengths - dispatched <= away_after_ns(interval)
    return Spans(late.starts[paced], late.ends[paced]) - idle_of(timeline, "operator")


@once
def launch_interval_ns(timeline: RankTimeline) -> float | None:
    """Return the median time between two launches of the analysed step, on the thread that launches most."""
    if timeline.judged is None:
        return None
    position = timeline.position_of(timeline.judged)
    launches = timeline.launches.launch_rows
    wanted = launches != NO_ROW
    if position is not None:
        wanted &= timeline.step_position == position
    rows = distinct(launches[wanted])
    if rows.size < 2:
        return None
    threads, counts = np.unique(timeline.trace.thread[rows], return_counts=True)
    rows = rows[timeline.trace.thread[rows] == threads[np.argmax(counts)]]
    if rows.size < 2:
        return None
    return float(median(np.diff(np.sort(timeline.trace.ts_ns[rows]))))


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle: the host launches nothing for long")
def host_away_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Late-launch idle time of the median step that the pace of launches does not explain: long gaps, and
    operators that compute on the CPU for 0.2 ms or more without a call."""
    paced = needed(_paced(timeline))
    return needed(late_idle(timeline)) - paced


@rank_fact(unit="count", needs=("launches", host_away_idle_ms))
def host_away_gaps(timeline: RankTimeline) -> Value:
    """Number of gaps that :func:`host_away_idle_ms` adds up."""
    return len(needed(host_away_idle_ms(timeline)))


@rank_fact(unit="ms", needs=("launches", "host_ops"))
def dtensor_idle_ms(timeline: RankTimeline) -> Value:
    """GPU idle time of the median step while the host clips or updates parameters that are DTensors.

    Those of FSDP2 and of tensor parallelism are. The GPU waits for the next launch, and each operator goes
    through Python that works out how its result is sharded.
    """
    paced, dispatched = _paced(timeline), dtensor_dispatch(timeline)
    if isinstance(paced, Unknown) or not len(dispatched):
        return Unknown("no operator of DTensors is in this trace")
    return (paced & dispatched).total_ns / 1e6 or Unknown("the GPU does not wait for it")


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle after the host waited for it")
def sync_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Idle time of the median step that the host's waits for the GPU cost (``.item()``, ``.cpu()``...).

    After a wait in which everything launched had ended: the idle time until the next kernel starts, at most
    as long as the host was blocked. A wait beside queued work costs nothing. Waiting for input and memory
    allocation come first.
    """
    return idle_of_cause(timeline, "sync")


@rank_fact(unit="ms", needs=("kernels",), interval="idle: code is loaded or compiled")
def warm_up_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Idle time of the median step in which kernels and libraries are loaded, or code is compiled.

    A kernel is loaded when it is launched for the first time: the call, and what its operator does before it,
    take a millisecond or more. A time before the first launch of a kernel that a fuser generated is that of
    compiling it; one within the graphs that TorchScript runs, with no operator, is that of compiling them.
    On a CPU loading is not seen.
    """
    if timeline.judged is None or timeline.idle is None:
        return NO_STEP
    if not (timeline.is_cpu or timeline.launches.linked.any()):
        return NO_LAUNCH
    return idle_of(timeline, "loading") | idle_of(timeline, "compile")


@rank_fact(unit="ms", needs=("kernels",))
def unexplained_idle_ms(timeline: RankTimeline) -> Value:
    """Idle time of the median step without a cause: its next event has no launch in the trace."""
    return total_ms(idle_of_cause(timeline, "unknown"))


@rank_fact(unit="ms", needs=("kernels",))
def script_pause_ms(timeline: RankTimeline) -> Value:
    """Idle time of the median step of a CPU run without a cause, in pauses of 0.1 ms and longer.

    Shorter ones are :func:`between_operators_ms`.
    """
    return _without_operators(timeline).at_least(CPU_IDLE_NS).total_ns / 1e6


@rank_fact(unit="ms", needs=("kernels",))
def between_operators_ms(timeline: RankTimeline) -> Value:
    """Idle time of the median step of a CPU run between operators: the Python that calls one after the other.

    Pauses of 0.1 ms and longer are :func:`script_pause_ms`.
    """
    idle = _without_operators(timeline)
    return (idle.total_ns - idle.at_least(CPU_IDLE_NS).total_ns) / 1e6


@rank_fact(unit="count", needs=("kernels",))
def operators_per_step(timeline: RankTimeline) -> Value:
    """Operators of the median step of a CPU run that the training thread calls one after the other."""
    if not timeline.is_cpu or timeline.activity is None:
        return Unknown("a GPU computes")
    if timeline.judged is None:
        return NO_STEP
    return len(timeline.activity.compute.clip(timeline.judged.start_ns, timeline.judged.end_ns))


def _without_operators(timeline: RankTimeline) -> Spans:
    """The idle time of the median step of a CPU run that has no cause."""
    return needed(idle_of_cause(timeline, "unknown") if timeline.is_cpu else ON_GPUS)


@rank_fact(unit="count", needs=("gpu", "kernels"))
def kernels_per_step(timeline: RankTimeline) -> Value:
    """Compute kernels that ran in the median step."""
    return int(judged_kernels(timeline).size)


@rank_fact(unit="ms", needs=("gpu", "kernels"))
def mean_kernel_ms(timeline: RankTimeline) -> Value:
    """Compute time of the median step over its number of compute kernels."""
    budget, count = timeline.judged_budget, judged_kernels(timeline).size
    if budget is None or count == 0:
        return Unknown("the step holds no compute kernel")
    return budget.compute_ns / count / 1e6


@rank_fact(unit="bool", needs=("gpu", "kernels"))
def has_short_matrix_kernels(timeline: RankTimeline) -> Value:
    """Whether the median step's matrix kernels take less than a launch on average, which is 10 us.

    Matrix kernels are products, convolutions and attention. Fusing what lies between short ones leaves most
    launches as they are. False in a step without any.
    """
    trace, rows = timeline.trace, judged_kernels(timeline)
    rows = rows[[timeline.events.categories[name] in MATRIX for name in trace.name[rows].tolist()]]
    return bool(rows.size and (trace.end_ns[rows] - trace.ts_ns[rows]).mean() < LAUNCH_NS)


@rank_fact(unit="ms", needs=("launches",))
def launch_interval_ms(timeline: RankTimeline) -> Value:
    """Median time between two launches of the median step, on the thread that launches most."""
    interval = launch_interval_ns(timeline)
    return NO_LAUNCH if interval is None else interval / 1e6


@rank_fact(unit="ms", needs=("launches",))
def short_kernel_idle_ms(timeline: RankTimeline) -> Value:
    """Late-launch idle time of the median step around kernels shorter than this run's launch interval.

    A gap counts when the kernel before it is shorter than the median time between two launches: such a
    kernel cannot keep the GPU busy until the next one is launched, whatever its number.
    """
    return needed(_after_short_kernels(timeline)).total_ns / 1e6


@rank_fact(unit="ms", needs=("launches", "kernels"), interval="a short kernel, or idle time after one")
def short_kernel_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step for short kernels: that of chains of them, and the idle time after them.

    A chain are kernels below 5 us which follow one another on a stream, but for the first; matrix products,
    attention and the optimizer's kernels do not count. The idle time is that after kernels shorter than a
    launch.
    """
    idle, rows = needed(_after_short_kernels(timeline)), _in_chains(timeline)
    return idle | Spans.of(timeline.trace.ts_ns[rows], timeline.trace.end_ns[rows])


@rank_fact(unit="ms", needs=("launches", "kernels"))
def short_chains_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in the chains of :func:`short_kernel_ms`."""
    rows = _in_chains(timeline)
    return total_ms(Spans.of(timeline.trace.ts_ns[rows], timeline.trace.end_ns[rows]))


def _in_chains(timeline: RankTimeline) -> npt.NDArray[np.intp]:
    rows, of_optimizer = small_kernel_rows(timeline), _optimizer_kernels(timeline)
    return rows if isinstance(of_optimizer, Unknown) else rows[~is_among(rows, of_optimizer)]


@once
def _after_short_kernels(timeline: RankTimeline) -> Spans | Unknown:
    """Late-launch idle time behind kernels that are shorter than the time between two launches."""
    interval, late = launch_interval_ns(timeline), needed(_paced(timeline))
    if interval is None:
        return NO_LAUNCH
    own = timeline.events.on(timeline.device)
    order = np.argsort(own.end_ns, kind="stable")
    before = np.searchsorted(own.end_ns[order], late.starts, side="right") - 1
    event = order[np.maximum(before, 0)]
    duration = own.end_ns[event] - own.start_ns[event]
    short = (before >= 0) & (duration < interval)
    return Spans(late.starts[short], late.ends[short])


# -- the optimizer

FUSABLE = ("SGD", "Adam", "AdamW", "Adagrad")
"""Optimizers of PyTorch that update all parameters at once with ``fused=True``."""


@rank_fact(unit="text", needs=("host_ops",), values=FUSABLE)
def fusable_optimizer(timeline: RankTimeline) -> Value:
    """The class of the optimizer that the trace names: "SGD", "Adam", "AdamW" or "Adagrad".

    Those are the ones that PyTorch fuses; unknown for others.
    """
    classes = {one for name in timeline.trace.names if (one := vocabulary.optimizer_step_class(name))}
    if len(classes) == 1 and classes <= {*FUSABLE}:
        return classes.pop()
    return Unknown("the trace names no optimizer, or one that PyTorch does not fuse")


@rank_fact(unit="count", needs=("launches", "kernels", "host_ops"))
def optimizer_kernels_per_step(timeline: RankTimeline) -> Value:
    """Compute kernels that the optimizer launched and that ran in the median step."""
    return int(needed(_optimizer_kernels(timeline)).size)


@rank_fact(unit="ms", needs=("host_ops",))
def optimizer_host_ms(timeline: RankTimeline) -> Value:
    """Time that the host spends inside ``Optimizer.step`` in the median step."""
    window = timeline.judged
    if window is None:
        return NO_STEP
    return optimizer_spans(timeline).clip(window.start_ns, window.end_ns).total_ns / 1e6


@rank_fact(unit="fraction", needs=("launches", "kernels", "host_ops"))
def optimizer_fused_frac(timeline: RankTimeline) -> Value:
    """Share of the optimizer's kernels of the median step that update many tensors at once, by their names.

    Those of ``foreach=True`` and ``fused=True``, of fused optimizers of libraries, and of compiled ones.
    """
    rows = needed(_optimizer_kernels(timeline))
    if rows.size == 0:
        return Unknown("the optimizer of the step launches no kernel")
    fused = timeline.trace.named(lambda name: _FUSED.search(name) is not None)
    return float(fused[timeline.trace.name[rows]].mean())


_FUSED = re.compile(r"(?i)multi_?tensor|fused|foreach|^triton_")


def _optimizer_kernels(timeline: RankTimeline) -> npt.NDArray[np.intp] | Unknown:
    if timeline.phases is None or timeline.phases.of_events.size != timeline.events.rows.size:
        return Unknown("no phases of the step are known")
    rows = timeline.events.rows[timeline.phases.of_events == int(Phase.OPTIMIZER)]
    return intersection(rows, judged_kernels(timeline))


# -- compilation


SHORTEST_NS = 1_000_000
"""Compiling takes longer; what is shorter only looks whether compiled code still fits."""

NO_WARM_STEP = Unknown("no finished step after the first one")


@rank_fact(unit="count", needs=("host_ops",))
def recompiling_steps(timeline: RankTimeline) -> Value:
    """Captured steps in which torch.compile compiles for a millisecond or more; the first is left out.

    By the ranges of Dynamo and Inductor. Loading of kernels is not compilation.
    """
    steps = _warm_steps(timeline)
    if not steps:
        return NO_WARM_STEP
    compiling = _compiling(timeline)
    return sum(compiling.clip(step.start_ns, step.end_ns).total_ns >= SHORTEST_NS for step in steps)


@rank_fact(unit="ms", needs=("host_ops",))
def recompile_ms(timeline: RankTimeline) -> Value:
    """What compiling costs the median step: its share of the captured steps after the first, of that step.

    Idle time of the GPU inside the ranges of Dynamo and Inductor; in a CPU trace the time inside them.
    """
    steps, judged = _warm_steps(timeline), timeline.judged
    if not steps or judged is None:
        return NO_WARM_STEP
    compiling, activity = _compiling(timeline), timeline.activity
    if not timeline.is_cpu and activity is not None:
        compiling = compiling - activity.busy
    cost = compiling.covered_ns([step.start_ns for step in steps], [step.end_ns for step in steps])
    length = sum(step.end_ns - step.start_ns for step in steps)
    return float(cost.sum()) / max(length, 1) * (judged.end_ns - judged.start_ns) / 1e6


@rank_fact(unit="text", needs=("host_ops",))
def recompiled(timeline: RankTimeline) -> Value:
    """What the longest compilation after the first captured step compiled, in words; "none" without any.

    The innermost function of the script around it where Python stacks were recorded, as "`forward`
    (`model.py:12`)", or the range that a person named. Else the region that runs behind it: "compiled region
    2, version 4" (regions are counted in the order in which they were first compiled); else "a function".
    """
    steps = _warm_steps(timeline)
    if not steps:
        return NO_WARM_STEP
    trace = timeline.trace
    rows = trace.rows_named(vocabulary.is_compile_range)
    rows = rows[(trace.ts_ns[rows] >= steps[0].start_ns) & (trace.dur_ns[rows] >= SHORTEST_NS)]
    if not rows.size:
        return "none"
    longest = int(rows[np.argmax(trace.dur_ns[rows])])
    place = place_around(trace, longest)
    return str(place) if place is not None else _region_behind(trace, longest) or "a function"


def _region_behind(trace: Trace, row: int) -> str:
    """The compiled region that runs next on a row's thread, in words, "" where none does."""
    thread = trace.thread == trace.thread[row]
    named = trace.named(lambda name: vocabulary.compiled_region(name) is not None)[trace.name]
    behind = np.flatnonzero(named & thread & (trace.ts_ns >= trace.end_ns[row]))
    if not behind.size:
        return ""
    first = int(behind[np.argmin(trace.ts_ns[behind])])
    region = vocabulary.compiled_region(trace.row_name(first))
    return "" if region is None else f"compiled region {region[0]}, version {region[1] + 1}"


def _warm_steps(timeline: RankTimeline) -> list[HostStep]:
    return [step for step in timeline.host.steps[1:] if step.finished]


def _compiling(timeline: RankTimeline) -> Spans:
    trace = timeline.trace
    rows = trace.rows_named(vocabulary.is_compile_range, Kind.CPU_OP, Kind.ANNOTATION)
    return Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
