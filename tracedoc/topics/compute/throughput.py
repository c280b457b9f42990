"""Facts about how much work a step does: the samples and tokens that all ranks train on."""

from __future__ import annotations

from tracedoc.facts.catalog import RankFact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import BATCH_SAMPLES, MICRO_BATCH, SEQUENCE
from tracedoc.topics.capture.run import strategy_of
from tracedoc.topics.compute.rank_arithmetic import samples_per_s, tokens_per_s
from tracedoc.topics.compute.run import REPLICAS, SHARDS
from tracedoc.topics.step.rank import micro_batches, step_ms
from tracedoc.values import Unknown, Value

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
        job = run.job.rank(digest.rank) if run.job is not None else None
        lengths = [int(job.training.get(name, "0")) for name in recorded] if job is not None else [0]
        if micro_batches.of(digest) != 1 or not all(lengths):
            return per_s if isinstance(per_s, Unknown) else Unknown("no rank has a step to count in")
        samples = 1
        for length in lengths:
            samples *= length
        total += samples
    return total
