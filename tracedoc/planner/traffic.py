"""Compute what the GPUs of a layout send: what, how much, in how many calls, over which link, for how long.

Ring algorithms: an all-reduce sends 2 (n-1)/n of its bytes from each GPU, a gather or scatter (n-1)/n. A call
takes ``latency + bytes x factor / bandwidth``. Tensor parallelism gathers and scatters the residual stream
twice a block in forward and again in backward (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.planner.hardware import Cluster
from tracedoc.planner.layouts import Layout, stage_blocks
from tracedoc.planner.memory import Weights, frozen_bytes, largest_stage, state_bytes
from tracedoc.planner.setup import PRECISIONS, Question

DDP_BUCKET_BYTES = 25 << 20
"""The default of ``bucket_cap_mb``."""

MEGATRON_BUCKET = 40e6
"""Gradients that Megatron reduces in a call."""

OVERLAP_EXPOSED = 0.4
"""Share of tensor parallelism's communication that is not hidden where it is overlapped.

Fitted to NeMo's published runs (make bench-plan); taken for experts' all-to-all where it is overlapped.
"""


DISPATCHED = 0.89
"""What HybridEP's kernels reach of what gathers do over NVLink: 600 to 730 GB/s on 36 to 8 GPUs of GB200.

Each token counts once for each GPU there (github.com/deepseek-ai/DeepEP, docs/README_Hybrid-EP.md, BF16).
"""


class Transfer(msgspec.Struct, frozen=True):
    """One kind of collective in an update: ``calls`` over ``size`` bytes, in a group of ``group`` GPUs.

    ``what`` travels: "data" (parameters and gradients), "experts' data", or of the work that is split
    "tensor", "context", "expert" or "pipeline". ``size`` is the whole buffer (the gathered one of a gather,
    the unreduced one of a reduce-scatter), ``distance`` how many GPUs are from one of the group to the next.
    ``phase`` is "forward", "backward" or "step"; in the last nothing runs beside it. ``exposed`` is the share
    that computation does not hide, ``None`` where that follows from the link. What does not travel in
    ``every_round`` of gradient accumulation travels in the last one.
    """

    what: str
    op: str
    phase: str
    calls: float
    size: float
    group: int
    distance: int = 1
    every_round: bool = True
    exposed: float | None = None

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends."""
        if self.op == "send":
            return self.size
        return self.size * (2 if self.op == "all-reduce" else 1) * (self.group - 1) / self.group

    def seconds(self, gbps: float, latency: float) -> float:
        """How long it takes in all its calls over a link of :func:`bandwidth`."""
        return self.calls * latency + self.sent / (gbps * 1e9)

    @property
    def of_states(self) -> bool:
        """Whether it carries parameters or gradients, beside computation that does not wait for each call."""
        return self.what in ("data", "experts' data")


def transfers(question: Question, layout: Layout) -> tuple[Transfer, ...]:
    """The collectives of one update, those of one micro-batch where they travel in every round."""
    every = (*_of_states(question, layout), *_of_work(question, layout))
    alone = () if "data" in layout.overlapped else ("data", "experts' data")
    shown = (replace(one, exposed=1.0) if one.what in alone else one for one in every)
    return tuple(one for one in shown if one.group > 1 and one.size)


def _of_states(question: Question, layout: Layout) -> Iterator[Transfer]:
    """What parameters and gradients travel, of the largest stage."""
    family, weights = layout.family, largest_stage(question, layout)
    if family == "ddp":
        yield from _replicated(question, layout, weights)
    elif family == "megatron":
        yield from _bucketed(question, layout, weights)
    elif not layout.states.gathers:
        yield from _zero_1_and_2(question, layout, weights)
    else:
        yield from _gathered_by_unit(question, layout, weights)


def _replicated(question: Question, layout: Layout, weights: Weights) -> Iterator[Transfer]:
    _, gradient, _ = state_bytes(question, layout)
    size = float(weights.all * gradient)
    calls = max(1, math.ceil(size / DDP_BUCKET_BYTES))
    yield Transfer("data", "all-reduce", "backward", calls, size, layout.data, every_round=False)
    if layout.states.split:
        precision = PRECISIONS[question.training.precision]
        updated = float(weights.all * (precision.master or precision.compute))
        yield Transfer("data", "broadcast", "step", layout.data, updated, layout.data)


def _zero_1_and_2(question: Question, layout: Layout, weights: Weights) -> Iterator[Transfer]:
    size = float(weights.all * PRECISIONS[question.training.precision].compute)
    calls = max(1, math.ceil(weights.all / 50e6))
    each_time = "gradients" in layout.states.split
    yield Transfer("data", "reduce-scatter", "backward", calls, size, layout.data, every_round=each_time)
    yield Transfer("data", "all-gather", "step", calls, size, layout.data)


def _data_groups(layout: Layout, weights: Weights) -> tuple[tuple[str, float, int, int], ...]:
    """The weights that are sharded over the same GPUs: their name and number, the GPUs, how far apart."""
    apart = layout.expert * layout.cut_experts
    return (
        ("data", weights.dense, layout.shards, layout.tensor),
        ("experts' data", weights.experts, layout.expert_shards, apart),
    )


def _bucketed(question: Question, layout: Layout, weights: Weights) -> Iterator[Transfer]:
    """Megatron's distributed optimizer: once an update gradients to their owners, and parameters back."""
    weight, gradient, _ = state_bytes(question, layout)
    calls = max(1, round(weights.all / MEGATRON_BUCKET))
    for what, count, group, distance in _data_groups(layout, weights):
        for op, phase, each in (
            ("all-gather", "forward", weight),
            ("reduce-scatter", "backward", gradient),
        ):
            yield Transfer(what, op, phase, calls, count * each, group, distance, every_round=False)


def _gathered_by_unit(question: Question, layout: Layout, weights: Weights) -> Iterator[Transfer]:
    """FSDP, ZeRO-3 and torchtitan: each unit is gathered as it is needed, and its gradients are reduced.

    A pipeline of torchtitan gathers its stage once.
    """
    precision = PRECISIONS[question.training.precision]
    _, blocks, _ = stage_blocks(question.model.blocks, layout)
    units = blocks + 1
    # The configuration may reduce in fp32 under FSDP; DeepSpeed reduces in the dtype it trains in.
    reduced = (layout.family != "deepspeed" and precision.reduce) or precision.compute
    for what, count, group, distance in _data_groups(layout, weights):
        frozen = frozen_bytes(question) if what == "data" else 0.0
        size, each_round = count * precision.compute + frozen, layout.pipeline == 1
        gather = Transfer(what, "all-gather", "forward", units, size, group, distance, each_round)
        yield gather
        if layout.states.gathers == "unit" and each_round:
            near = question.gpus_per_node if layout.states.kept_in_node else group
            yield replace(gather, phase="backward", group=near)
        reduce = replace(gather, op="reduce-scatter", phase="backward", size=float(count * reduced))
        yield reduce
        yield replace(
            reduce, op="all-reduce", size=reduce.size / group, group=layout.replicas, distance=group
        )


def _of_work(question: Question, layout: Layout) -> Iterator[Transfer]:
    """What the GPUs that share the work of a block, or its stages, send each other for a micro-batch."""
    training, model = question.training, question.model
    c, tensor, context = PRECISIONS[training.precision].compute, layout.tensor, layout.context
    _, blocks, _ = stage_blocks(model.blocks, layout)
    stream = training.tokens / context * model.hidden * c
    passes = 3 if training.checkpointing == "on" else 2
    calls = blocks * 4 * passes
    shown = OVERLAP_EXPOSED if "tensor" in layout.overlapped else 1.0
    yield Transfer("tensor", "all-gather", "forward", calls, calls * stream, tensor, exposed=shown)
    yield _of_a_sequence(question, layout, blocks, passes)
    copies, group = max(1.0, question.routed), layout.expert
    if layout.flex and group > 1:
        copies = elsewhere(copies, group) * group / (group - 1)
    met = training.tokens / layout.split_work * copies * model.hidden * c
    calls, shown = blocks * 2 * passes, OVERLAP_EXPOSED if overlaps_experts(question, layout) else 1.0
    yield Transfer(
        "expert",
        "dispatch" if layout.flex else "all-to-all",
        "forward",
        calls,
        calls * met,
        group,
        layout.cut_experts,
        exposed=shown,
    )
    edges, apart = 2 * layout.chunks, question.gpus // layout.pipeline
    yield Transfer("pipeline", "send", "forward", edges, edges * stream / tensor, layout.pipeline, apart)


def _of_a_sequence(question: Question, layout: Layout, blocks: int, passes: int) -> Transfer:
    """What the GPUs of a sequence send: keys and values of it all, or heads in exchange for tokens.

    An exchange gathers queries, keys and values of a part of the heads, and gives their results back;
    attention waits for it (Jacobs et al. 2023, arXiv 2309.14509). What goes round is sent beside attention.
    """
    model, tokens = question.model, question.training.tokens
    each = PRECISIONS[question.training.precision].compute * tokens / layout.tensor
    group, apart = layout.context, layout.tensor
    if layout.shares_context == "all-to-all":
        calls, size = blocks * 2 * passes, 2 * (model.q_width + model.kv_width) * each / group
        return Transfer(
            "context", "all-to-all", "forward", calls, blocks * passes * size, group, apart, exposed=1.0
        )
    calls = blocks * (passes + 1)
    return Transfer(
        "context", "all-gather", "forward", calls, calls * 2 * model.kv_width * each, group, apart
    )


def sent_in_an_update(question: Question, layout: Layout) -> float:
    """The bytes that each GPU sends from one update to the next."""
    return sum(
        one.sent * (layout.rounds if one.every_round and one.phase != "step" else 1)
        for one in transfers(question, layout)
    )


def bandwidth(transfer: Transfer, question: Question, cluster: Cluster) -> tuple[float, float] | None:
    """The GB/s of one GPU's share of a link and the seconds a call costs, ``None`` where it is not known.

    A ring over nodes enters and leaves each node once, so it is bounded by all adapters of the node together.
    The GPUs between those of a ring have rings of their own, which share the adapters. In an all-to-all
    between nodes all GPUs of a node do.
    """
    inside, across = cluster.inside, cluster.across
    group, distance, local = transfer.group, transfer.distance, question.gpus_per_node
    exchanged = DISPATCHED if transfer.op == "dispatch" else 1.0
    if inside and transfer.op == "all-to-all":
        exchanged = inside.exchanged
    if not _spans_nodes(question, group, distance):
        return (exchanged * inside.reached(group, distance), inside.latency_us * 1e-6) if inside else None
    several = distance < local  # of the group are in a node
    if across is None or (inside is None and several):
        return None
    # The table's latency is that of rings over 32 ranks; each rank adds a hop.
    latency = across.latency_us * 1e-6 * max(0.25, group / 32)
    if transfer.op in ("all-to-all", "dispatch") and inside is not None:
        nodes = group * distance / local
        away = (group - local / distance) / (group - 1) if several else 1.0
        if transfer.op == "dispatch" and several:
            away = elsewhere(question.routed, nodes) / elsewhere(question.routed, group)
        each = across.reached(local) / local
        return 1 / (away / each + (1 - away) / (exchanged * inside.reached(local))), latency
    shared = across.reached(local) / min(distance, local)
    return (min(shared, inside.reached(local)) if inside and several else shared), latency


def elsewhere(routed: float, places: float) -> float:
    """On how many other GPUs, or nodes, the experts of a token are, where each place is as likely.

    DeepEP sends a token once to each (github.com/deepseek-ai/DeepEP), NCCL once to each expert.
    """
    return (places - 1) * (1 - math.pow(1 - 1 / places, routed))


def _spans_nodes(question: Question, group: int, distance: int) -> bool:
    return group * distance > question.gpus_per_node


def overlaps_experts(question: Question, layout: Layout) -> bool:
    """Whether Megatron computes on another micro-batch beside an all-to-all: worth it between nodes.

    Its pipelines have to be interleaved for that.
    """
    interleaved = layout.pipeline == 1 or layout.chunks > 1
    apart = _spans_nodes(question, layout.expert, layout.cut_experts)
    able = layout.family == "megatron" and "expert" in layout.overlapped
    return able and layout.expert > 1 and apart and interleaved
