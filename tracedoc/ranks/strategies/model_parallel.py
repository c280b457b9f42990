"""Recognise models that are split: by tensors, experts, sequences, or the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracedoc.ranks.strategies.claim import BACKWARD, Claim, is_large, may_be_large, per_step
from tracedoc.timeline.phases import Phase
from tracedoc.timeline.strategy_signs import SHARDED_MARKS, StrategySigns, Traffic

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
        return Claim("tensor parallel", "tensor-parallel", "unknown", "high",
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
    return Claim(name, "tensor-parallel", "unknown", confidence, evidence)


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
