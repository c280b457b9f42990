"""Facts of the run about the job and its capture: strategy, what was seen, settings that cost speed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from tracedoc.errors import Limit
from tracedoc.facts.catalog import NO_MANIFEST, manifest_fact, run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.strategy import decide, merge, resolve_strategy
from tracedoc.ranks.strategy_kinds import FAMILIES, ONLY_PASSES_DATA, PASSES_DATA_HOW, Claim
from tracedoc.run.job import ANOMALY_DETECTION, STEPS_FOR_MEDIAN, RankJob
from tracedoc.run.manifest import StepTime
from tracedoc.timeline.phases import Phase
from tracedoc.topics.compute.rank import has_batch_norm
from tracedoc.topics.pipeline.stages import pipeline
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed, needed_number


@run_fact(unit="count")
def ranks_seen(run: RunView) -> Value:
    """Ranks whose trace was read."""
    return len(run.digests)


@run_fact(unit="count")
def world_size(run: RunView) -> Value:
    """Ranks of the job, by its traces."""
    return run.world_size if run.world_size is not None else Unknown("no trace names the world size")


@run_fact(unit="count")
def missing_ranks(run: RunView) -> Value:
    """Ranks of the job without a trace."""
    if run.world_size is None:
        return Unknown("no trace names the world size")
    return max(run.world_size - len(run.digests), 0)


@run_fact(unit="count")
def fewest_complete_steps(run: RunView) -> Value:
    """Complete steps of the rank that has fewest; ranks without device activity are left out."""
    counts = [len(digest.complete_steps) for digest in run.digests if digest.steps]
    return min(counts) if counts else Unknown("no rank has steps")


@run_fact(unit="count")
def truncated_traces(run: RunView) -> Value:
    """Trace files that are truncated, or in which damaged events had to be skipped."""
    return sum(digest.truncated for digest in run.digests)


# -- the strategy


def strategy_of(run: RunView) -> Claim:
    """The strategy of a run, from the signs of all its ranks and from its manifest.

    Sends and receives alone are those of a pipeline where they join the ranks to chains of stages. The chains
    tell chunks from micro-batches, whose backward passes look alike on a rank, and GPipe from 1F1B.
    """
    claim = resolve_strategy(decide([digest.signs for digest in run.digests], run.world_size), run.job)
    stages = pipeline(run) if "pipeline" in claim.name or claim.name == ONLY_PASSES_DATA else None
    if stages is None:
        return claim
    if claim.name != ONLY_PASSES_DATA:
        passes = f"{stages.micro_batches * stages.chunks} micro-batches"
        name = claim.name.replace(passes, stages.shape)
        return replace(claim, name=name.replace("GPipe", "1F1B") if stages.alternates else name)
    shape = f"{len(stages.stages)} stages, {stages.shape}"
    seen = tuple(one for one in claim.evidence if one != PASSES_DATA_HOW)
    return Claim(
        f"pipeline parallel ({shape})",
        "pipeline",
        "unknown",
        "medium",
        (*seen, "ranks form a chain of stages"),
    )


@run_fact(unit="text", values=FAMILIES)
def strategy_family(run: RunView) -> Value:
    """Family of the strategy, for rules.

    "ddp", "fsdp1", "fsdp2", "zero-1", "zero-2", "zero-1-or-2", "zero-3", "zero-redundancy-optimizer",
    "data-parallel" (which is torch.nn.DataParallel), "tp" (tensor parallelism), "pipeline", "megatron",
    "single" or "unknown".
    """
    return strategy_of(run).family


@run_fact(unit="bool")
def sharded_embeddings(run: RunView) -> Value:
    """Whether ranks hold parts of the embeddings, which code compiled as a whole model cannot contain."""
    return "sharded embeddings" in strategy_of(run).name


@run_fact(unit="text")
def sharding(run: RunView) -> Value:
    """What the ranks split among them.

    none, optimizer, gradients (and optimizer), or full (parameters too); hybrid- before it where groups of
    ranks that shard are replicas of each other. Unknown where the traces do not show it.
    """
    found = strategy_of(run).sharding
    return Unknown("the traces do not show what is sharded") if found == "unknown" else found


@run_fact(unit="bool", needs=("host_ops",))
def activation_checkpointing(run: RunView) -> Value:
    """Whether forward operators run again inside the backward pass; not visible in compiled code."""
    signs = merge([digest.signs for digest in run.digests])
    if not signs.passes:
        return Unknown("no backward pass was captured")
    if not signs.recomputes and "compiled" in signs.seen:
        return Unknown("compiled code hides recomputation")
    return signs.recomputes


@run_fact(unit="bool", needs=("host_ops",))
def compiled(run: RunView) -> Value:
    """Whether code compiled by torch.compile runs, from its ranges."""
    return any("compiled" in digest.signs.seen for digest in run.digests)


@run_fact(unit="bool", needs=("host_ops", has_batch_norm))
def suits_cuda_graphs(run: RunView) -> Value:
    """Whether CUDA graphs can hold whole passes: on one GPU, and under DDP without batch norm.

    DDP broadcasts the buffers of batch norm before each forward pass.
    """
    family = strategy_of(run).family
    normalised = [has_batch_norm.of(digest) for digest in run.digests]
    return family == "single" or (family == "ddp" and not any(one is not False for one in normalised))


@run_fact(unit="text", values=("python", "torchrun"))
def launcher(run: RunView) -> Value:
    """What starts the script: "python" where one process trains, else "torchrun"."""
    return "python" if strategy_of(run).family == "single" else "torchrun"


@run_fact(unit="count", needs=("launches",))
def cuda_graph_launches(run: RunView) -> Value:
    """CUDA (or HIP) graphs that the host launched in the median step."""
    return merge([digest.signs for digest in run.digests]).graph_launches


@run_fact(unit="text", needs=("shapes",))
def matrix_dtype(run: RunView) -> Value:
    """Number format of most matrix products of the step, from the types of their arguments."""
    found = merge([digest.signs for digest in run.digests]).matrix_dtype
    return found or Unknown("no matrix product carries its types")


@run_fact(unit="text", needs=("collectives",))
def parameter_dtype(run: RunView) -> Value:
    """Number format in which most bytes of parameters are gathered."""
    return _dtype(run, ("all_gather",), (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER))


@run_fact(unit="text", needs=("collectives",))
def reduction_dtype(run: RunView) -> Value:
    """Number format in which most bytes of gradients are reduced."""
    return _dtype(run, ("all_reduce", "reduce_scatter", "reduce"), (Phase.BACKWARD, Phase.RECOMPUTE))


def _dtype(run: RunView, ops: tuple[str, ...], phases: tuple[Phase, ...]) -> Value:
    signs = merge([digest.signs for digest in run.digests])
    sizes: Counter[str] = Counter()
    for traffic in signs.select(ops, *phases):
        if traffic.dtype:
            sizes[traffic.dtype] += max(traffic.nbytes, 1)
    if not sizes:
        return Unknown("no collective of this kind carries its type")
    return sizes.most_common(1)[0][0]


# -- the manifest


LASTING_SLOWDOWN = 0.02
"""A job that is this much slower after the capture than before has not recovered from it."""


def recorded(value: int | float | bool | str | None, reason: str) -> Value:
    """A value of the manifest, unknown for this reason where it is not there."""
    return Unknown(reason) if value is None or value == "" else value


@manifest_fact(unit="ms")
def unprofiled_step_ms(rank: RankJob) -> Value:
    """Median time of a step without the profiler, by the host's clock.

    Of up to ten steps before the recorded ones and ten after: the mean of the two medians, weighted by their
    steps. Unknown with fewer than five steps in all.
    """
    found = rank.unprofiled_ms
    return recorded(found, f"fewer than {STEPS_FOR_MEDIAN} steps were timed without the profiler")


@manifest_fact(unit="fraction", needs=(unprofiled_step_ms,))
def profiler_overhead_frac(rank: RankJob) -> Value:
    """How much longer a recorded step is than one without the profiler, by the host's clock; 0 if it is not.

    The median recorded step / ``unprofiled_step_ms`` - 1.
    """
    usual = needed_number(unprofiled_step_ms(rank))
    if rank.during is None:
        return Unknown("the recorded steps were not timed")
    return max(rank.during.median_ms / usual - 1.0, 0.0)


def job_limits(run: RunView) -> list[Limit]:
    """The limit for a job that stayed slower after the capture, by its own step times.

    It is given where the median of the steps afterwards is above that before by 2 % on every rank: the ranks
    of a job step together, and one alone is noise.
    """
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


class _Debugging(NamedTuple):
    name: str
    holds: Callable[[str], bool]
    harmless: Callable[[RunView, RankJob], bool]
    cost: str


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _one_rank(run: RunView, rank: RankJob) -> bool:
    return (run.world_size or rank.world_size) == 1


def _one_host(run: RunView, rank: RankJob) -> bool:
    hosts = {rank.host for rank in run.job.ranks}
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


def _logs_calls(run: RunView, rank: RankJob) -> bool:
    """Whether NCCL's log leaves out what is written at every call."""
    listed = rank.variables.get("NCCL_DEBUG_SUBSYS", "").upper().split(",")
    return _one_rank(run, rank) or not {"COLL", "CALLS", "ALL", "P2P"} & set(listed)


_EACH_KERNEL = "the host waits for each kernel"
_EACH_CALL = "each call of NCCL is written down"
_WAITS = "the host waits for each collective"

_DEBUGGING = (
    _Debugging("CUDA_LAUNCH_BLOCKING", _is_on, _never, _EACH_KERNEL),
    _Debugging("HIP_LAUNCH_BLOCKING", _is_on, _never, _EACH_KERNEL),
    _Debugging("AMD_SERIALIZE_KERNEL", _is_on, _never, _EACH_KERNEL),
    _Debugging("AMD_SERIALIZE_COPY", _is_on, _never, "the host waits for each copy"),
    _Debugging("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, _never, "each tensor is allocated by the driver"),
    _Debugging(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        _one_rank,
        "each collective is checked by another one",
    ),
    _Debugging("NCCL_DEBUG", lambda value: value.upper() == "TRACE", _one_rank, _EACH_CALL),
    _Debugging("NCCL_DEBUG", lambda value: value.upper() == "INFO", _logs_calls, _EACH_CALL),
    _Debugging("NCCL_P2P_DISABLE", _is_on, _no_peer_access, "GPUs of a host exchange through its memory"),
    _Debugging("NCCL_SHM_DISABLE", _is_on, _one_rank, "GPUs of a host exchange through the network"),
    _Debugging("NCCL_IB_DISABLE", _is_on, _no_infiniband, "hosts exchange by sockets"),
    _Debugging("NCCL_BLOCKING_WAIT", _is_on, _one_rank, _WAITS),
    _Debugging("TORCH_NCCL_BLOCKING_WAIT", _is_on, _one_rank, _WAITS),
    _Debugging("TORCH_NCCL_ENABLE_TIMING", _is_on, _one_rank, "each collective records two more events"),
    _Debugging(
        ANOMALY_DETECTION,
        _is_on,
        _never,
        "each operator keeps its Python stack, and the host reads whether a gradient is NaN",
    ),
)
"""Debugging settings that cost speed. The collector sets none of them."""


@run_fact(unit="text")
def debug_settings(run: RunView) -> Value:
    """Variables and switches for debugging that cost speed, as ``CUDA_LAUNCH_BLOCKING=1``, or "none".

    Left out where they change nothing: peer access on cards without it, InfiniBand on one host or where
    libfabric takes its place, NCCL's in a world of one.
    """
    return ", ".join(needed(_settings(run))) or "none"


@run_fact(unit="text")
def debug_costs(run: RunView) -> Value:
    """What such variables cost, in words; "none" without any."""
    return ", ".join(dict.fromkeys(needed(_settings(run)).values())) or "none"


@run_fact(unit="count")
def debug_settings_count(run: RunView) -> Value:
    """How many such variables are set on any rank."""
    return len(needed(_settings(run)))


@run_fact(unit="bool")
def anomaly_detection(run: RunView) -> Value:
    """Whether autograd looks for NaN on any rank."""
    ranks = run.job.ranks
    return any(ANOMALY_DETECTION in one.training for one in ranks) if ranks else NO_MANIFEST


def _settings(run: RunView) -> dict[str, str] | Unknown:
    """What each setting costs, as ``{"NCCL_IB_DISABLE=1": "hosts exchange by sockets"}``."""
    if not run.job.ranks:
        return NO_MANIFEST
    return {
        f"{setting.name}={value}": setting.cost
        for rank in run.job.ranks
        for setting in _DEBUGGING
        if (value := rank.variables.get(setting.name, rank.training.get(setting.name))) is not None
        and setting.holds(value)
        and not setting.harmless(run, rank)
    }
