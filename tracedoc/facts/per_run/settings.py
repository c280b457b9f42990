"""Facts from the manifest: settings, memory, the environment, and steps without the profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tracedoc.errors import Limit
from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.run.manifest import StepTime
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value

NO_MANIFEST = Unknown("no manifest: capture with `tracedoc collect`")

STEPS_FOR_MEDIAN = 5
"""The median of fewer timed steps is not compared."""

ENOUGH_PERIODS = 5
"""A share of fewer scheduler periods says nothing."""

DEFAULT_QUEUES = 8
"""Of CUDA, where ``CUDA_DEVICE_MAX_CONNECTIONS`` is not set."""

LASTING_SLOWDOWN = 0.02
"""A job that is this much slower after the capture than before has not recovered from it."""


def by_rank(run: RunView, measure: Callable[[RankJob], Value]) -> dict[str, Value]:
    """Return the value of ``measure`` for each captured rank's part of the manifest."""
    if run.job is None:
        return {str(digest.rank): NO_MANIFEST for digest in run.digests}
    values: dict[str, Value] = {}
    for digest in run.digests:
        rank = run.job.rank(digest.rank)
        values[str(digest.rank)] = measure(rank) if rank is not None else NO_MANIFEST
    return values


def _known(value: int | float | bool | str | None, reason: str) -> Value:
    return Unknown(reason) if value is None or value == "" else value


# -- the profiler's own cost


@run_fact(unit="ms", scope="rank")
def unprofiled_step_ms(run: RunView) -> dict[str, Value]:
    """Median time of a step without the profiler, by the host's clock.

    Of up to ten steps before the recorded ones and ten after: the mean of the two medians, weighted by their
    steps. Unknown with fewer than five steps in all.
    """
    return by_rank(run, _unprofiled)


def _unprofiled(rank: RankJob) -> Value:
    timed = [time for time in (rank.before, rank.after) if time is not None]
    steps = sum(time.steps for time in timed)
    if steps < STEPS_FOR_MEDIAN:
        return Unknown(f"{steps} steps were timed without the profiler, fewer than {STEPS_FOR_MEDIAN}")
    return sum(time.median_ms * time.steps for time in timed) / steps


@run_fact(unit="fraction", scope="rank")
def profiler_overhead_frac(run: RunView) -> dict[str, Value]:
    """How much longer a recorded step is than one without the profiler, by the host's clock; 0 if it is not.

    The median recorded step / ``unprofiled_step_ms`` - 1.
    """
    return by_rank(run, _overhead)


def _overhead(rank: RankJob) -> Value:
    usual = _unprofiled(rank)
    if isinstance(usual, Unknown):
        return usual
    if rank.during is None:
        return Unknown("the recorded steps were not timed")
    return max(rank.during.median_ms / float(usual) - 1.0, 0.0)


def job_limits(run: RunView) -> list[Limit]:
    """Return the limit for a job that stayed slower after the capture, by its own step times.

    It is given where the median of the steps afterwards is above that before by 2 % on every rank: the ranks
    of a job step together, and one alone is noise.
    """
    if run.job is None:
        return []
    pairs = [
        (rank.before, rank.after)
        for rank in run.job.ranks
        if rank.before is not None and rank.after is not None
    ]
    shares = sorted(
        after.median_ms / before.median_ms - 1.0 for before, after in pairs if _enough(before, after)
    )
    if not shares or shares[0] <= LASTING_SLOWDOWN:
        return []
    middle = shares[(len(shares) - 1) // 2]
    return [
        Limit(
            "slower-after-capture",
            f"steps took {format_percent(middle)} longer after the capture than before it",
            "the profiler may still cost the job time, or its later steps are other ones",
        )
    ]


def _enough(before: StepTime, after: StepTime) -> bool:
    return before.steps >= STEPS_FOR_MEDIAN and after.steps >= STEPS_FOR_MEDIAN and before.median_ms > 0


# -- memory


@run_fact(unit="bytes", scope="rank")
def job_peak_memory_bytes(run: RunView) -> dict[str, Value]:
    """Most GPU memory that torch's allocator held at once, since the job began.

    Reserved, not allocated: what is held is not free for others. NCCL's buffers are not in it.
    """
    return by_rank(run, lambda rank: _known(rank.memory.peak_reserved, "the manifest has no GPU memory"))


@run_fact(unit="fraction", scope="rank")
def job_peak_memory_frac(run: RunView) -> dict[str, Value]:
    """``job_peak_memory_bytes`` / the memory of the GPU, as the driver reports it."""
    return by_rank(run, _peak_share)


def _peak_share(rank: RankJob) -> Value:
    if not rank.memory.total or rank.memory.peak_reserved is None:
        return Unknown("the manifest has no GPU memory")
    return rank.memory.peak_reserved / rank.memory.total


@run_fact(unit="bytes", scope="rank")
def memory_headroom_bytes(run: RunView) -> dict[str, Value]:
    """Memory of the GPU that was never allocated by torch: total - peak allocated.

    An upper bound: other libraries, other processes and fragmentation need some of it.
    """
    return by_rank(run, _headroom)


def _headroom(rank: RankJob) -> Value:
    if not rank.memory.total or rank.memory.peak_allocated is None:
        return Unknown("the manifest has no GPU memory")
    return max(rank.memory.total - rank.memory.peak_allocated, 0)


@run_fact(unit="count", scope="rank")
def allocation_retries(run: RunView) -> dict[str, Value]:
    """How often the allocator had to free everything it kept and try again, since the job began."""
    return by_rank(run, lambda rank: _known(rank.memory.retries, "the manifest has no GPU memory"))


# -- settings


@run_fact(unit="count", scope="rank")
def loader_workers(run: RunView) -> dict[str, Value]:
    """``num_workers`` of the data loader; of several loaders, of the one with most."""
    return by_rank(run, lambda rank: _known(rank.loader.workers, _NO_LOADER))


@run_fact(unit="count", scope="rank")
def loader_prefetch_factor(run: RunView) -> dict[str, Value]:
    """``prefetch_factor`` of that data loader, batches made ahead by each worker; unknown without workers."""
    return by_rank(run, lambda rank: _known(rank.loader.prefetch_factor, _NO_LOADER))


@run_fact(unit="bool", scope="rank")
def loader_pins_memory(run: RunView) -> dict[str, Value]:
    """Whether that data loader copies its batches to pinned memory."""
    return by_rank(run, lambda rank: _known(rank.loader.pin_memory, _NO_LOADER))


_NO_LOADER = "the manifest has no DataLoader"


@run_fact(unit="bytes", scope="rank")
def ddp_bucket_bytes(run: RunView) -> dict[str, Value]:
    """``bucket_cap_mb`` of DistributedDataParallel, in bytes."""
    return by_rank(run, lambda rank: _known(rank.buckets.cap_bytes, _NO_DDP))


@run_fact(unit="bool", scope="rank")
def ddp_finds_unused(run: RunView) -> dict[str, Value]:
    """``find_unused_parameters`` of DistributedDataParallel."""
    return by_rank(run, lambda rank: _known(rank.buckets.find_unused_parameters, _NO_DDP))


_NO_DDP = "the manifest has no DistributedDataParallel"


@run_fact(unit="text", scope="rank")
def nccl_transports(run: RunView) -> dict[str, Value]:
    """Ways by which NCCL joins the ranks, with the channels of each, as ``P2P/CUMEM x48, NET/IB x4``."""
    return by_rank(run, _transports)


def _transports(rank: RankJob) -> Value:
    ways = ", ".join(f"{way} x{count}" for way, count in sorted(rank.links.items(), key=lambda one: -one[1]))
    return _known(ways, "no NCCL log: collect with --nccl-log")


@run_fact(unit="text")
def values_read_in(run: RunView) -> Value:
    """Functions of the script that read values of tensors, as ``train.py:12 (step) .item() x2``.

    From the step that the first rank of a collected run records with Python stacks; those with most calls.
    The line is that where the function begins; in code that runs since before that step, about where it was.
    Reading a tensor on the CPU waits for nothing, and the stacks do not show where a tensor is.
    """
    if not run.source_steps:
        return Unknown("no step was recorded with Python stacks: capture with `tracedoc collect`")
    asking = run.source_steps[min(run.source_steps)].asking[:3]
    lines = [f"{at.file}:{at.line} ({at.function}) .{at.call}() x{at.calls}" for at in asking]
    return ", ".join(lines) or "none"


# -- the host and the GPU during the capture


@run_fact(unit="fraction", scope="rank")
def cpu_throttled_frac(run: RunView) -> dict[str, Value]:
    """Share of the scheduler's periods of the capture in which the container had used up its CPU quota.

    From cgroup's ``nr_throttled`` / ``nr_periods``, so of all processes in the container; a period is mostly
    100 ms. Unknown in a group without a quota.
    """
    return by_rank(run, _cpu_throttled)


def _cpu_throttled(rank: RankJob) -> Value:
    periods = rank.counters.get("cgroup.cpu.nr_periods", 0)
    if periods < ENOUGH_PERIODS:
        return Unknown("no CPU quota, or it was seen for too short a time")
    return rank.counters.get("cgroup.cpu.nr_throttled", 0) / periods


@run_fact(unit="fraction", scope="rank")
def core_wait_frac(run: RunView) -> dict[str, Value]:
    """Share of the time in which the rank's training thread could run that it waited for a free core.

    From the Linux scheduler (schedstat), over captured steps: waited / (ran + waited). Time in which the
    thread sleeps or waits for data is in neither. Unknown where the kernel does not count it.
    """
    return by_rank(run, _core_wait_share)


def _core_wait_share(rank: RankJob) -> Value:
    thread = rank.training_thread
    could = thread.get("ran_us", 0) + thread.get("waited_us", 0)
    return thread.get("waited_us", 0) / could if could > 0 else _NO_CORE_WAIT


@run_fact(unit="ms", scope="rank")
def core_wait_ms(run: RunView) -> dict[str, Value]:
    """Time that the rank's training thread waited for a free core in a captured step, on average."""
    return by_rank(run, _core_wait)


def _core_wait(rank: RankJob) -> Value:
    thread = rank.training_thread
    steps, waited = thread.get("steps", 0), thread.get("waited_us")
    return waited / 1000 / steps if steps > 0 and waited is not None else _NO_CORE_WAIT


_NO_CORE_WAIT = Unknown("whether processes share cores is not known: the manifest has no times of threads")


@run_fact(unit="text", scope="rank")
def gpu_throttled_by(run: RunView) -> dict[str, Value]:
    """Why the GPU's clocks were lowered during the capture, with the share of samples, or "nothing".

    Sampled from NVML ten times a second. A power cap is ordinary under full load.
    """
    return by_rank(run, _gpu_throttled)


def _gpu_throttled(rank: RankJob) -> Value:
    if not rank.clocks_sampled:
        return Unknown("the GPU's clocks were not sampled (pynvml is not installed)")
    worst = sorted(rank.throttled.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{reason} {format_percent(share)}" for reason, share in worst) or "nothing"


SLOWDOWNS = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
"""Reasons for lower clocks that are no ordinary ones: heat, and power that the machine could not give."""


@run_fact(unit="fraction", scope="rank")
def gpu_slowed_frac(run: RunView) -> dict[str, Value]:
    """Share of the capture's samples in which heat or a power brake lowered the GPU's clocks.

    The largest share of one reason, of samples taken ten times a second; a power cap, which is ordinary under
    full load, is none of them.
    """

    def slowed(rank: RankJob) -> Value:
        if not rank.clocks_sampled:
            return Unknown("the GPU's clocks were not sampled (pynvml is not installed)")
        return max((share for reason, share in rank.throttled.items() if reason in SLOWDOWNS), default=0.0)

    return by_rank(run, slowed)


# -- the environment


@run_fact(unit="count", scope="rank")
def hardware_queues(run: RunView) -> dict[str, Value]:
    """``CUDA_DEVICE_MAX_CONNECTIONS``: queues by which streams reach the GPU; 8 where it is not set."""

    def queues(rank: RankJob) -> Value:
        value = rank.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip()
        return int(value) if value.isdecimal() and len(value) < 6 else DEFAULT_QUEUES

    return by_rank(run, queues)


class _Debugging(NamedTuple):
    name: str
    holds: Callable[[str], bool]
    harmless: Callable[[RunView, RankJob], bool]


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _one_rank(run: RunView, rank: RankJob) -> bool:
    return (run.world_size or rank.world_size) == 1


def _one_host(run: RunView, rank: RankJob) -> bool:
    hosts = {rank.host for rank in run.job.ranks} if run.job is not None else set()
    everyone = len(run.digests) == (run.world_size or rank.world_size)
    return _one_rank(run, rank) or (everyone and len(hosts) == 1)


def _no_peer_access(run: RunView, rank: RankJob) -> bool:
    # GeForce RTX 40 cards have no peer access; launchers switch it off for them.
    return _one_rank(run, rank) or re.search(r"RTX 40\d\d", rank.gpu) is not None


def _no_infiniband(run: RunView, rank: RankJob) -> bool:
    """Whether another network takes its place: on one host none is used, in some clouds it is libfabric."""
    variables = rank.variables
    plugin = (variables.get("FI_PROVIDER", ""), variables.get("NCCL_NET_PLUGIN", ""), rank.network)
    return _one_host(run, rank) or any(re.search(r"efa|ofi|libfabric|gIB|tcpx", one, re.I) for one in plugin)


def _never(run: RunView, rank: RankJob) -> bool:
    return False


_DEBUGGING = (
    _Debugging("CUDA_LAUNCH_BLOCKING", _is_on, _never),
    _Debugging("HIP_LAUNCH_BLOCKING", _is_on, _never),
    _Debugging("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _never),
    _Debugging("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", _one_rank),
    _Debugging("NCCL_DEBUG", lambda value: value.upper() == "TRACE", _one_rank),
    _Debugging("NCCL_P2P_DISABLE", _is_on, _no_peer_access),
    _Debugging("NCCL_SHM_DISABLE", _is_on, _one_rank),
    _Debugging("NCCL_IB_DISABLE", _is_on, _no_infiniband),
    _Debugging("NCCL_BLOCKING_WAIT", _is_on, _one_rank),
    _Debugging("TORCH_NCCL_BLOCKING_WAIT", _is_on, _one_rank),
)
"""Debugging settings that cost speed. The collector sets none of them."""


@run_fact(unit="text")
def debug_settings(run: RunView) -> Value:
    """Environment variables for debugging that cost speed, as ``CUDA_LAUNCH_BLOCKING=1``, or "none".

    Left out where they change nothing: peer access on cards without it, InfiniBand on one host or where
    libfabric takes its place, NCCL's in a world of one.
    """
    found = _settings(run)
    return found if isinstance(found, Unknown) else ", ".join(found) or "none"


@run_fact(unit="count")
def debug_settings_count(run: RunView) -> Value:
    """How many such variables are set on any rank."""
    found = _settings(run)
    return found if isinstance(found, Unknown) else len(found)


def _settings(run: RunView) -> list[str] | Unknown:
    if run.job is None:
        return NO_MANIFEST
    return list(dict.fromkeys(_settings_of_ranks(run, run.job.ranks)))


def _settings_of_ranks(run: RunView, ranks: Iterable[RankJob]) -> Iterable[str]:
    for rank in ranks:
        for setting in _DEBUGGING:
            value = rank.variables.get(setting.name)
            if value is not None and setting.holds(value) and not setting.harmless(run, rank):
                yield f"{setting.name}={value}"
