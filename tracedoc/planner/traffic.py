"""Compute what each strategy sends in a step, and how long a transfer takes.

Ring algorithms: an all-reduce sends 2 (n-1)/n of its bytes from each GPU, a gather or scatter (n-1)/n. A call
takes ``latency + bytes x factor / bandwidth``.
"""

from __future__ import annotations

from math import ceil

import msgspec

from tracedoc.planner.hardware import Cluster, LinkKind
from tracedoc.planner.memory import frozen_bytes
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.strategies import Strategy, shards

DDP_BUCKET_BYTES = 25 << 20
"""The default of ``bucket_cap_mb``."""


class Transfer(msgspec.Struct, frozen=True):
    """One kind of collective in a step: ``calls`` over ``size`` bytes in all, in a group of ``group`` GPUs.

    ``size`` is the whole buffer (the gathered one of a gather, the unreduced one of a reduce-scatter).
    ``phase`` is "forward", "backward" or "step"; in the last nothing runs beside it. ``route`` is "inside" a
    node, "all" GPUs in one ring, or "replicas": one ring over the nodes for each GPU of a node. What does not
    travel in ``every_round`` of gradient accumulation travels in the last one.
    """

    op: str
    phase: str
    calls: int
    size: float
    group: int
    route: str
    every_round: bool = True

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends."""
        return self.size * (2 if self.op == "all-reduce" else 1) * (self.group - 1) / self.group


def transfers(question: Question, strategy: Strategy) -> tuple[Transfer, ...]:
    """Return the collectives of one step with one micro-batch."""
    n, nodes = question.gpus, question.nodes
    if n == 1:
        return ()
    precision = PRECISIONS[question.training.precision]
    trained, c = question.trainable, precision.compute
    route = "all" if nodes > 1 else "inside"
    if strategy.family == "ddp":
        size = float(trained * (precision.master or precision.gradient))
        calls = max(1, ceil(size / DDP_BUCKET_BYTES))
        reduce = Transfer("all-reduce", "backward", calls, size, n, route, every_round=False)
        if strategy.split:
            weights = float(trained * (precision.master or c))
            return reduce, Transfer("broadcast", "step", n, weights, n, route)
        return (reduce,)
    units = question.model.blocks + 1
    if strategy.family == "deepspeed" and not strategy.gathers:
        size = float(trained * c)
        calls = max(1, ceil(trained / 50e6))
        return (
            Transfer("reduce-scatter", "backward", calls, size, n, route, "gradients" in strategy.split),
            Transfer("all-gather", "step", calls, size, n, route),
        )
    weights = trained * c + frozen_bytes(question)
    # The configuration may reduce in fp32 under FSDP; DeepSpeed reduces in the dtype it trains in.
    gradients = float(trained * ((strategy.family == "fsdp" and precision.reduce) or c))
    group = shards(strategy, n, nodes)
    route = "inside" if strategy.hybrid and strategy.over <= 1 else route
    found = [
        Transfer("all-gather", "forward", units, weights, group, route),
        Transfer("reduce-scatter", "backward", units, gradients, group, route),
    ]
    if strategy.gathers == "unit":
        near = (question.gpus_per_node, "inside") if strategy.kept_in_node else (group, route)
        found.insert(1, Transfer("all-gather", "backward", units, weights, *near))
    if strategy.hybrid:
        again = "replicas" if nodes > 1 else "inside"
        found.append(Transfer("all-reduce", "backward", units, gradients / group, n // group, again))
    return tuple(found)


def sent_in_a_step(question: Question, strategy: Strategy) -> float:
    """Return the bytes that each GPU sends from one update to the next."""
    rounds = question.training.accumulation
    every = ((t, rounds if t.every_round and t.phase != "step" else 1) for t in transfers(question, strategy))
    return sum(t.sent * times for t, times in every)


def bandwidth(transfer: Transfer, question: Question, cluster: Cluster) -> tuple[float, float] | None:
    """Return the GB/s of one GPU's ring and the seconds a call costs, ``None`` where a link is not known.

    A ring over nodes enters and leaves each node once, so it is bounded by all adapters of the node together;
    the replicas' rings share them.
    """

    def reached(link: LinkKind) -> float:
        return link.gbps * link.efficiency

    inside, across = cluster.inside, cluster.across
    if transfer.route == "inside":
        return (reached(inside), inside.latency_us * 1e-6) if inside else None
    if across is None:
        return None
    # The table's latency is that of rings over 32 ranks; each rank adds a hop.
    latency = across.latency_us * 1e-6 * max(0.25, transfer.group / 32)
    if transfer.route == "replicas":
        rings = min(question.gpus // transfer.group, question.gpus_per_node)
        return reached(across) / rings, latency
    bound = reached(inside) if inside and question.gpus_per_node > 1 else reached(across)
    return min(reached(across), bound), latency


def seconds(transfer: Transfer, question: Question, cluster: Cluster) -> float | None:
    """Return how long a transfer takes in all its calls."""
    link = bandwidth(transfer, question, cluster)
    if link is None:
        return None
    gbps, latency = link
    return transfer.calls * latency + transfer.sent / (gbps * 1e9)
