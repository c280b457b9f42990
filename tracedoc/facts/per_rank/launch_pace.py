"""Facts about the host: how late it launches, and how short the kernels are that it launches."""

from __future__ import annotations

from tracedoc.facts.catalog import rank_fact, total_ms
from tracedoc.facts.per_rank.kernel_mix import judged_kernels
from tracedoc.facts.per_rank.step import NO_STEP, idle_of_cause
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.stalls import (
    CLEARLY_HIGH,
    CLEARLY_LOW,
    host_away_idle,
    launch_interval_ns,
    launch_pace_idle,
    profiler_cost_ns,
    short_kernel_idle,
)
from tracedoc.values import Unknown, Value

NO_LAUNCH = Unknown("no launch belongs to the step")


@rank_fact(unit="ms", needs=("launches",))
def late_launch_idle_ms(timeline: RankTimeline) -> Value:
    """Time of the median step in which the GPU is idle because the next kernel is not launched yet.

    Time that input, allocation, a blocking sync, compilation or garbage collection explains is not in it.
    """
    return total_ms(idle_of_cause(timeline, "launch"))


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle: the next kernel is not launched yet")
def launch_pace_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """GPU idle time of the median step that the pace of the host's launches explains.

    Late-launch gaps up to twenty times the median time between two launches; in a longer gap the host is not
    slow at launching, it does something else (:func:`host_away_idle_ms`). Unknown between 10 % and 20 % of
    the step where less than 10 % is left without the profiler's own cost on the host (0.5 us for each event
    that it recorded there): a trace alone does not show whether an unprofiled step has such gaps.
    """
    spans, budget = launch_pace_idle(timeline), timeline.judged_budget
    if (unreliable := _unreliable(timeline)) is not None:
        return unreliable
    if budget is None:
        return NO_STEP
    if spans is None:
        return NO_LAUNCH
    share = spans.total_ns / budget.window_ns if budget.window_ns else 0.0
    less = share - profiler_cost_ns(timeline) / max(budget.window_ns, 1)
    if CLEARLY_LOW <= share < CLEARLY_HIGH and less < CLEARLY_LOW:
        return Unknown("the profiler's own cost on the host may explain this much idle time")
    return spans


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle: the host launches nothing for long")
def host_away_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Late-launch idle time of the median step in gaps too long for the pace of launches to explain."""
    return _unreliable(timeline) or _known(host_away_idle(timeline))


@rank_fact(unit="count", needs=("launches",))
def host_away_gaps(timeline: RankTimeline) -> Value:
    """Number of gaps that :func:`host_away_idle_ms` adds up."""
    spans = host_away_idle(timeline)
    return NO_LAUNCH if spans is None else len(spans)


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle after the host waited for it")
def sync_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Idle time of the median step that the host's waits for the GPU cost (``.item()``, ``.cpu()``...).

    After a wait in which everything launched had ended: the idle time until the next kernel starts, at most
    as long as the host was blocked. A wait beside queued work costs nothing. Waiting for input and memory
    allocation come first.
    """
    return _unreliable(timeline) or idle_of_cause(timeline, "sync")


@rank_fact(unit="ms", needs=("kernels",))
def unexplained_idle_ms(timeline: RankTimeline) -> Value:
    """Idle time of the median step without a cause: its next event has no launch in the trace."""
    return total_ms(idle_of_cause(timeline, "unknown"))


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


@rank_fact(unit="ms", needs=("launches",))
def launch_interval_ms(timeline: RankTimeline) -> Value:
    """Median time between two launches of the median step, on the thread that launches most."""
    interval = launch_interval_ns(timeline)
    return NO_LAUNCH if interval is None else interval / 1e6


@rank_fact(unit="ms", needs=("launches",), interval="GPU idle after a kernel shorter than a launch")
def short_kernel_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Late-launch idle time of the median step around kernels shorter than this run's launch interval.

    A gap counts when the kernel before it is shorter than the median time between two launches: such a
    kernel cannot keep the GPU busy until the next one is launched, whatever its number.
    """
    return _unreliable(timeline) or _known(short_kernel_idle(timeline))


def _known(spans: Spans | None) -> Spans | Unknown:
    return NO_LAUNCH if spans is None else spans


def _unreliable(timeline: RankTimeline) -> Unknown | None:
    if not timeline.kernels_lost:
        return None
    return Unknown("idle time is unreliable: launched kernels are missing from the trace")
