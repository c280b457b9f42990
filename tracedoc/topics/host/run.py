"""Facts of the run about what the host did while the device was idle, and where in the script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from tracedoc.facts.catalog import RankFact, job_of, manifest_fact, ranks_fact, run_fact
from tracedoc.ranks.code_places import code_place, common_place
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.source_step import SourceLine
from tracedoc.run.job import RankJob
from tracedoc.step.host_work import AwayTotal, HostDigest, SyncTotal
from tracedoc.step.rank_digest import RankDigest
from tracedoc.timeline.host import PHASES
from tracedoc.timeline.script_code import CodePlace
from tracedoc.timeline.syncs import SPELLINGS
from tracedoc.topics.capture.run import compiled, recorded, strategy_of
from tracedoc.topics.host.rank import (
    between_operators_ms,
    host_away_idle_ms,
    late_launch_idle_ms,
    script_pause_ms,
    unexplained_idle_ms,
)
from tracedoc.topics.step.rank import NO_STEP
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed, needed_number, once

NO_STACKS = Unknown("no step was recorded with Python stacks: capture with `tracedoc collect`")


@ranks_fact(unit="ms", needs=("launches",))
def optimizer_idle_ms(run: RunView, digest: RankDigest) -> Value:
    """Late-launch idle time of the median step while the host is inside ``Optimizer.step``."""
    return needed(_host(digest)).of("optimizer") / 1e6


@ranks_fact(unit="ms", needs=("launches",))
def queued_idle_ms(run: RunView, digest: RankDigest) -> Value:
    """Idle time of the median step with the next event launched already: dependencies, launch latency.

    Gaps inside a CUDA graph are here. Much of it means that the trace lost kernels.
    """
    return needed(_host(digest)).of("dependency") / 1e6


@ranks_fact(unit="text", needs=("launches",))
def sync_call(run: RunView, digest: RankDigest) -> Value:
    """What asks for the waits that cost the median step most idle time, as scripts write it: ``.item()``.

    Of an operator that is not written in one way, and of a call outside any, it is the name. Waits of one
    operator at one place count together.
    """
    operator = needed(_costly(digest))[0].operator
    return SPELLINGS.get(operator, operator)


@ranks_fact(unit="text", needs=("launches",))
def sync_place(run: RunView, digest: RankDigest) -> Value:
    """Where the waits of :func:`sync_call` are.

    The innermost function outside torch if the capture has stacks (with its first line), else the range that
    a person or framework named, else the phase of the step.
    """
    first = needed(_costly(digest))[0]
    found = first.line or first.where
    return Unknown("nothing shows in which phase of the step it is") if found == PHASES[0] else found


@ranks_fact(unit="count", needs=("launches",))
def sync_call_waits(run: RunView, digest: RankDigest) -> Value:
    """Waits of :func:`sync_call` in the median step."""
    return needed(_costly(digest))[0].count


@ranks_fact(unit="count", needs=("launches",))
def sync_places(run: RunView, digest: RankDigest) -> Value:
    """Operators and places whose waits leave the GPU idle in the median step."""
    return len(needed(_costly(digest)))


@ranks_fact(unit="text", needs=("launches", host_away_idle_ms))
def host_away_operator(run: RunView, digest: RankDigest) -> Value:
    """The operator in which the host is for longest in the gaps of :func:`host_away_idle_ms`.

    "Python" where it is longer in no operator. Gaps in one phase of the step count together.
    """
    return needed(_gaps(digest))[0].doing


@ranks_fact(unit="text", needs=("launches", host_away_idle_ms), values=PHASES)
def host_away_phase(run: RunView, digest: RankDigest) -> Value:
    """Where in the step the gaps of :func:`host_away_operator` are.

    "the forward pass", "between forward and backward", "the backward pass", "between backward and optimizer",
    "the optimizer", "between two steps"; else "an unknown phase".
    """
    return needed(_gaps(digest))[0].where


def _host(digest: RankDigest) -> HostDigest | Unknown:
    """What a rank's host did in its analysed step."""
    return digest.host_work or NO_STEP


def _costly(digest: RankDigest) -> list[SyncTotal] | Unknown:
    """A rank's waits that leave the GPU idle, the most costly first."""
    costly = [total for total in needed(_host(digest)).syncs if total.idle_ns]
    return costly or Unknown("no wait of the step leaves the GPU idle")


def _gaps(digest: RankDigest) -> tuple[AwayTotal, ...] | Unknown:
    """The gaps in which a rank's host launches nothing, the longest first."""
    gaps = needed(_host(digest)).away
    needed(host_away_idle_ms.of(digest))
    return gaps or Unknown("the host is never away for long")


# -- compilation


@ranks_fact(unit="count", needs=(compiled,))
def recompile_limit_hits(run: RunView, digest: RankDigest) -> Value:
    """How often torch.compile gave a function up since the job began, having compiled it too often already.

    From Dynamo's own counters. By default it compiles a function eight times; what needs another version
    runs uncompiled from then on. 0 without a manifest where no compiled code runs.
    """
    if not run.job.ranks and not compiled(run):
        return 0
    return needed(job_of(run, digest)).compiled.get("recompile_limit_hits", 0)


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


OWN_MESSAGES = 0.5
"""A function is named for a step's collectives of which it calls so many itself."""


@run_fact(unit="text")
def exchange_code(run: RunView) -> Value:
    """The function of the script that calls half or more of a step's collectives itself, else "none".

    Where no wrapper as DDP does: a script that averages gradients or parameters by hand. From the same step
    as :func:`item_call_sites`; what is counted is that of :func:`barrier_code`.
    """
    sites = needed(_calling(run, meets=True))
    digest = run.representative_digest
    if not sites or digest is None or strategy_of(run).family != "unknown":
        return "none"
    numbers = [one.index for one in digest.complete_steps]
    calls = median([int((digest.collectives.step == one).sum()) for one in numbers]) if numbers else 0
    return str(sites[0].place) if sites[0].calls >= OWN_MESSAGES * calls > 0 else "none"


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
    return rank.core_wait_ms if rank.core_wait_ms is not None else _NO_CORE_WAIT


@manifest_fact(unit="count")
def operator_threads(rank: RankJob) -> Value:
    """Threads that torch uses for one operator on the CPU (``torch.get_num_threads()``)."""
    return recorded(rank.threads, "the manifest has no threads")


@ranks_fact(unit="count")
def fair_threads(run: RunView, digest: RankDigest) -> Value:
    """Threads for one operator with which each rank on a rank's cores has a core for each, at least 1.

    Ranks of a host that name the same cores share them.
    """
    return run.job.fair_cores.get(digest.rank) or Unknown("the manifest has no cores")


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


@ranks_fact(unit="text", needs=("launches", host_away_idle_ms))
def host_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script in which the host is for half of :func:`host_away_idle_ms` or more.

    From the same sources as :func:`loader_code`; "none" where they show none.
    """
    return place_in_idle_time(run, digest, host_away_idle_ms, loading=False)


@ranks_fact(unit="text", needs=("host_ops",))
def script_code(run: RunView, digest: RankDigest) -> Value:
    """The function of the script in which the host of a CPU run is longest outside operators, or "none".

    From the same sources as :func:`loader_code`; all ranks run one script, so that what the steps with stacks
    show counts for those whose own trace shows nothing, if each rank whose step was read is in that function.
    """
    return str(script_place(run, digest.rank) or "none")


@ranks_fact(unit="bool", needs=("host_ops",))
def script_code_trains(run: RunView, digest: RankDigest) -> Value:
    """Whether :func:`script_code` calls the model or an optimizer itself: its own lines take the time."""
    place = script_place(run, digest.rank)
    return place is not None and place.trains


@ranks_fact(unit="ms", needs=("host_ops", unexplained_idle_ms))
def script_code_ms(run: RunView, digest: RankDigest) -> Value:
    """Time of a step in which no operator runs because the host is in :func:`script_code`, at most.

    As long as the function took in the steps with stacks, on the rank where it was shortest, and at most as
    long as no operator runs in the mean captured step of the rank that has most of that: the others wait for
    it. What one rank does alone makes it a straggler. 0 on a rank without a function,
    and on GPUs (:func:`host_away_idle_ms`).
    """
    return _script_ms(run, digest, needed(_quiet_ms(run)), max)


@ranks_fact(unit="ms", needs=("host_ops", core_wait_frac, unexplained_idle_ms))
def script_code_running_ms(run: RunView, digest: RankDigest) -> Value:
    """:func:`script_code_ms` on the rank that has least, without what waits for a core (``core_wait_frac``).

    All ranks run one script, so that the idle time of each counts. A thread that is taken off
    its core is stopped at any place of the step, outside operators too.
    """
    return _script_ms(run, digest, needed(_running_ms(run)), min)


@once
def _quiet_ms(run: RunView) -> list[float] | Unknown:
    """How long no operator of each rank runs in its mean captured step."""

    def over_steps(digest: RankDigest) -> float:
        idle = [step.budget.idle_ns for step in digest.complete_steps]
        judged = digest.judged_step.budget.idle_ns if digest.judged_step is not None else 0
        return sum(idle) / len(idle) / judged if idle and judged else 1.0

    return [needed_number(unexplained_idle_ms.of(one)) * over_steps(one) for one in run.digests]


@once
def _running_ms(run: RunView) -> list[float] | Unknown:
    """How long no operator of each rank runs in its analysed step, without what waits for a core."""
    waits = [1.0 - wait if isinstance(wait, float) else 1.0 for wait in core_wait_frac.by_rank(run).values()]
    idle = [needed_number(unexplained_idle_ms.of(one)) for one in run.digests]
    return [ms * share for ms, share in zip(idle, waits, strict=True)]


MOST_BETWEEN = 0.5
"""A function is named for the time between operators of which it has so much."""


@ranks_fact(
    unit="text", needs=("host_ops", script_code, script_code_ms, script_pause_ms, between_operators_ms)
)
def between_code(run: RunView, digest: RankDigest) -> Value:
    """The function in which most of :func:`between_operators_ms` lies: :func:`script_code`, or "none".

    What the function takes beyond all pauses (:func:`script_pause_ms`) lies between operators.
    """
    own = needed_number(script_code_ms(run, digest)) - needed_number(script_pause_ms.of(digest))
    most = own >= MOST_BETWEEN * needed_number(between_operators_ms.of(digest)) > 0
    return script_code(run, digest) if most else "none"


def script_place(run: RunView, rank: int) -> CodePlace | None:
    """The place of a rank; where its trace has none, that of all steps with stacks."""
    digest = run.digest(rank)
    if not digest.is_cpu:
        return None
    of_trace = digest.host_work.code if digest.host_work is not None else ()
    if run.source_steps and not any(one.file for one in of_trace):
        return common_place(run)
    return code_place(run, rank, 0.0, loading=False)


def _script_ms(
    run: RunView, digest: RankDigest, quiet_ms: list[float], of: Callable[[Iterable[float]], float]
) -> float:
    place = script_place(run, digest.rank)
    return min(place.time_ns / 1e6, of(quiet_ms)) if place else 0.0


@ranks_fact(unit="bool", needs=("launches",))
def broadcasts_buffers(run: RunView, digest: RankDigest) -> Value:
    """Whether the longest gaps of :func:`host_away_idle_ms` merge or split tensors in the forward pass.

    So does DDP when it broadcasts buffers, such as the statistics of batch norm, before each forward pass.
    """
    first = next(iter(needed(_host(digest)).away), None)
    return first is not None and FLATTENING in first.doing and "forward" in first.where


def place_in_idle_time(run: RunView, digest: RankDigest, idle: RankFact[Any], *, loading: bool) -> str:
    """The function of the script, in words, that shows half or more of a rank's idle time of one kind."""
    idle_ms = idle.of(digest)
    if not isinstance(idle_ms, float | int):
        return "none"
    return str(code_place(run, digest.rank, float(idle_ms), loading=loading) or "none")


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
