"""Facts of the run about its compute: its samples, and what half of the GPUs would keep of the throughput."""

from __future__ import annotations

from math import prod

from tracedoc.facts.catalog import RankFact, digest_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import BATCH_SAMPLES, MICRO_BATCH, SEQUENCE
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.phases import Phase
from tracedoc.topics.capture.run import strategy_of
from tracedoc.topics.communication.run import comm_split, exposed_comm_excluding_wait_ms
from tracedoc.topics.compute.rank_arithmetic import samples_per_s, tokens_per_s
from tracedoc.topics.memory.run import tensor_memory_frac
from tracedoc.topics.step.rank import micro_batches, step_ms
from tracedoc.values import Unknown, Value, needed, needed_number

REPLICAS = frozenset({"ddp", "zero-1"})
"""Strategies that reduce gradients once for several micro-batches, and hold all parameters on every rank."""

SHARDS = frozenset({"fsdp1", "fsdp2", "zero-2", "zero-1-or-2", "zero-3"})

HALF = 0.45
"""With at most this share of the memory in use twice of everything fits, and 10 % is left for the rest."""


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
    apart = needed_number(exposed_comm_excluding_wait_ms(run, digest, step))
    used = tensor_memory_frac(run, digest, step)
    length = step.budget.window_ns
    if length == 0:
        return Unknown("the step takes no time")
    twice = length + step.budget.compute_ns
    roomy = isinstance(used, float) and used < HALF
    if family in REPLICAS:
        accumulated = 2 * length - apart * 1e6
        return length / (min(twice, accumulated) if roomy else accumulated)
    needed(used)
    return length / twice if roomy else Unknown("a micro-batch of twice the size would not surely fit")


BATCHED = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)


@digest_fact(unit="ms", needs=("kernels", "host_ops"))
def batch_compute_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Compute time of the median step's forward and backward passes, recomputation with them: what a larger
    batch makes longer. The optimizer takes as long for any batch."""
    passes = [one for one in digest.phases if one.phase in BATCHED]
    return sum(one.compute_ns for one in passes) / 1e6 if passes else Unknown("no pass was captured")


@run_fact(unit="count")
def half_gpus(run: RunView) -> Value:
    """Half of the job's ranks."""
    ranks = run.world_size or len(run.digests)
    return ranks // 2 if ranks > 1 else Unknown("one rank cannot be halved")


# -- how much work a step does


OF_OWN = REPLICAS | SHARDS | {"single", "data-parallel", "zero-redundancy-optimizer"}
"""Strategies whose ranks have samples of their own each."""


@run_fact(unit="count", needs=(samples_per_s, micro_batches, step_ms))
def samples_per_step(run: RunView) -> Value:
    """Samples that the captured ranks train on in one step, all together.

    From the shapes of the analysed step of each rank; else from the batch that the hook saw the loader give,
    in a step of one forward pass. Unknown where ranks share their samples (tensor or pipeline parallelism),
    or where that is not known.
    """
    return _of_all(run, samples_per_s, (BATCH_SAMPLES,))


@run_fact(unit="count", needs=(tokens_per_s, micro_batches, step_ms))
def tokens_per_step(run: RunView) -> Value:
    """Tokens that the captured ranks train on in one step, all together; as :func:`samples_per_step`."""
    return _of_all(run, tokens_per_s, (MICRO_BATCH, SEQUENCE))


def _of_all(run: RunView, rate: RankFact[Value], recorded: tuple[str, ...]) -> Value:
    strategy = strategy_of(run)
    if strategy.family not in OF_OWN or "parallel" in strategy.name.partition(" with ")[2]:
        return Unknown("whether ranks share samples is not known")
    total = 0
    for digest in run.digests:
        per_s, length_ms = rate.of(digest), step_ms.of(digest)
        if isinstance(per_s, float) and isinstance(length_ms, float):
            total += round(per_s * length_ms / 1e3)
            continue
        job = run.job.rank(digest.rank)
        lengths = [int(job.training.get(name, "0")) for name in recorded] if job is not None else [0]
        if micro_batches.of(digest) != 1 or not all(lengths):
            return per_s if isinstance(per_s, Unknown) else Unknown("no rank has a step to count in")
        total += prod(lengths)
    return total
