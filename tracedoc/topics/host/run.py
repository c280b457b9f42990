"""Facts of the run about what the host did while the device was idle, and where in the script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tracedoc.facts.catalog import RankFact, manifest_fact, of_manifest, run_fact
from tracedoc.ranks.code_places import code_place, common_place
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.step.host_work import AwayTotal, HostDigest, SyncTotal
from tracedoc.step.rank_digest import RankDigest
from tracedoc.step.source_step import SourceLine
from tracedoc.timeline.host import PHASES
from tracedoc.timeline.script_code import CodePlace
from tracedoc.timeline.syncs import SPELLINGS
from tracedoc.topics.capture.run import compiled, recorded
from tracedoc.topics.host.rank import host_away_idle_ms, late_launch_idle_ms, unexplained_idle_ms
from tracedoc.topics.step.rank import NO_STEP
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed

NO_STACKS = Unknown("no step was recorded with Python stacks: capture with `tracedoc collect`")


def time_of_work(run: RunView, cause: str) -> dict[str, Value]:
    """How long each rank was at one kind of work in its analysed step, in ms."""
    return {
        str(digest.rank): digest.host_work.of(cause) / 1e6 if digest.host_work is not None else NO_STEP
        for digest in run.digests
    }


@run_fact(unit="ms", scope="rank", needs=("launches",))
def optimizer_idle_ms(run: RunView) -> dict[str, Value]:
    """Late-launch idle time of the median step while the host is inside ``Optimizer.step``."""
    return time_of_work(run, "optimizer")


@run_fact(unit="ms", scope="rank", needs=("launches",))
def queued_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step with the next event launched already: dependencies, launch latency.

    Gaps inside a CUDA graph are here. Much of it means that the trace lost kernels.
    """
    return time_of_work(run, "dependency")


@run_fact(unit="ms", scope="rank", needs=("launches",))
def sync_blocked_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step that the host spends in waits that leave the GPU idle, and in others of the
    same operator at the same place."""
    return _of_syncs(run, lambda syncs: sum(t.blocked_ns for t in syncs if t.draining) / 1e6)


@run_fact(unit="text", scope="rank", needs=("launches",))
def sync_call(run: RunView) -> dict[str, Value]:
    """What asks for the waits that cost the median step most idle time, as scripts write it: ``.item()``.

    Of an operator that is not written in one way, and of a call outside any, it is the name. Waits of one
    operator at one place count together.
    """
    return _of_costly(run, lambda syncs: SPELLINGS.get(syncs[0].operator, syncs[0].operator))


@run_fact(unit="text", scope="rank", needs=("launches",))
def sync_place(run: RunView) -> dict[str, Value]:
    """Where the waits of :func:`sync_call` are.

    The innermost function outside torch if the capture has stacks (with its first line), else the range that
    a person or framework named, else the phase of the step.
    """
    return _of_costly(run, lambda syncs: syncs[0].line or syncs[0].where)


@run_fact(unit="count", scope="rank", needs=("launches",))
def sync_call_waits(run: RunView) -> dict[str, Value]:
    """Waits of :func:`sync_call` in the median step."""
    return _of_costly(run, lambda syncs: syncs[0].count)


@run_fact(unit="ms", scope="rank", needs=("launches",))
def sync_call_idle_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step after the waits of :func:`sync_call`."""
    return _of_costly(run, lambda syncs: syncs[0].idle_ns / 1e6)


@run_fact(unit="count", scope="rank", needs=("launches",))
def sync_places(run: RunView) -> dict[str, Value]:
    """Operators and places whose waits leave the GPU idle in the median step."""
    return _of_costly(run, len)


@run_fact(unit="text", scope="rank", needs=("launches", host_away_idle_ms))
def host_away_operator(run: RunView) -> dict[str, Value]:
    """The operator that fills most of the gaps of :func:`host_away_idle_ms`: half of each or more of them.

    "Python" where no operator does. Gaps in one phase of the step count together.
    """
    return _of_gaps(run, lambda gaps: gaps[0].doing)


@run_fact(unit="text", scope="rank", needs=("launches", host_away_idle_ms), values=PHASES)
def host_away_phase(run: RunView) -> dict[str, Value]:
    """Where in the step the gaps of :func:`host_away_operator` are.

    "the forward pass", "between forward and backward", "the backward pass", "between backward and optimizer",
    "the optimizer", "between two steps"; else "an unknown phase".
    """
    return _of_gaps(run, lambda gaps: gaps[0].where)


@run_fact(unit="ms", scope="rank", needs=("launches", host_away_idle_ms))
def host_away_operator_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the median step in the gaps of :func:`host_away_operator`."""
    return _of_gaps(run, lambda gaps: gaps[0].idle_ns / 1e6)


@run_fact(unit="count", scope="rank", needs=("launches", host_away_idle_ms))
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
    """A value of each rank's waits that leave the GPU idle, the most costly first."""

    def of_host(host: HostDigest) -> Value:
        costly = [total for total in host.syncs if total.idle_ns]
        return value(costly) if costly else Unknown("no wait of the step leaves the GPU idle")

    return {
        str(digest.rank): of_host(digest.host_work) if digest.host_work is not None else NO_STEP
        for digest in run.digests
    }


def _of_gaps(run: RunView, value: Callable[[Sequence[AwayTotal]], Value]) -> dict[str, Value]:
    """A value of the gaps in which each rank's host launches nothing, the longest first."""
    found: dict[str, Value] = {}
    for digest in run.digests:
        idle = host_away_idle_ms.of(digest) if digest.host_work is not None else NO_STEP
        if isinstance(idle, Unknown) or digest.host_work is None:
            found[str(digest.rank)] = idle
        else:
            gaps = digest.host_work.away
            found[str(digest.rank)] = value(gaps) if gaps else Unknown("the host is never away for long")
    return found


# -- compilation


@run_fact(unit="count", scope="rank", needs=(compiled,))
def recompile_limit_hits(run: RunView) -> dict[str, Value]:
    """How often torch.compile gave a function up since the job began, having compiled it too often already.

    From Dynamo's own counters. By default it compiles a function eight times; what needs another version
    runs uncompiled from then on. 0 without a manifest where no compiled code runs.
    """
    if not run.job.ranks and not compiled(run):
        return {str(digest.rank): 0 for digest in run.digests}
    return of_manifest(run, lambda rank: rank.compiled.get("recompile_limit_hits", 0))


# -- cores, queues, and what the script reads


ENOUGH_PERIODS = 5
"""A share of fewer scheduler periods says nothing."""

DEFAULT_QUEUES = 8
"""Of CUDA, where ``CUDA_DEVICE_MAX_CONNECTIONS`` is not set."""


@run_fact(unit="text")
def item_call_sites(run: RunView) -> Value:
    """Functions of the script that read values of tensors, as ``train.py:12 (step) .item() x2``.

    From the step that the first rank of a collected run records with Python stacks; those with most calls.
    The line is that where the function begins; in code that runs since before that step, about where it was.
    Reading a tensor on the CPU waits for nothing, and the stacks do not show where a tensor is.
    """
    sites = needed(_calling(run, meets=False))
    lines = [f"{at.file}:{at.line} ({at.function.strip('<>')}) .{at.call}() x{at.calls}" for at in sites[:3]]
    return ", ".join(lines) or "none"


@run_fact(unit="text")
def barrier_code(run: RunView) -> Value:
    """The function of the script in which ranks meet most often, else "none".

    Counted are barriers, reductions, exchanges of pickled objects and ``full_tensor()``.

    From the same step as :func:`item_call_sites`.
    """
    sites = needed(_calling(run, meets=True))
    return str(sites[0].place) if sites else "none"


def _calling(run: RunView, *, meets: bool) -> list[SourceLine] | Unknown:
    if not run.source_steps:
        return NO_STACKS
    return [one for one in run.source_steps[min(run.source_steps)].asking if one.meets == meets]


@manifest_fact(unit="fraction")
def cpu_throttled_frac(rank: RankJob) -> Value:
    """Share of the scheduler's periods of the capture in which the container had used up its CPU quota.

    From cgroup's ``nr_throttled`` / ``nr_periods``, so of all processes in the container; a period is mostly
    100 ms. Unknown in a group without a quota.
    """
    periods = rank.counters.get("cgroup.cpu.nr_periods", 0)
    if periods < ENOUGH_PERIODS:
        return Unknown("no CPU quota, or it was seen for too short a time")
    return rank.counters.get("cgroup.cpu.nr_throttled", 0) / periods


@manifest_fact(unit="fraction")
def core_wait_frac(rank: RankJob) -> Value:
    """Share of the time in which the rank's training thread could run that it waited for a free core.

    From the Linux scheduler (schedstat), over captured steps: waited / (ran + waited). Time in which the
    thread sleeps or waits for data is in neither. Unknown where the kernel does not count it.
    """
    thread = rank.training_thread
    could = thread.get("ran_us", 0) + thread.get("waited_us", 0)
    return thread.get("waited_us", 0) / could if could > 0 else _NO_CORE_WAIT


@manifest_fact(unit="ms")
def core_wait_ms(rank: RankJob) -> Value:
    """Time that the rank's training thread waited for a free core in a captured step, on average."""
    thread = rank.training_thread
    steps, waited = thread.get("steps", 0), thread.get("waited_us")
    return waited / 1000 / steps if steps > 0 and waited is not None else _NO_CORE_WAIT


@manifest_fact(unit="count")
def operator_threads(rank: RankJob) -> Value:
    """Threads that torch uses for one operator on the CPU (``torch.get_num_threads()``)."""
    return recorded(rank.threads, "the manifest has no threads")


@run_fact(unit="count", scope="rank")
def fair_threads(run: RunView) -> dict[str, Value]:
    """Threads for one operator with which each rank on a rank's cores has a core for each, at least 1.

    Ranks of a host that name the same cores share them.
    """
    fair = run.job.fair_cores
    unknown = Unknown("the manifest has no cores")
    return {str(digest.rank): fair.get(digest.rank, unknown) for digest in run.digests}


def crowded(run: RunView, rank: int) -> bool:
    """Whether a rank is known to use more threads for an operator than it has cores of its own."""
    job = run.job.rank(rank)
    if job is None or job.threads is None:
        return False
    return job.threads > run.job.fair_cores.get(rank, job.threads)


_NO_CORE_WAIT = Unknown("whether processes share cores is not known: the manifest has no times of threads")


@manifest_fact(unit="count")
def hardware_queues(rank: RankJob) -> Value:
    """``CUDA_DEVICE_MAX_CONNECTIONS``: queues by which streams reach the GPU; 8 where it is not set."""
    value = rank.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
    return int(value) if value.isdecimal() and len(value) < 6 else DEFAULT_QUEUES


# -- the function of the script


FLATTENING = "flatten_dense_tensors"
"""The operator that merges or splits tensors around a broadcast of buffers."""


@run_fact(unit="text", scope="rank", needs=("launches", host_away_idle_ms))
def host_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which the host is for half of :func:`host_away_idle_ms` or more.

    From the same sources as :func:`loader_code`; "none" where they show none.
    """
    return places_in_idle_time(run, host_away_idle_ms, loading=False)


@run_fact(unit="text", scope="rank", needs=("host_ops",))
def script_code(run: RunView) -> dict[str, Value]:
    """The function of the script in which the host of a CPU run is longest outside operators, or "none".

    From the same sources as :func:`loader_code`; all ranks run one script, so that what the steps with stacks
    show counts for those whose own trace shows nothing, if each rank whose step was read is in that function.
    """
    return {str(digest.rank): str(script_place(run, digest.rank) or "none") for digest in run.digests}


@run_fact(unit="ms", scope="rank", needs=("host_ops", unexplained_idle_ms))
def script_code_ms(run: RunView) -> dict[str, Value]:
    """Time of a step in which no operator runs because the host is in :func:`script_code`, at most.

    As long as the function took in the steps with stacks, on the rank where it was shortest, and at most as
    long as no operator runs in the mean captured step of the rank that has most of that: the others wait for
    it. What one rank does alone makes it a straggler. 0 on a rank without a function,
    and on GPUs (:func:`host_away_idle_ms`).
    """

    def over_steps(digest: RankDigest) -> float:
        idle = [step.budget.idle_ns for step in digest.complete_steps]
        judged = digest.judged_step.budget.idle_ns if digest.judged_step is not None else 0
        return sum(idle) / len(idle) / judged if idle and judged else 1.0

    return _script_times(run, over_steps, max)


@run_fact(unit="ms", scope="rank", needs=("host_ops", core_wait_frac, unexplained_idle_ms))
def script_code_running_ms(run: RunView) -> dict[str, Value]:
    """:func:`script_code_ms` on the rank that has least, without what waits for a core (``core_wait_frac``).

    All ranks run one script, so that the idle time of each counts. A thread that is taken off
    its core is stopped at any place of the step, outside operators too.
    """
    waits = core_wait_frac.by_rank(run)

    def running(digest: RankDigest) -> float:
        wait = waits[str(digest.rank)]
        return 1.0 - wait if isinstance(wait, float) else 1.0

    return _script_times(run, running, min)


def script_place(run: RunView, rank: int) -> CodePlace | None:
    """The place of a rank; where its trace has none, that of all steps with stacks."""
    digest = run.digest(rank)
    if not digest.is_cpu:
        return None
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    if run.source_steps and not any(one.file for one in of_trace):
        return common_place(run)
    return code_place(run, rank, 0.0, loading=False)


def _script_times(
    run: RunView, share: Callable[[RankDigest], float], of: Callable[[Iterable[float]], float]
) -> dict[str, Value]:
    quiet = []
    for digest in run.digests:
        idle_ms = unexplained_idle_ms.of(digest)
        if not isinstance(idle_ms, float | int):
            return {
                str(digest.rank): idle_ms if isinstance(idle_ms, Unknown) else NO_STEP
                for digest in run.digests
            }
        quiet.append(float(idle_ms) * share(digest))
    places = {str(digest.rank): script_place(run, digest.rank) for digest in run.digests}
    return {rank: min(place.time_ns / 1e6, of(quiet)) if place else 0.0 for rank, place in places.items()}


@run_fact(unit="bool", scope="rank", needs=("launches",))
def broadcasts_buffers(run: RunView) -> dict[str, Value]:
    """Whether the longest gaps of :func:`host_away_idle_ms` merge or split tensors in the forward pass.

    So does DDP when it broadcasts buffers, such as the statistics of batch norm, before each forward pass.
    """
    found: dict[str, Value] = {}
    for digest in run.digests:
        if digest.host_work is None:
            found[str(digest.rank)] = NO_STEP
            continue
        first = next(iter(digest.host_work.away), None)
        found[str(digest.rank)] = first is not None and FLATTENING in first.doing and "forward" in first.where
    return found


def places_in_idle_time(run: RunView, idle: RankFact[Any], *, loading: bool) -> dict[str, Value]:
    """The function of the script, in words, that shows half or more of each rank's idle time of one kind."""
    found: dict[str, Value] = {}
    for digest in run.digests:
        idle_ms = idle.of(digest)
        if isinstance(idle_ms, Unknown) or not isinstance(idle_ms, float | int):
            found[str(digest.rank)] = "none"
            continue
        place = code_place(run, digest.rank, float(idle_ms), loading=loading)
        found[str(digest.rank)] = str(place or "none")
    return found


# -- threads that run Python beside the one that trains


BUSY_BESIDE = 0.1
"""Threads that run less only report or watch."""


@run_fact(unit="text")
def background_code(run: RunView) -> Value:
    """The function of the script that other threads run for longest beside the training thread, or "none".

    From the steps with Python stacks: while the training thread is in no operator, and no C code runs there.
    """
    return str(needed(_longest(run)) or "none")


@run_fact(unit="ms", needs=(late_launch_idle_ms, unexplained_idle_ms))
def background_code_ms(run: RunView) -> Value:
    """How long a step the training thread may wait for the interpreter that :func:`background_code` holds.

    As long as that runs while no operator does in a step with stacks, and at most as long as the device is
    idle for its host, on a CPU without an operator, in the analysed step of the rank where that is longest.
    """
    place = needed(_longest(run))
    quiet = [
        (unexplained_idle_ms if digest.is_cpu else late_launch_idle_ms).of(digest) for digest in run.digests
    ]
    known = [float(ms) for ms in quiet if isinstance(ms, float | int)]
    if not known:
        return Unknown("no rank's idle time is known")
    return min(place.time_ns / 1e6, max(known)) if place is not None else 0.0


@manifest_fact(unit="text")
def busy_threads(rank: RankJob) -> Value:
    """Python threads beside the training one that ran for a tenth of the captured steps or more, or "none".

    With the share of the time for which each had a core, by its name; the busiest three.
    """
    machine = rank.machine
    if machine.loader is None or not machine.loader.wall_us:
        return Unknown("the manifest has no times of threads")
    shares = {name: us / machine.loader.wall_us for name, us in machine.threads.items()}
    busy = sorted((name for name in shares if shares[name] >= BUSY_BESIDE), key=lambda name: -shares[name])
    return ", ".join(f"{name} ({format_percent(shares[name])})" for name in busy[:3]) or "none"


FEWEST_ASKS = 50
"""Of fewer times in which the interpreter was asked for a share says little."""


@manifest_fact(unit="fraction")
def interpreter_held_frac(rank: RankJob) -> Value:
    """How often Python code held the interpreter for a switch interval (5 ms) when a thread asked for it.

    Of the times at which the collector's own thread woke in the job; what it waited for a core is left out.
    Operators of PyTorch give the interpreter away. Unknown where Python's threads need no lock.
    """
    asked, held = (rank.machine.interpreter.get(name, 0) for name in ("asked", "held"))
    if asked < FEWEST_ASKS:
        return Unknown("the interpreter was asked for too seldom, or it has no lock")
    return min(held / asked, 1.0)


def _longest(run: RunView) -> CodePlace | Unknown | None:
    if not run.source_steps:
        return NO_STACKS
    places = [place for _, step in sorted(run.source_steps.items()) for place in step.background]
    return max(places, key=lambda one: one.time_ns, default=None)
