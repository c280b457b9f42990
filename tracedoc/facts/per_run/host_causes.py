"""Facts about what the host did while the device was idle, read from the digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.ranks.run_view import RunView
from tracedoc.step.host_work import AwayTotal, HostDigest, SyncTotal
from tracedoc.timeline.host import PHASES
from tracedoc.timeline.syncs import SPELLINGS
from tracedoc.values import Unknown, Value


def _of_cause(run: RunView, cause: str) -> dict[str, Value]:
    return {
        str(digest.rank): digest.host_work.of(cause) / 1e6 if digest.host_work is not None else NO_STEP
        for digest in run.digests
    }


@run_fact("dispatch_idle_ms", unit="ms", scope="rank", needs=("launches",))
def dispatch_idle_ms(run: RunView) -> dict[str, Value]:
    """Late-launch idle time of the median step while a launching thread is inside an operator or call.

    The optimizer's operators are not in it (:func:`optimizer_idle_ms`).
    """
    return _of_cause(run, "dispatch")


@run_fact("python_idle_ms", unit="ms", scope="rank", needs=("launches",))
def python_idle_ms(run: RunView) -> dict[str, Value]:
    """Late-launch idle time of the median step while no launching thread is inside an operator: Python, or
    code that the profiler does not see."""
    return _of_cause(run, "python")


@run_fact("optimizer_idle_ms", unit="ms", scope="rank", needs=("launches",))
def optimizer_idle_ms(run: RunView) -> dict[str, Value]:
    """Late-launch idle time of the median step while the host is inside ``Optimizer.step``."""
    return _of_cause(run, "optimizer")


@run_fact("compile_idle_ms", unit="ms", scope="rank", needs=("host_ops",))
def compile_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step while code is compiled, a module loaded, or a graph captured."""
    return _of_cause(run, "compile")


@run_fact("gc_idle_ms", unit="ms", scope="rank", needs=("host_ops",))
def gc_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step while Python collects garbage, where the capture records that.

    The profiler alone does not; 0 therefore does not exclude it.
    """
    return _of_cause(run, "gc")


@run_fact("profiler_idle_ms", unit="ms", scope="rank", needs=("host_ops",))
def profiler_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step during the profiler's own work (buffers flushed or requested)."""
    return _of_cause(run, "profiler")


@run_fact("queued_idle_ms", unit="ms", scope="rank", needs=("launches",))
def queued_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step with the next event launched already: dependencies, launch latency.

    Gaps inside a CUDA graph are here. Much of it means that the trace lost kernels.
    """
    return _of_cause(run, "dependency")


@run_fact("matrix_ms", unit="ms", scope="rank", needs=("kernels",))
def matrix_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step in which a matrix product, convolution or attention kernel runs (union)."""
    return _of_cause(run, "matrix")


@run_fact("syncs_per_step", unit="count", scope="rank", needs=("launches",))
def syncs_per_step(run: RunView) -> dict[str, Value]:
    """Waits of the host for the GPU in the median step, whether they cost anything or not.

    Calls with no kernel launched between them are one wait.
    """
    return _of_syncs(run, lambda syncs: sum(total.count for total in syncs))


@run_fact("draining_syncs_per_step", unit="count", scope="rank", needs=("launches",))
def draining_syncs_per_step(run: RunView) -> dict[str, Value]:
    """Waits of the median step after which the GPU was idle until the host launched again."""
    return _of_syncs(run, lambda syncs: sum(total.draining for total in syncs))


@run_fact("sync_blocked_ms", unit="ms", scope="rank", needs=("launches",))
def sync_blocked_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step that the host spends in waits that leave the GPU idle, and in others of the
    same operator at the same place."""
    return _of_syncs(run, lambda syncs: sum(t.blocked_ns for t in syncs if t.draining) / 1e6)


@run_fact("sync_call", unit="text", scope="rank", needs=("launches",))
def sync_call(run: RunView) -> dict[str, Value]:
    """What asks for the waits that cost the median step most idle time, as scripts write it: ``.item()``.

    Of an operator that is not written in one way, and of a call outside any, it is the name. Waits of one
    operator at one place count together.
    """
    return _of_costly(run, lambda syncs: SPELLINGS.get(syncs[0].operator, syncs[0].operator))


@run_fact("sync_place", unit="text", scope="rank", needs=("launches",))
def sync_place(run: RunView) -> dict[str, Value]:
    """Where the waits of :func:`sync_call` are.

    The innermost function outside torch if the capture has stacks (with its first line), else the range that
    a person or framework named, else the phase of the step.
    """
    return _of_costly(run, lambda syncs: syncs[0].line or syncs[0].where)


@run_fact("sync_call_waits", unit="count", scope="rank", needs=("launches",))
def sync_call_waits(run: RunView) -> dict[str, Value]:
    """Waits of :func:`sync_call` in the median step."""
    return _of_costly(run, lambda syncs: syncs[0].count)


@run_fact("sync_call_idle_ms", unit="ms", scope="rank", needs=("launches",))
def sync_call_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step after the waits of :func:`sync_call`."""
    return _of_costly(run, lambda syncs: syncs[0].idle_ns / 1e6)


@run_fact("sync_places", unit="count", scope="rank", needs=("launches",))
def sync_places(run: RunView) -> dict[str, Value]:
    """Operators and places whose waits leave the GPU idle in the median step."""
    return _of_costly(run, len)


@run_fact("host_away_operator", unit="text", scope="rank", needs=("launches",))
def host_away_operator(run: RunView) -> dict[str, Value]:
    """The operator that fills most of the gaps of :func:`host_away_idle_ms`: half of each or more of them.

    "Python" where no operator does. Gaps in one phase of the step count together.
    """
    return _of_gaps(run, lambda gaps: gaps[0].doing)


@run_fact("host_away_phase", unit="text", scope="rank", needs=("launches",), values=PHASES)
def host_away_phase(run: RunView) -> dict[str, Value]:
    """Where in the step the gaps of :func:`host_away_operator` are.

    "the forward pass", "between forward and backward", "the backward pass", "between backward and optimizer",
    "the optimizer", "between two steps"; else "an unknown phase".
    """
    return _of_gaps(run, lambda gaps: gaps[0].where)


@run_fact("host_away_operator_ms", unit="ms", scope="rank", needs=("launches",))
def host_away_operator_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step in the gaps of :func:`host_away_operator`."""
    return _of_gaps(run, lambda gaps: gaps[0].idle_ns / 1e6)


@run_fact("host_away_kinds", unit="count", scope="rank", needs=("launches",))
def host_away_kinds(run: RunView) -> dict[str, Value]:
    """Operators and phases in which the gaps of :func:`host_away_idle_ms` are."""
    return _of_gaps(run, len)


def _of_syncs(run: RunView, amount: Callable[[tuple[SyncTotal, ...]], float]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for digest in run.digests:
        if digest.host_work is None:
            found[str(digest.rank)] = NO_STEP
        elif digest.is_cpu:
            found[str(digest.rank)] = Unknown("a CPU run has no GPU to wait for")
        else:
            found[str(digest.rank)] = amount(digest.host_work.syncs)
    return found


def _of_costly(run: RunView, value: Callable[[Sequence[SyncTotal]], Value]) -> dict[str, Value]:
    """Return what is said of each rank's waits that leave the GPU idle, the most costly first."""

    def of_host(host: HostDigest) -> Value:
        costly = [total for total in host.syncs if total.idle_ns]
        return value(costly) if costly else Unknown("no wait of the step leaves the GPU idle")

    return {
        str(digest.rank): of_host(digest.host_work) if digest.host_work is not None else NO_STEP
        for digest in run.digests
    }


def _of_gaps(run: RunView, value: Callable[[Sequence[AwayTotal]], Value]) -> dict[str, Value]:
    """Return what is said of the gaps in which each rank's host launches nothing, the longest first."""
    found: dict[str, Value] = {}
    for digest in run.digests:
        idle = digest.facts.get("host_away_idle_ms", NO_STEP) if digest.host_work is not None else NO_STEP
        if isinstance(idle, Unknown) or digest.host_work is None:
            found[str(digest.rank)] = idle
        else:
            gaps = digest.host_work.away
            found[str(digest.rank)] = value(gaps) if gaps else Unknown("the host is never away for long")
    return found
