"""Predict a layout's step: what each micro-batch computes and sends on a stage, the bubble, the reduction.

Tensor parallelism gathers and scatters the residual stream twice a block in forward and again in backward
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2); a pipeline of p stages and m micro-batches waits
for (p - 1) / v of them more (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from tracedoc.planner.hardware import Cluster, Gpu, LinkKind
from tracedoc.planner.layout_memory import SHARDED, stage_weights
from tracedoc.planner.layouts import Layout, stage_blocks
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.timing import FP8_SPEEDUP, Step, computation, exposed_share

NARROW, WIDE = (0.80, 1.30), (0.65, 1.60)
"""Spread around the prediction, for GPUs of which runs are published and for others."""

MEGATRON_FP8, MEGATRON_ATTENTION, MEGATRON_TENSOR_SHOWN = 1.9, 0.5, 0.5
"""Transformer Engine on GPUs with 8-bit arithmetic, fitted to NeMo's published runs (make bench-plan).

The gain of 8-bit products over 16, the share of the peak that fused attention reaches, and the share of what
tensor parallelism sends that ``--tp-comm-overlap`` leaves to see.
"""


class Sent(msgspec.Struct, frozen=True):
    """Bytes that one GPU sends, in ``calls`` collectives, for one micro-batch or (``once``) for one update.

    They travel over ``link`` at ``gbps``, each call costing ``latency`` seconds; ``shown`` is the share that
    computation does not hide as far as is known.
    """

    what: str
    bytes: float
    calls: float
    gbps: float
    latency: float
    shown: float
    once: bool = False

    @property
    def seconds(self) -> float:
        """How long these collectives take."""
        return self.calls * self.latency + self.bytes / (self.gbps * 1e9)


def traffic(
    question: Question, layout: Layout, cluster: Cluster, *, checkpointing: bool
) -> list[Sent] | None:
    """Return what each GPU of the largest stage sends, ``None`` where a link that is used is not known."""
    training, model = question.training, question.model
    precision = PRECISIONS[training.precision]
    c, wide = precision.compute, precision.master or precision.compute
    tensor, context, shards = layout.tensor, layout.context, layout.shards
    _, blocks, _ = stage_blocks(model.blocks, layout)
    stream = training.tokens / context * model.hidden * c
    passes = 3 if checkpointing and training.checkpointing != "selective" else 2
    keys = 2 * model.kv_width / tensor * training.tokens * c
    met = training.tokens / (context * tensor) * max(1, model.experts_met) * model.hidden * c
    weights = stage_weights(question, layout, blocks, ends=1 if layout.pipeline > 1 else 2)
    gathers, units = (2 if layout.pipeline == 1 else 1), blocks + 1
    if layout.family == "megatron":
        gathers, units = 1, max(1, round(weights * wide / 160e6))
    tensor_shown = MEGATRON_TENSOR_SHOWN if layout.family == "megatron" else 1.0
    edges = 2 * layout.chunks
    each_round = layout.family == "torchtitan" and layout.pipeline == 1
    asked = (
        # What, its bytes and calls, of how many GPUs, how far apart, what is not hidden (None: by the link).
        ("tensor", blocks * 4 * passes * stream, blocks * 4 * passes, tensor, 1, tensor_shown),
        ("context", blocks * (passes + 1) * keys, blocks * (passes + 1), context, tensor, None),
        ("expert", blocks * 2 * passes * met, blocks * 2 * passes, layout.expert, tensor, 1.0),
        ("data", weights * (gathers * c + wide), (gathers + 1) * units, shards, tensor, None),
        ("pipeline", edges * stream / tensor, edges, layout.pipeline, question.gpus // layout.pipeline, None),
    )
    found = []
    for what, size, calls, group, distance, shown in asked:
        if group == 1:
            continue
        rate = _rate(question, cluster, group, distance)
        if rate is None:
            return None
        sent = size if what == "pipeline" else size * (group - 1) / group
        shown = exposed_share(rate[0]) if shown is None else shown
        found.append(Sent(what, sent, calls, *rate, shown, once=what == "data" and not each_round))
    return found


def _rate(question: Question, cluster: Cluster, group: int, distance: int) -> tuple[float, float] | None:
    """Return GB/s and seconds a call of a ring of so many GPUs that are so far apart.

    The GPUs between them have rings of their own, which share the adapters of a node.
    """

    def reached(link: LinkKind) -> float:
        return link.gbps * link.efficiency

    inside, across = cluster.inside, cluster.across
    if group * distance <= question.gpus_per_node:
        return (reached(inside), inside.latency_us * 1e-6) if inside else None
    if across is None or (inside is None and distance < question.gpus_per_node):
        return None
    shared = reached(across) / min(distance, question.gpus_per_node)
    bound = reached(inside) if inside and distance < question.gpus_per_node else shared
    return min(shared, bound), across.latency_us * 1e-6 * max(0.25, group / 32)


def sent_in_an_update(found: list[Sent], layout: Layout) -> float:
    """Return the bytes that a GPU sends from one update to the next."""
    return sum(one.bytes * (1 if one.once else layout.rounds) for one in found)


def layout_step(
    question: Question,
    layout: Layout,
    cluster: Cluster,
    *,
    checkpointing: bool,
    utilisation: float | None = None,
    scale: float = 1.0,
    idle_ms: float = 0.0,
) -> Step | None:
    """Return the predicted step, ``None`` where the GPU or a link that is used is not known.

    ``question`` has the layout's micro-batch. The slowest stage sets the pace: one with most blocks, or the
    last with the head.
    """
    gpu, model = cluster.gpu, question.model
    sent = traffic(question, layout, cluster, checkpointing=checkpointing)
    if gpu is None or sent is None:
        return None
    own = _with_its_kernels(gpu, question, layout)
    parts = computation(question, SHARDED, own, checkpointing=checkpointing, utilisation=utilisation)
    if parts is None:
        return None
    compute = scale * sum(parts) * _slowest(question, layout) / (layout.tensor * layout.context)
    _, blocks, _ = stage_blocks(model.blocks, layout)
    weights = stage_weights(question, layout, blocks, ends=1)
    optimizer = weights * 28 / layout.shards / (gpu.hbm_gbps * 1e9)
    passes = layout.rounds + (layout.pipeline - 1) / layout.chunks

    def step(best: float, least: float) -> float:
        # ``best`` scales what is exposed as known, ``least`` is shown at least.
        shown = {one.what: max(least, best * one.shown) * one.seconds for one in sent}
        each = sum(shown[one.what] for one in sent if not one.once)
        update = sum(shown[one.what] for one in sent if one.once)
        return passes * (compute + each) + update + optimizer + idle_ms / 1e3

    low, high = NARROW if gpu.matmul else WIDE
    comm = sum(one.seconds * (1 if one.once else layout.rounds) for one in sent)
    times = (layout.rounds * compute, optimizer, 0.0, comm)
    span = (low * step(0.5, 0.0), step(1.0, 0.0), high * step(1.0, 1.0))
    return Step(*(1e3 * time for time in (*times, *span)))


def _with_its_kernels(gpu: Gpu, question: Question, layout: Layout) -> Gpu:
    """Return the GPU with the shares of its peak that the framework's kernels reach."""
    if layout.family != "megatron" or not gpu.fp8:
        return gpu
    matmul, attention = gpu.shares
    if question.training.fp8:
        matmul *= MEGATRON_FP8 / FP8_SPEEDUP
    return replace(gpu, matmul=matmul, attention=max(MEGATRON_ATTENTION, attention))


def _slowest(question: Question, layout: Layout) -> float:
    """Return the share of the model's computation that the slowest stage has."""
    model = question.model
    if layout.pipeline == 1:
        return 1.0
    _, most, last = stage_blocks(model.blocks, layout)
    head = model.vocabulary * model.hidden
    block = max(1.0, (model.active_parameters - model.outside_parameters) / model.blocks)
    return max(most, last + head / block) / (model.blocks + head / block)
