"""Facts about what the host did while the device was idle, read from the digests."""

from __future__ import annotations

from collections.abc import Callable

from tracedoc.digest.host_work import HostDigest, SyncTotal
from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.step import NO_STEP
from tracedoc.ranks.run_view import RunView
from tracedoc.timeline.host import PHASES
from tracedoc.timeline.syncs import SPELLINGS
from tracedoc.units import format_ms
from tracedoc.values import Unknown, Value

NAMED = 2
"""Texts name this many callers."""


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


@run_fact("sync_asked_by", unit="text", scope="rank", needs=("launches",))
def sync_asked_by(run: RunView) -> dict[str, Value]:
    """What causes the most costly waits of the median step: where, how often, and at what idle time.

    Where is the innermost function outside torch if the capture has stacks (with its first line), else the
    range that a person or framework named, else the phase of the step.
    """
    return {
        str(digest.rank): _asked_by(digest.host_work) if digest.host_work is not None else NO_STEP
        for digest in run.digests
    }


@run_fact("host_away_doing", unit="text", scope="rank", needs=("launches",))
def host_away_doing(run: RunView) -> dict[str, Value]:
    """What the host does in the gaps of :func:`host_away_idle_ms`: the operator filling them, and where."""
    return {
        str(digest.rank): _away(digest.host_work, digest.facts.get("host_away_idle_ms", NO_STEP))
        if digest.host_work is not None
        else NO_STEP
        for digest in run.digests
    }


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


def _asked_by(host: HostDigest) -> Value:
    costly = [total for total in host.syncs if total.idle_ns]
    if not costly:
        return Unknown("no wait of the step leaves the GPU idle")
    named = [
        f"{_spelt(total)}{_at(total.line or total.where)}"
        f" ({total.count} a step, {format_ms(total.idle_ns / 1e6)})"
        for total in costly[:NAMED]
    ]
    return ", ".join(named) + (f" and {len(costly) - NAMED} more" if len(costly) > NAMED else "")


def _spelt(total: SyncTotal) -> str:
    spelling = SPELLINGS.get(total.operator)
    return f"{total.operator}, usually {spelling}," if spelling else total.operator


def _at(where: str) -> str:
    if where == PHASES[0]:
        return ""
    return f" {where}" if where.startswith("between ") else f" in {where}"


def _away(host: HostDigest, idle_ms: Value) -> Value:
    if isinstance(idle_ms, Unknown):
        return idle_ms
    if not host.away:
        return Unknown("the host is never away for long")
    named = [
        f"{total.doing if total.doing != 'Python' else 'Python outside any operator'}"
        f"{_at(total.where)} ({format_ms(total.idle_ns / 1e6)})"
        for total in host.away[:NAMED]
    ]
    return ", ".join(named) + (f" and {len(host.away) - NAMED} more" if len(host.away) > NAMED else "")
