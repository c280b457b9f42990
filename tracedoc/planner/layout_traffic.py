"""Compute what the GPUs of a layout send: what, how much, in how many calls, and over which link.

Tensor parallelism gathers and scatters the residual stream twice a block in forward and again in backward
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

import msgspec

from tracedoc.planner.hardware import Cluster, LinkKind
from tracedoc.planner.layout_memory import stage_weights
from tracedoc.planner.layouts import Layout, stage_blocks
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.timing import exposed_share

MEGATRON_EXPOSED = 0.5
"""Share of tensor parallelism's communication that ``--tp-comm-overlap`` does not hide.

Fitted to NeMo's published runs (make bench-plan); taken for experts' all-to-all where it is overlapped.
"""


class Sent(msgspec.Struct, frozen=True):
    """Bytes that one GPU sends, in ``calls`` collectives, for one micro-batch or (``once``) for one update.

    They travel at ``gbps``, each call costing ``latency`` seconds; ``exposed`` is the share that computation
    is expected not to hide.
    """

    what: str
    bytes: float
    calls: float
    gbps: float
    latency: float
    exposed: float
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
    tensor, context, expert, shards = layout.tensor, layout.context, layout.expert, layout.shards
    _, blocks, _ = stage_blocks(model.blocks, layout)
    stream = training.tokens / context * model.hidden * c
    passes = 3 if checkpointing and training.checkpointing != "selective" else 2
    keys = 2 * model.kv_width / tensor * training.tokens * c
    met = training.tokens / (context * tensor) * max(1, model.experts_met) * model.hidden * c
    weights = stage_weights(question, layout, blocks, ends=1 if layout.pipeline > 1 else 2)
    gathers, units = (2 if layout.pipeline == 1 else 1), blocks + 1
    if layout.family == "megatron":
        gathers, units = 1, max(1, round(weights.all * wide / 160e6))
    each, calls_of_data = gathers * c + wide, (gathers + 1) * units
    tensor_exposed = MEGATRON_EXPOSED if layout.family == "megatron" else 1.0
    experts_exposed = MEGATRON_EXPOSED if overlaps_experts(question, layout) else 1.0
    edges = 2 * layout.chunks
    each_round = layout.family == "torchtitan" and layout.pipeline == 1
    asked = (
        # What, its bytes and calls, of how many GPUs, how far apart, what is not hidden (None: by the link).
        ("tensor", blocks * 4 * passes * stream, blocks * 4 * passes, tensor, 1, tensor_exposed),
        ("context", blocks * (passes + 1) * keys, blocks * (passes + 1), context, tensor, None),
        ("expert", blocks * 2 * passes * met, blocks * 2 * passes, expert, tensor, experts_exposed),
        ("data", weights.dense * each, calls_of_data, shards, tensor, None),
        ("experts' data", weights.experts * each, calls_of_data, shards // expert, tensor * expert, None),
        ("pipeline", edges * stream / tensor, edges, layout.pipeline, question.gpus // layout.pipeline, None),
    )
    found = []
    for what, size, calls, group, distance, exposed in asked:
        if group == 1 or not size:
            continue
        route = _all_to_all_rate if what == "expert" else _rate
        rate = route(question, cluster, group, distance)
        if rate is None:
            return None
        sent = size if what == "pipeline" else size * (group - 1) / group
        exposed = exposed_share(rate[0]) if exposed is None else exposed
        found.append(Sent(what, sent, calls, *rate, exposed, once="data" in what and not each_round))
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


def _all_to_all_rate(
    question: Question, cluster: Cluster, group: int, distance: int
) -> tuple[float, float] | None:
    """Return GB/s and seconds a call of an all-to-all; between nodes each node's GPUs share adapters."""
    if not _spans_nodes(question, group, distance):
        return _rate(question, cluster, group, distance)
    if cluster.across is None or cluster.inside is None:
        return None
    here = max(1, question.gpus_per_node // distance)
    away = (group - here) / (group - 1)
    adapter = cluster.across.gbps * cluster.across.efficiency / question.gpus_per_node
    seconds = away / adapter + (1 - away) / (cluster.inside.gbps * cluster.inside.efficiency)
    return 1 / seconds, cluster.across.latency_us * 1e-6 * max(0.25, group / 32)


def _spans_nodes(question: Question, group: int, distance: int) -> bool:
    return group * distance > question.gpus_per_node


def overlaps_experts(question: Question, layout: Layout) -> bool:
    """Return whether Megatron computes on another micro-batch beside an all-to-all: worth it between nodes.

    Its pipelines have to be interleaved for that.
    """
    interleaved = layout.pipeline == 1 or layout.chunks > 1
    apart = _spans_nodes(question, layout.expert, layout.tensor)
    return layout.family == "megatron" and layout.expert > 1 and apart and interleaved


def sent_in_an_update(found: list[Sent], layout: Layout) -> float:
    """Return the bytes that a GPU sends from one update to the next."""
    return sum(one.bytes * (1 if one.once else layout.rounds) for one in found)
