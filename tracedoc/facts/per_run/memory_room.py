"""Facts about the room in GPU memory: how much was used, and what would fit that is not done today."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_run.strategy import parameter_dtype, strategy_of
from tracedoc.planner.fitting import Fit, KnownRun, what_fits
from tracedoc.ranks.run_view import RunView, once
from tracedoc.run.job import Memory
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.values import Unknown, Value

USABLE_SHARE = 0.92
"""The rest of a GPU's memory goes to the driver, to NCCL's buffers and to what the allocator cannot join."""

NO_MEMORY = Unknown("how much GPU memory was used is not known: capture with `tracedoc collect`")
NOT_SHARDED = Unknown("no parameters are gathered by FSDP or ZeRO-3 in this trace")

_PLANNED = {"fsdp1": "full-shard", "fsdp2": "full-shard", "zero-3": "zero-3"}


@run_fact("tensor_memory_frac", unit="fraction", scope="rank")
def tensor_memory_frac(run: RunView) -> dict[str, Value]:
    """Most GPU memory that tensors of torch took at once, since the job began, over that of the GPU.

    Allocated, not reserved: what torch's allocator holds without need is free to be used. NCCL's buffers,
    the driver and other libraries are not in it. From the manifest, else of the captured steps alone, where
    the profiler recorded memory.
    """
    return run.by_rank(lambda digest, step: _used_share(run, digest))


@run_fact("usable_memory_bytes", unit="bytes", scope="rank")
def usable_memory_bytes(run: RunView) -> dict[str, Value]:
    """92 % of the GPU's memory: the driver, NCCL and fragmentation take the rest."""

    def usable(digest: RankDigest, step: StepDigest) -> Value:
        memory = _memory(run, digest)
        return USABLE_SHARE * memory.total if memory.total else NO_MEMORY

    return run.by_rank(usable)


@run_fact("gathered_bytes", unit="bytes", scope="rank", needs=("collectives",))
def gathered_bytes(run: RunView) -> dict[str, Value]:
    """What a GPU holds more if it keeps all units gathered between the passes: all of them but two.

    Two are there already, one in use and one fetched ahead.
    """
    return run.by_rank(lambda digest, step: _gathered(digest))


@run_fact("fits_gathered", unit="bool", scope="rank", needs=("collectives",))
def fits_gathered(run: RunView) -> dict[str, Value]:
    """Whether the measured peak and ``gathered_bytes`` are at most ``usable_memory_bytes``."""

    def fits(digest: RankDigest, step: StepDigest) -> Value:
        memory, more = _memory(run, digest), _gathered(digest)
        if isinstance(more, Unknown):
            return more
        if not memory.total or memory.peak_allocated is None:
            return NO_MEMORY
        return memory.peak_allocated + float(more) <= USABLE_SHARE * memory.total

    return run.by_rank(fits)


@run_fact("unsharded_bytes", unit="bytes", scope="rank", needs=("collectives",))
def unsharded_bytes(run: RunView) -> dict[str, Value]:
    """What a GPU holds more if nothing is sharded: all parameters, gradients and states of AdamW.

    By ``tracedoc plan``'s model of memory, from ``estimated_parameters``: 16 bytes a parameter where bf16 or
    fp16 parameters are gathered or they are gathered in fp32, less what the rank's shard takes today.
    """

    def added(digest: RankDigest, step: StepDigest) -> Value:
        fit = _unsharded(run).get(digest.rank)
        if fit is None or fit.added_bytes is None:
            return NOT_SHARDED if fit is None else Unknown(fit.reason)
        return fit.added_bytes

    return run.by_rank(added)


@run_fact("fits_unsharded", unit="bool", scope="rank", needs=("collectives",))
def fits_unsharded(run: RunView) -> dict[str, Value]:
    """Whether the measured peak and ``unsharded_bytes`` are at most ``usable_memory_bytes``."""

    def fits(digest: RankDigest, step: StepDigest) -> Value:
        fit = _unsharded(run).get(digest.rank)
        if fit is None or fit.fits is None:
            return NOT_SHARDED if fit is None else Unknown(fit.reason)
        return fit.fits

    return run.by_rank(fits)


@once
def _unsharded(run: RunView) -> dict[int, Fit]:
    """Return for each sharding rank whether its GPU would hold everything."""
    family, dtype = strategy_of(run).family, parameter_dtype(run)
    strategy = _PLANNED.get(family)
    found = {}
    for digest, _ in run.judged():
        parameters, memory = digest.facts.get("estimated_parameters"), _memory(run, digest)
        if digest.units is None or strategy is None:
            continue
        found[digest.rank] = what_fits(
            KnownRun(
                parameters=parameters if isinstance(parameters, int) else None,
                gpus=run.world_size or len(run.digests),
                memory_bytes=USABLE_SHARE * memory.total if memory.total else None,
                peak_bytes=memory.peak_allocated,
                strategy=strategy,
                precision="fp32" if dtype == "float32" else "bf16-mixed",
            ),
            "do-not-shard",
        )
    return found


def _gathered(digest: RankDigest) -> Value:
    total, largest = digest.facts.get("all_units_bytes"), digest.facts.get("largest_unit_frac")
    if not isinstance(total, (int, float)) or not isinstance(largest, float):
        return total if isinstance(total, Unknown) else NOT_SHARDED
    return max(float(total) * (1.0 - 2.0 * largest), 0.0)


def _used_share(run: RunView, digest: RankDigest) -> Value:
    memory = _memory(run, digest)
    return memory.peak_allocated / memory.total if memory.total and memory.peak_allocated else NO_MEMORY


def _memory(run: RunView, digest: RankDigest) -> Memory:
    """Return the memory of a rank's GPU and its peak: from the manifest, else as the profiler recorded it."""
    entry = run.job.rank(digest.rank) if run.job is not None else None
    if entry is not None and entry.memory.total and entry.memory.peak_allocated is not None:
        return entry.memory
    total, peak = (digest.facts.get(name) for name in ("device_memory_bytes", "peak_allocated_bytes"))
    return Memory(
        total=total if isinstance(total, int) else None,
        peak_allocated=peak if isinstance(peak, int) else None,
    )
