"""Recognise strategies, each with its evidence: data parallelism in its kinds, and models that are split."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import SHARDED_MARKS, StrategySigns, Traffic
from tracedoc.trace.vocabulary import P2P_OPS
from tracedoc.units import format_bytes

BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
"""Recomputation runs inside the backward pass."""

GRADIENT_BYTES = 65_536
"""A collective below this size may carry a loss, a norm or a flag; parameters and gradients are larger."""

FAMILIES = (
    "ddp",
    "fsdp1",
    "fsdp2",
    "zero-1",
    "zero-2",
    "zero-1-or-2",
    "zero-3",
    "zero-redundancy-optimizer",
    "data-parallel",
    "tp",
    "pipeline",
    "megatron",
    "single",
    "unknown",
)


class Claim(msgspec.Struct, frozen=True):
    """A strategy that one family recognises.

    ``family`` is one of :data:`FAMILIES`. ``sharding`` says what the ranks split: "none", "optimizer",
    "gradients" (and optimizer), "full" (parameters too), each with "hybrid-" before it where replicas of
    shard groups exist, or "unknown". ``confidence`` is "high", "medium" or "low".
    """

    name: str
    family: str
    sharding: str
    confidence: str
    evidence: tuple[str, ...]


def per_step(calls: int, what: str, where: str = "") -> str:
    """Return evidence in words: ``9 all-gathers a step in backward``; a count of one is singular."""
    return f"{calls} {what}{'s' if calls != 1 else ''} a step{f' in {where}' if where else ''}"


def is_large(traffic: Traffic) -> bool:
    """Whether a kind of collective carries parameters or gradients; False for unknown sizes."""
    return traffic.largest is not None and traffic.largest >= GRADIENT_BYTES


def may_be_large(traffic: Traffic) -> bool:
    """Whether a kind of collective carries parameters or gradients, or its size is not known."""
    return traffic.largest is None or is_large(traffic)


def sized(traffic: Sequence[Traffic], what: str, where: str = "") -> str:
    """Return evidence in words with the size: ``2 all-reduces a step, the largest of 24 MiB``."""
    largest = max((t.largest for t in traffic if t.largest is not None), default=None)
    shown = per_step(sum(t.calls for t in traffic), what, where)
    return shown if largest is None else f"{shown}, the largest of {format_bytes(largest)}"


def below_world(traffic: Traffic, world_size: int | None) -> bool:
    """Whether a kind of collective surely runs over a part of the ranks only."""
    return traffic.group_size is not None and world_size is not None and 1 < traffic.group_size < world_size


def gathers_in_forward(signs: StrategySigns) -> int:
    """Return the all-gathers of the forward pass that are not functional collectives."""
    return signs.calls("all_gather", Phase.FORWARD) - signs.calls(
        "all_gather", Phase.FORWARD, site="functional"
    )


def gathers_in_backward(signs: StrategySigns) -> int:
    """Return the all-gathers of the backward pass that are not functional collectives."""
    return signs.calls("all_gather", *BACKWARD) - signs.calls("all_gather", *BACKWARD, site="functional")


def ddp(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return DDP, or DDP with ``ZeroRedundancyOptimizer``."""
    if "ddp" not in signs.seen:
        return None
    evidence = [per_step(signs.count("ddp"), "DistributedDataParallel.forward range")]
    reduced = signs.calls(("all_reduce", "reduce_scatter"), *BACKWARD)
    confidence = "high"
    if reduced:
        evidence.append(per_step(reduced, "all-reduce", "backward"))
        known = [t for t in signs.select("all_reduce", *BACKWARD) if t.largest is not None]
        if known and not any(is_large(t) for t in known):
            evidence.append("none of them is large: little is trained, or gradients travel otherwise")
    else:
        confidence = "medium"
        evidence.append("no all-reduce of its gradients is in the trace")
    if "zero_redundancy" in signs.seen:
        evidence.append("Optimizer.step#ZeroRedundancyOptimizer.step")
        return Claim(
            "DDP with ZeroRedundancyOptimizer", "zero-redundancy-optimizer", "optimizer", confidence,
            tuple(evidence),
        )  # fmt: skip
    return Claim("DDP", "ddp", "none", confidence, tuple(evidence))


def data_parallel(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ``torch.nn.DataParallel``: one process that drives several GPUs."""
    if "data_parallel" not in signs.seen:
        return None
    return Claim("DataParallel", "data-parallel", "none", "high", ("DataParallel.forward",))


def by_hand(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return data parallelism without a known wrapper: gradients reduced, nothing gathered or exchanged."""
    reduced = [
        t for t in signs.select(("all_reduce", "reduce"), *BACKWARD, Phase.OTHER) if t.site != "functional"
    ]
    others = signs.calls(("all_gather", "reduce_scatter", "all_to_all", "send", "recv", "send_recv"))
    if not any(is_large(t) for t in reduced) or others or signs.calls("all_reduce", Phase.FORWARD):
        return None
    return Claim(
        "data parallel, no known wrapper", "unknown", "none", "low",
        (
            sized(reduced, "all-reduce", "or after backward"),
            "no annotation of a wrapper: by hand, Horovod, or ZeRO-0",
        ),
    )  # fmt: skip


def fsdp2(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return FSDP2 with whether units are freed after forward, and HSDP where shards are replicated."""
    if "fsdp2" not in signs.seen:
        return None
    forward, backward = gathers_in_forward(signs), gathers_in_backward(signs)
    evidence = ["FSDP:: annotations", *_counts(signs)]
    if signs.fsdp2_units:
        evidence.insert(1, f"{signs.fsdp2_units} unit{'s' if signs.fsdp2_units > 1 else ''}")
    replicas = signs.calls("all_reduce", site="fsdp-reduce")
    hybrid = replicas > 0 or _replicated(signs)
    if replicas:
        evidence.append(per_step(replicas, "all-reduce", "FSDP's reduction of gradients"))
    variant, sharding = "", "unknown"
    if signs.passes and backward:
        variant, sharding = "reshard after forward", "full"
    elif signs.passes and forward:
        sharding = "gradients"
        # The root is never freed after forward, so a single unit does not show the setting.
        variant = "no reshard after forward" if signs.fsdp2_units != 1 else "one unit"
    name = "FSDP2 HSDP" if hybrid else "FSDP2"
    return Claim(
        f"{name} ({variant})" if variant else name,
        "fsdp2",
        f"hybrid-{sharding}" if hybrid and sharding != "unknown" else sharding,
        "high",
        tuple(evidence),
    )


def fsdp1(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return FSDP1 with its sharding strategy, as far as the collectives show it."""
    if not signs.seen & {"fsdp1", "fsdp1_hook"}:
        return None
    forward, backward = gathers_in_forward(signs), gathers_in_backward(signs)
    scattered = signs.calls("reduce_scatter", *BACKWARD)
    evidence = [per_step(signs.count("fsdp1"), "FullyShardedDataParallel.forward range"), *_counts(signs)]
    across = _hybrid_reductions(signs, world_size)
    if across and scattered:
        evidence.append(per_step(across, "all-reduce", "backward over another group"))
        full = backward > 0
        name = "HYBRID_SHARD" if full else "_HYBRID_SHARD_ZERO2"
        return Claim(f"FSDP1 ({name})", "fsdp1", "hybrid-full" if full else "hybrid-gradients", "high",
                     tuple(evidence))  # fmt: skip
    if signs.passes and backward:
        return Claim("FSDP1 (FULL_SHARD)", "fsdp1", "full", "high", tuple(evidence))
    if signs.passes and forward and scattered:
        # The root is never freed after forward: alone, FULL_SHARD looks like SHARD_GRAD_OP.
        name = "one unit" if signs.count("fsdp1") == signs.passes else "SHARD_GRAD_OP"
        return Claim(f"FSDP1 ({name})", "fsdp1", "gradients", "high", tuple(evidence))
    reduced = signs.calls("all_reduce", *BACKWARD)
    if signs.passes and not forward and not scattered and reduced:
        evidence.append(per_step(reduced, "all-reduce", "backward"))
        return Claim("FSDP1 (NO_SHARD)", "fsdp1", "none", "high", tuple(evidence))
    return Claim("FSDP1", "fsdp1", "unknown", "high", tuple(evidence))


def _counts(signs: StrategySigns) -> list[str]:
    found = [
        (gathers_in_forward(signs), "all-gather", "forward"),
        (gathers_in_backward(signs), "all-gather", "backward"),
        (signs.calls("reduce_scatter", *BACKWARD), "reduce-scatter", "backward"),
    ]
    return [per_step(calls, what, where) for calls, what, where in found if calls]


def _replicated(signs: StrategySigns) -> bool:
    return any("repl" in description and size > 1 for description, size in signs.groups)


def _hybrid_reductions(signs: StrategySigns, world_size: int | None) -> int:
    """Return the all-reduces of gradients beside reduce-scatters: over replicas, if groups are recorded."""
    sharded = signs.select("reduce_scatter", *BACKWARD)
    reduced = [t for t in signs.select("all_reduce", *BACKWARD) if t.site != "functional"]
    if any(traffic.group_size for traffic in sharded):
        if not any(below_world(traffic, world_size) for traffic in sharded):
            return 0
    elif sum(t.calls for t in reduced) < sum(t.calls for t in sharded):
        return 0  # Groups are not recorded: one all-reduce for each reduce-scatter is required.
    return sum(traffic.calls for traffic in reduced if traffic.phase is not Phase.OTHER)


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def zero3(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ZeRO-3, which puts its hooks into the graph as operators of their own."""
    if "zero3" not in signs.seen:
        return None
    evidence = ["ZeRO-3 module hooks in the graph", *_traffic(signs)]
    return Claim(_offloaded("DeepSpeed ZeRO-3", signs), "zero-3", "full", "high", tuple(evidence))


def zero12(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return ZeRO-1 or ZeRO-2: parameters gathered after the optimizer, gradients reduced before it.

    ZeRO-2 reduces in every micro-batch, ZeRO-1 once for each step of the optimizer; with one micro-batch
    the two look alike. Where sizes were not recorded, as by old versions of torch, the place alone counts.
    """
    gathered = [t for t in signs.select("all_gather", Phase.OPTIMIZER) if may_be_large(t)]
    reduced = [t for t in signs.select(REDUCTIONS, *BACKWARD, Phase.OTHER) if may_be_large(t)]
    if not gathered or not reduced:
        return None
    evidence = [
        sized(gathered, "all-gather", "the optimizer"),
        sized(reduced, "reduction", "or after backward"),
        "no annotation of a wrapper",
    ]
    sure = any(map(is_large, gathered)) and any(map(is_large, reduced))
    confidence = "medium" if sure else "low"
    if not sure:
        evidence.append("their sizes were not recorded")
    if signs.passes > 1:
        evidence.append(f"gradients reduced in {signs.reducing} of {signs.passes} micro-batches")
    if signs.passes > 1 and signs.reducing == signs.passes:
        return Claim(_offloaded("ZeRO-2", signs), "zero-2", "gradients", confidence, tuple(evidence))
    if signs.passes > 1:
        return Claim(_offloaded("ZeRO-1", signs), "zero-1", "optimizer", confidence, tuple(evidence))
    evidence.append("one micro-batch a step: ZeRO-1 and ZeRO-2 look alike")
    return Claim(_offloaded("ZeRO-1 or ZeRO-2", signs), "zero-1-or-2", "optimizer", "low", tuple(evidence))


def _offloaded(name: str, signs: StrategySigns) -> str:
    return f"{name} with CPU offload" if "cpu_adam" in signs.seen else name


def _traffic(signs: StrategySigns) -> list[str]:
    found = [
        (signs.calls("all_gather", Phase.FORWARD), "all-gather", "forward"),
        (signs.calls("all_gather", *BACKWARD), "all-gather", "backward"),
        (signs.calls("reduce_scatter"), "reduce-scatter", ""),
    ]
    return [per_step(calls, what, where) for calls, what, where in found if calls]


MEGATRON_GROUPS = (
    ("TP", re.compile(r"TENSOR_MODEL_PARALLEL_GROUP$")),
    ("PP", re.compile(r"PIPELINE_MODEL_PARALLEL_GROUP$")),
    ("CP", re.compile(r"CONTEXT_PARALLEL_GROUP$")),
    ("EP", re.compile(r"EXPERT_MODEL_PARALLEL_GROUP$")),
    ("DP", re.compile(r"DATA_PARALLEL_GROUP$")),
)
"""Descriptions that Megatron's parallel state gives to its process groups."""

_TENSOR_GROUP = re.compile(r"(?:^|_)(?:tp|tensor)(?:_|$)|TENSOR_MODEL_PARALLEL_GROUP$", re.IGNORECASE)
CONTEXT_GROUP = re.compile(r"(?:^|_)(?:cp|context)(?:_|$)|CONTEXT_PARALLEL_GROUP$", re.IGNORECASE)
_EXPERT_GROUP = re.compile(r"(?:^|_)(?:ep|expert|moe)(?:_|$)|EXPERT_MODEL_PARALLEL_GROUP$", re.IGNORECASE)
_LAYER_OPS = ("all_reduce", "all_gather", "reduce_scatter")

WRAPPED = SHARDED_MARKS | {"ddp", "data_parallel"}
"""Marks of wrappers, whose jobs are named without this."""

FEWEST_LAYERS = 2
"""One sum in the forward pass may be that of a loss over all ranks."""


def megatron(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return Megatron with the sizes of its groups, from their descriptions."""
    sizes = {
        label: max(size for description, size in signs.groups if pattern.match(description))
        for label, pattern in MEGATRON_GROUPS
        if any(pattern.match(description) for description, _ in signs.groups)
    }
    if not sizes and "megatron_fsdp" not in signs.seen:
        return None
    evidence = ["process groups named by Megatron"] if sizes else []
    shown = [f"{label} {size}" for label, size in sizes.items() if size > 1]
    sharding = "unknown"
    scattered = [t for t in signs.select("reduce_scatter") if "DATA_PARALLEL_GROUP" in t.group]
    if "megatron_fsdp" in signs.seen:
        evidence.append("CustomFSDP.forward")
        shown.append("FSDP")
    elif scattered:
        evidence.append(
            per_step(sum(t.calls for t in scattered), "reduce-scatter", "the data-parallel group")
        )
        sharding = "optimizer"
    elif any("DATA_PARALLEL_GROUP" in t.group for t in signs.select("all_reduce", *BACKWARD, Phase.OTHER)):
        sharding = "none"
    name = f"Megatron ({', '.join(shown)})" if shown else "Megatron"
    return Claim(name, "megatron", sharding, "high", tuple(evidence))


def tensor_parallel(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return tensor parallelism: collectives of activations in forward and in backward.

    A gradient norm over DTensors is one functional all-reduce after backward, which is not it; nor are the
    small gathers of SyncBatchNorm.
    """
    if "fused_tp" in signs.seen:
        return Claim("tensor parallel", "tp", "unknown", "high",
                     ("collectives fused with matrix products (symmetric memory)",))  # fmt: skip
    forward = [t for t in signs.select(_LAYER_OPS, Phase.FORWARD) if _splits_layers(t, signs)]
    backward = [t for t in signs.select(_LAYER_OPS, *BACKWARD) if _splits_layers(t, signs)]
    why, confidence = "functional collectives", "medium"
    if any(_TENSOR_GROUP.search(t.group) for t in (*forward, *backward)):
        why, confidence = "their process group is named for tensor parallelism", "high"
    elif not forward or not backward:
        forward, backward = _by_hand(signs)
        why = "activations are added up over ranks in forward and in backward, as layers by hand do"
        confidence = "medium" if any(map(is_large, forward)) else "low"
    ahead, back = sum(t.calls for t in forward), sum(t.calls for t in backward)
    if not ahead or not back:
        return None
    parts = sorted({t.op.replace("_", "-") for t in (*forward, *backward)})
    sequence = not any(t.op == "all_reduce" for t in forward)
    evidence = (
        f"{ahead} collectives a step in forward and {back} in backward ({', '.join(parts)})", why,
    )  # fmt: skip
    name = "tensor parallel with sequence parallelism" if sequence else "tensor parallel"
    degrees = _degrees(signs, {t.group_size for t in (*forward, *backward)}, world_size)
    return Claim(name + degrees, "tp", "unknown", confidence, evidence)


def _degrees(signs: StrategySigns, sizes: set[int | None], world_size: int | None) -> str:
    """How many ranks share a layer, and how many replicas there are, in brackets; "" where it is not known.

    Those that share no layer are replicas where groups of as many reduce in the backward pass, and nothing is
    sent from one rank to another.
    """
    if len(sizes) > 1 or None in sizes or world_size is None:
        return ""
    (shares,) = sizes
    assert shares is not None
    replicas, others = divmod(world_size, shares)
    reduce = signs.select(("all_reduce", "reduce_scatter"), *BACKWARD, Phase.OTHER)
    if others or replicas == 1 or signs.select(P2P_OPS) or not any(t.group_size == replicas for t in reduce):
        return f" (TP {shares})"
    return f" (TP {shares}, DP {replicas})"


def _by_hand(signs: StrategySigns) -> tuple[list[Traffic], list[Traffic]]:
    """Return the traffic of layers that are split without a library: sums in the forward pass.

    Nothing else adds up tensors of such a size over ranks in several places of a forward pass, and as often
    in the backward pass within the same group: gradients are reduced behind it, units of parameters gathered.
    Where sizes were not recorded, as by old versions of torch, the places alone count, without a wrapper.
    """
    large = is_large if signs.seen & WRAPPED else may_be_large
    adds = [t for t in signs.select(("all_reduce", "reduce_scatter"), Phase.FORWARD) if large(t)]
    groups = {(t.group, t.group_size) for t in adds}
    ahead = [t for t in signs.select(_LAYER_OPS, Phase.FORWARD) if (t.group, t.group_size) in groups]
    back = [t for t in signs.select(_LAYER_OPS, *BACKWARD) if (t.group, t.group_size) in groups]
    layers = sum(t.calls for t in adds)
    if layers < FEWEST_LAYERS or sum(t.calls for t in back) < layers:
        return [], []
    return ahead, back


def _splits_layers(traffic: Traffic, signs: StrategySigns) -> bool:
    if _TENSOR_GROUP.search(traffic.group):
        return True
    # Compiled FSDP2 issues its gathers as functional collectives.
    sharded = "fsdp2" in signs.seen and traffic.op != "all_reduce"
    compiled = "compiled" in signs.seen and traffic.op != "all_reduce"
    return traffic.site == "functional" and not sharded and not compiled


def exchange(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """What an all-to-all in forward and backward means, as far as other signs show it."""
    forward = signs.select("all_to_all", Phase.FORWARD)
    backward = signs.select("all_to_all", *BACKWARD)
    calls = sum(t.calls for t in (*forward, *backward))
    if not forward or not backward:
        return None
    evidence = (per_step(calls, "all-to-all", "forward and backward"),)
    name, confidence = "all-to-all exchange", "medium"
    why = "experts, sharded embeddings or sequence parallelism: the trace does not tell"
    if "embeddings" in signs.seen:
        name, why, confidence = "sharded embeddings", "operators of TorchRec or FBGEMM", "high"
    elif any(_EXPERT_GROUP.search(t.group) for t in (*forward, *backward)):
        name, why, confidence = "expert parallel", "over a group named for experts", "high"
    elif any(CONTEXT_GROUP.search(t.group) for t in (*forward, *backward)):
        name, why, confidence = "context parallel", "over a group named for context parallelism", "high"
    return Claim(name, "unknown", "unknown", confidence, (*evidence, why))


def context_parallel(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return context parallelism where a process group is named for it and carries data."""
    ops = ("all_gather", "send", "recv", "send_recv", "all_reduce", "reduce_scatter")
    found = [t for t in signs.select(ops, Phase.FORWARD, *BACKWARD) if CONTEXT_GROUP.search(t.group)]
    if not found or not any(is_large(t) or t.largest is None for t in found):
        return None
    evidence = per_step(sum(t.calls for t in found), "collective", "a context-parallel group")
    return Claim("context parallel", "unknown", "unknown", "high", (evidence,))


P2P = ("send", "recv", "send_recv")

CALLS_A_PASS = 4
"""A stage sends and receives one activation and one gradient for each micro-batch; rings send far more."""

ONLY_PASSES_DATA = "send and receive between ranks"
PASSES_DATA_HOW = "a pipeline or ring attention: the trace does not tell"
"""The name and the evidence of ranks that pass data on without a sign of what for."""

NO_STAGES_DO = "of gradients, parameters or samples: stages of a pipeline pass data both ways between passes"
"""The evidence of ranks that train, and are no stages."""

AFTER_BACKWARD = (Phase.OTHER, Phase.OPTIMIZER)


def pipeline(signs: StrategySigns, world_size: int | None) -> Claim | None:
    """Return a pipeline with its schedule and micro-batches, as far as the order of passes shows them."""
    traffic = _passed_on(signs)
    calls = sum(t.calls for t in traffic)
    evidence = [
        per_step(sum(t.calls for t in traffic if t.op == op), word)
        for op, word in (("send", "send"), ("recv", "receive"), ("send_recv", "send and receive"))
        if any(t.op == op for t in traffic)
    ]
    if signs.seen & {"schedule", "stage_pass"}:
        evidence.append("annotations of a pipeline schedule")
        confidence = "high"
    elif not calls:
        return None
    elif not may_be_stage(signs):
        return Claim(ONLY_PASSES_DATA, "unknown", "unknown", "low", (*evidence, NO_STAGES_DO))
    elif signs.passes > 1 and calls <= CALLS_A_PASS * signs.passes:
        confidence = "medium"
    else:
        return Claim(ONLY_PASSES_DATA, "unknown", "unknown", "low", (*evidence, PASSES_DATA_HOW))
    parts = [part for part in (_schedule(signs), _micro_batches(signs)) if part]
    evidence += [f"{signs.passes} backward passes a step"] if signs.passes else []
    name = f"pipeline parallel ({', '.join(parts)})" if parts else "pipeline parallel"
    return Claim(name, "pipeline", "unknown", confidence, tuple(evidence))


def _passed_on(signs: StrategySigns) -> list[Traffic]:
    return [t for t in signs.select(P2P) if not CONTEXT_GROUP.search(t.group)]


def may_be_stage(signs: StrategySigns) -> bool:
    """Whether a rank may be a stage of a pipeline by what it passes on, or it does not show.

    A stage that trains sends and receives, activations and gradients, and not only behind its backward pass.
    """
    traffic = _passed_on(signs)
    ops = {t.op for t in traffic}
    both = "send_recv" in ops or {"send", "recv"} <= ops
    return not signs.passes or (both and any(t.phase not in AFTER_BACKWARD for t in traffic))


def may_be_pipeline(ranks: Sequence[StrategySigns]) -> bool:
    """Whether ranks that send and receive may be stages: one that trains may be, or none trains."""
    training = [may_be_stage(signs) for signs in ranks if signs.passes]
    return not training or any(training)


def _schedule(signs: StrategySigns) -> str:
    if "schedule" in signs.seen:
        return "interleaved or zero-bubble schedule"
    if signs.passes < 2:
        return ""
    return "1F1B" if signs.alternations else "GPipe"


def _micro_batches(signs: StrategySigns) -> str:
    return f"{signs.passes} micro-batches" if signs.passes > 1 else ""
