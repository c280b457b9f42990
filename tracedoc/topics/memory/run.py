"""Facts of the run about GPU memory: how much was used, and what would fit that is not done today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracedoc.facts.catalog import digest_fact, manifest_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import Memory, RankJob
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.topics.capture.run import parameter_dtype, recorded, strategy_of
from tracedoc.topics.memory.rank import device_memory_bytes, peak_allocated_bytes
from tracedoc.topics.sharding.rank import (
    NOT_SHARDED,
    all_units_bytes,
    estimated_parameters,
    largest_unit_frac,
)
from tracedoc.values import Unknown, Value, needed, needed_number, once

if TYPE_CHECKING:
    from tracedoc.planner.measured import Fit

USABLE_SHARE = 0.92
"""The rest of a GPU's memory goes to the driver, to NCCL's buffers and to what the allocator cannot join."""

NO_MEMORY = Unknown("how much GPU memory was used is not known: capture with `tracedoc collect`")

_PLANNED = {"fsdp1": "full-shard", "fsdp2": "full-shard", "zero-3": "zero-3"}


@digest_fact(unit="fraction", needs=(device_memory_bytes, peak_allocated_bytes))
def tensor_memory_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Most GPU memory that tensors of torch took at once, since the job began, over that of the GPU.

    Allocated, not reserved: what torch's allocator holds without need is free to be used. NCCL's buffers,
    the driver and other libraries are not in it. From the manifest, else of the captured steps alone, where
    the profiler recorded memory. Of a CPU run it is what all ranks of a host took, over that of the host.
    """
    memory = _memory(run, digest)
    return memory.peak_allocated / memory.total if memory.total and memory.peak_allocated else NO_MEMORY


@digest_fact(unit="bytes", needs=("collectives", all_units_bytes, largest_unit_frac))
def gathered_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> float | Unknown:
    """What a GPU holds more if it keeps all units gathered between the passes: all of them but two.

    Two are there already, one in use and one fetched ahead.
    """
    total, largest = (needed_number(one.of(digest)) for one in (all_units_bytes, largest_unit_frac))
    return max(total * (1.0 - 2.0 * largest), 0.0)


@digest_fact(
    unit="bool",
    needs=("collectives", device_memory_bytes, peak_allocated_bytes, gathered_bytes),
)
def fits_gathered(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether the measured peak and ``gathered_bytes`` are at most 92 % of the GPU's memory."""
    memory, more = _memory(run, digest), needed(gathered_bytes(run, digest, step))
    if not memory.total or memory.peak_allocated is None:
        return NO_MEMORY
    return memory.peak_allocated + more <= USABLE_SHARE * memory.total


@digest_fact(
    unit="bytes",
    needs=("collectives", device_memory_bytes, estimated_parameters, parameter_dtype, peak_allocated_bytes),
)
def unsharded_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What a GPU holds more if nothing is sharded: all parameters, gradients and states of AdamW.

    By ``tracedoc plan``'s model of memory, from ``estimated_parameters``: 16 bytes a parameter where bf16 or
    fp16 parameters are gathered or they are gathered in fp32, less what the rank's shard takes today.
    """
    fit = _unsharded(run).get(digest.rank)
    if fit is None or fit.added_bytes is None:
        return NOT_SHARDED if fit is None else Unknown(fit.reason)
    return fit.added_bytes


@digest_fact(
    unit="bool",
    needs=("collectives", device_memory_bytes, estimated_parameters, parameter_dtype, peak_allocated_bytes),
)
def fits_unsharded(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether the measured peak and ``unsharded_bytes`` are at most 92 % of the GPU's memory."""
    fit = _unsharded(run).get(digest.rank)
    if fit is None or fit.fits is None:
        return NOT_SHARDED if fit is None else Unknown(fit.reason)
    return fit.fits


@once
def _unsharded(run: RunView) -> dict[int, Fit]:
    """Whether the GPU of each sharding rank would hold everything, by rank."""
    family, dtype = strategy_of(run).family, parameter_dtype(run)
    strategy = _PLANNED.get(family)
    if strategy is None:
        return {}
    from tracedoc.planner.measured import unsharded  # with all of the planner, which few runs ask

    found = {}
    for digest, _ in run.judged():
        parameters, memory = estimated_parameters.of(digest), _memory(run, digest)
        if digest.units is None:
            continue
        found[digest.rank] = unsharded(
            strategy,
            parameters=parameters if isinstance(parameters, int) else None,
            gpus=run.world_size or len(run.digests),
            memory_bytes=USABLE_SHARE * memory.total if memory.total else None,
            peak_bytes=memory.peak_allocated,
            precision="fp32" if dtype == "float32" else "bf16-mixed",
        )
    return found


def _memory(run: RunView, digest: RankDigest) -> Memory:
    """The memory of a rank's GPU and its peak: from the manifest, else as the profiler recorded it."""
    entry = run.job.rank(digest.rank)
    if digest.is_cpu:
        if entry is None:
            return Memory()
        peaks = [one.memory.host_peak or 0 for one in run.job.ranks if one.host == entry.host]
        return Memory(entry.memory.host_total, peak_allocated=sum(peaks) if all(peaks) else None)
    if entry is not None and entry.memory.total and entry.memory.peak_allocated is not None:
        return entry.memory
    total, peak = device_memory_bytes.of(digest), peak_allocated_bytes.of(digest)
    return Memory(
        total=total if isinstance(total, int) else None,
        peak_allocated=peak if isinstance(peak, int) else None,
    )


# -- the whole job


@manifest_fact(unit="count")
def allocation_retries(rank: RankJob) -> Value:
    """How often the allocator had to free everything it kept and try again, since the job began."""
    return recorded(rank.memory.retries, "the manifest has no GPU memory")


@manifest_fact(unit="bool")
def expandable_segments(rank: RankJob) -> Value:
    """Whether torch's allocator lets its segments grow, by the variables that set it."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return any("expandable_segments:true" in rank.variables.get(name, "").lower() for name in names)
