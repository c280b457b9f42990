"""Facts about how the job is run: its strategy, what it shards, its number formats and techniques."""

from __future__ import annotations

from collections import Counter

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.strategies.claim import FAMILIES, Claim
from tracedoc.ranks.strategies.decide import decide, merge, resolve_strategy
from tracedoc.ranks.strategies.model_parallel import ONLY_PASSES_DATA, PASSES_DATA_HOW
from tracedoc.timeline.phases import Phase
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.values import Unknown, Value

ADAPTER_PAIRS = 4
"""Fewer narrow pairs of linear layers than this may be bottlenecks of the model itself."""


def strategy_of(run: RunView) -> Claim:
    """Return the strategy of a run, from the signs of all its ranks and from its manifest.

    Sends and receives alone are those of a pipeline where they join the ranks to chains of stages.
    """
    claim = resolve_strategy(decide([digest.signs for digest in run.digests], run.world_size), run.job)
    stages = pipeline(run) if claim.name == ONLY_PASSES_DATA else None
    if stages is None:
        return claim
    shape = f"{len(stages.stages)} stages, {stages.micro_batches} micro-batches"
    seen = tuple(one for one in claim.evidence if one != PASSES_DATA_HOW)
    return Claim(
        f"pipeline parallel ({shape})",
        "pipeline",
        "unknown",
        "medium",
        (*seen, "ranks form a chain of stages"),
    )


@run_fact("strategy_family", unit="text", values=FAMILIES)
def strategy_family(run: RunView) -> Value:
    """Family of the strategy, for rules.

    "ddp", "fsdp1", "fsdp2", "zero-1", "zero-2", "zero-3", "zero-redundancy-optimizer", "data-parallel" (which
    is torch.nn.DataParallel), "tensor-parallel", "pipeline", "megatron", "single" or "unknown".
    """
    return strategy_of(run).family


@run_fact("sharding", unit="text")
def sharding(run: RunView) -> Value:
    """What the ranks split among them.

    none, optimizer, gradients (and optimizer), or full (parameters too); hybrid- before it where groups of
    ranks that shard are replicas of each other. Unknown where the traces do not show it.
    """
    found = strategy_of(run).sharding
    return Unknown("the traces do not show what is sharded") if found == "unknown" else found


@run_fact("activation_checkpointing", unit="bool", needs=("host_ops",))
def activation_checkpointing(run: RunView) -> Value:
    """Whether forward operators run again inside the backward pass; not visible in compiled code."""
    signs = merge([digest.signs for digest in run.digests])
    if not signs.passes:
        return Unknown("no backward pass was captured")
    if not signs.recomputes and "compiled" in signs.seen:
        return Unknown("compiled code hides recomputation")
    return signs.recomputes


@run_fact("compiled", unit="bool", needs=("host_ops",))
def compiled(run: RunView) -> Value:
    """Whether code compiled by torch.compile runs, from its ranges."""
    return any("compiled" in digest.signs.seen for digest in run.digests)


@run_fact("cuda_graph_launches", unit="count", needs=("launches",))
def cuda_graph_launches(run: RunView) -> Value:
    """CUDA (or HIP) graphs that the host launched in the median step."""
    return merge([digest.signs for digest in run.digests]).graph_launches


@run_fact("matrix_dtype", unit="text", needs=("shapes",))
def matrix_dtype(run: RunView) -> Value:
    """Number format of most matrix products of the step, from the types of their arguments."""
    found = merge([digest.signs for digest in run.digests]).matrix_dtype
    return found or Unknown("no matrix product carries its types")


@run_fact("parameter_dtype", unit="text", needs=("collectives",))
def parameter_dtype(run: RunView) -> Value:
    """Number format in which most bytes of parameters are gathered."""
    return _dtype(run, ("all_gather",), (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER))


@run_fact("reduction_dtype", unit="text", needs=("collectives",))
def reduction_dtype(run: RunView) -> Value:
    """Number format in which most bytes of gradients are reduced."""
    return _dtype(run, ("all_reduce", "reduce_scatter", "reduce"), (Phase.BACKWARD, Phase.RECOMPUTE))


@run_fact("low_rank_adapters", unit="bool", needs=("shapes",))
def low_rank_adapters(run: RunView) -> Value:
    """Whether linear layers narrow to a small rank and widen again, pair by pair, as LoRA's do."""
    signs = merge([digest.signs for digest in run.digests])
    if not signs.matrix_dtype:
        return Unknown("no linear layer carries its shape")
    return signs.low_rank_pairs >= ADAPTER_PAIRS


@run_fact("quantised_weights", unit="bool")
def quantised_weights(run: RunView) -> Value:
    """Whether weights are dequantised on the way (bitsandbytes), as QLoRA does."""
    return any("quantised" in digest.signs.seen for digest in run.digests)


def _dtype(run: RunView, ops: tuple[str, ...], phases: tuple[Phase, ...]) -> Value:
    signs = merge([digest.signs for digest in run.digests])
    sizes: Counter[str] = Counter()
    for traffic in signs.select(ops, *phases):
        if traffic.dtype:
            sizes[traffic.dtype] += max(traffic.nbytes, 1)
    if not sizes:
        return Unknown("no collective of this kind carries its type")
    return sizes.most_common(1)[0][0]
