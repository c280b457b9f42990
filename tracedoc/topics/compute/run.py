"""Facts of the run about its compute: matrix work, and what half of the GPUs would keep of the throughput."""

from __future__ import annotations

from tracedoc.facts.catalog import digest_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.topics.capture.run import strategy_of
from tracedoc.topics.communication.run import comm_split, exposed_comm_excluding_wait_ms
from tracedoc.topics.host.run import time_of_work
from tracedoc.topics.memory.run import tensor_memory_frac
from tracedoc.values import Unknown, Value

REPLICAS = frozenset({"ddp", "zero-1"})
"""Strategies that reduce gradients once for several micro-batches, and hold all parameters on every rank."""

SHARDS = frozenset({"fsdp1", "fsdp2", "zero-2", "zero-3"})

HALF = 0.45
"""With at most this share of the memory in use twice of everything fits, and 10 % is left for the rest."""


@run_fact(unit="ms", scope="rank", needs=("kernels",))
def matrix_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step in which a matrix product, convolution or attention kernel runs (union)."""
    return time_of_work(run, "matrix")


@digest_fact(
    unit="fraction",
    needs=("kernels", "collectives", comm_split, exposed_comm_excluding_wait_ms, tensor_memory_frac),
)
def half_gpus_throughput_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What half of the GPUs would at least keep of the job's throughput, with the same global batch.

    Each of them then has twice the samples. As two micro-batches, all of today's step happens twice but for
    the exposed communication less known waiting, which happens once: ``step / (2 step - exposed)``. As one
    micro-batch of twice the size, only compute doubles at most: ``step / (step + compute)``; this counts
    where less than 45 % of the GPU's memory is in use. Sharded jobs gather for each micro-batch, so only the
    second counts. Fewer ranks make no collective slower.

    Unknown where more than data parallelism splits the job, and where waiting cannot be told from transfer.
    """
    family, split = strategy_of(run).family, comm_split(run)
    if family not in REPLICAS | SHARDS:
        return Unknown("only jobs whose ranks are replicas, or shards of one, are compared")
    if split != "transfer":
        return Unknown("transfer cannot be told from waiting for other ranks")
    apart = exposed_comm_excluding_wait_ms(run, digest, step)
    used = tensor_memory_frac(run, digest, step)
    if isinstance(apart, Unknown | str):
        return apart
    length = step.budget.window_ns
    twice = length + step.budget.compute_ns
    roomy = isinstance(used, float) and used < HALF
    if family in REPLICAS:
        accumulated = 2 * length - float(apart) * 1e6
        return length / (min(twice, accumulated) if roomy else accumulated)
    if isinstance(used, Unknown):
        return used
    return length / twice if roomy else Unknown("a micro-batch of twice the size would not surely fit")


@run_fact(unit="count")
def half_gpus(run: RunView) -> Value:
    """Half of the job's ranks."""
    ranks = run.world_size or len(run.digests)
    return ranks // 2 if ranks > 1 else Unknown("one rank cannot be halved")
