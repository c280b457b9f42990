"""Compute what each strategy sends in a step, how long that takes, and how long the step is.

Ring algorithms: an all-reduce sends 2 (n-1)/n of its bytes from each GPU, a gather or scatter (n-1)/n. A call
takes ``latency + bytes x factor / bandwidth``. Arithmetic is 6 FLOPs a parameter and token (Kaplan et al.
2020, arXiv 2001.08361) and 12 a layer, position and width for attention (Chowdhery et al. 2022, arXiv
2204.02311, appendix B), at a stated share of the GPU's peak.
"""

from __future__ import annotations

from math import ceil

import msgspec

from tracedoc.planner.hardware import Cluster, LinkKind
from tracedoc.planner.memory import frozen_bytes, model_states, optimizer_bytes
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.strategies import STRATEGIES, Strategy, shards

DDP_BUCKET_BYTES = 25 << 20
"""The default of ``bucket_cap_mb``."""

HOST_LINK_GBPS = 16.0
"""What copies between host and GPU reach over PCIe 4: an estimate."""
HOST_MEMORY_GBPS = 100.0
"""What all optimizers of a node on its CPUs read and write: an estimate for a server of two sockets."""
NVME_GBPS = 6.0
"""What the NVMe drives of a node read or write: an estimate for two drives."""


class Transfer(msgspec.Struct, frozen=True):
    """One kind of collective in a step: ``calls`` over ``size`` bytes in all, in a group of ``group`` GPUs.

    ``size`` is the whole buffer (the gathered one of a gather, the unreduced one of a reduce-scatter).
    ``phase`` is "forward", "backward" or "step"; in the last nothing runs beside it. ``route`` is "inside" a
    node, "all" GPUs in one ring, or "replicas": one ring over the nodes for each GPU of a node.
    """

    op: str
    phase: str
    calls: int
    size: float
    group: int
    route: str

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends."""
        return self.size * (2 if self.op == "all-reduce" else 1) * (self.group - 1) / self.group


class Step(msgspec.Struct, frozen=True):
    """A predicted step in milliseconds; communication is all hidden at best and not at all at worst.

    What cannot hide is in both: the first gather, the last reduction, and what follows the optimizer.
    """

    compute_ms: float
    optimizer_ms: float
    host_ms: float
    comm_ms: float
    best_ms: float
    worst_ms: float

    @property
    def middle_ms(self) -> float:
        """The middle of the range, to order strategies by."""
        return (self.best_ms + self.worst_ms) / 2


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
        reduce = Transfer("all-reduce", "backward", calls, size, n, route)
        if strategy.split:
            weights = float(trained * (precision.master or c))
            return reduce, Transfer("broadcast", "step", n, weights, n, route)
        return (reduce,)
    units = question.model.blocks + 1
    if strategy.family == "deepspeed" and not strategy.gathers:
        size = float(trained * c)
        calls = max(1, ceil(trained / 50e6))
        return (
            Transfer("reduce-scatter", "backward", calls, size, n, route),
            Transfer("all-gather", "step", calls, size, n, route),
        )
    weights = trained * c + frozen_bytes(question)
    # The configuration reduces in fp32 under FSDP; DeepSpeed reduces in the dtype it trains in.
    gradients = float(trained * (4 if strategy.family == "fsdp" and precision.master else c))
    group = shards(strategy, n, nodes)
    route = "inside" if strategy.hybrid else route
    found = [
        Transfer("all-gather", "forward", units, weights, group, route),
        Transfer("reduce-scatter", "backward", units, gradients, group, route),
    ]
    if strategy.gathers == "unit":
        found.insert(1, Transfer("all-gather", "backward", units, weights, group, route))
    if strategy.hybrid:
        found.append(Transfer("all-reduce", "backward", units, gradients / group, nodes, "replicas"))
    return tuple(found)


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
        return reached(across) / question.gpus_per_node, latency
    bound = reached(inside) if inside and question.gpus_per_node > 1 else reached(across)
    return min(reached(across), bound), latency


def seconds(transfer: Transfer, question: Question, cluster: Cluster) -> float | None:
    """Return how long a transfer takes in all its calls."""
    link = bandwidth(transfer, question, cluster)
    if link is None:
        return None
    gbps, latency = link
    return transfer.calls * latency + transfer.sent / (gbps * 1e9)


def step_flops(question: Question, *, checkpointing: bool) -> tuple[float, float]:
    """Return the FLOPs of one GPU's forward and backward pass; recomputation belongs to backward.

    With adapters the weights' gradients are not computed: 4 FLOPs a parameter and token instead of 6.
    """
    model, training = question.model, question.training
    linear = 2.0 * model.active_parameters * training.tokens
    attention = 4.0 * model.blocks * model.attentions * model.q_width * training.sequence * training.tokens
    backward = linear * (1 if question.frozen else 2) + 2 * attention
    forward = linear + attention
    return forward, backward + (forward if checkpointing else 0.0)


def predict(
    question: Question,
    strategy: Strategy,
    cluster: Cluster,
    *,
    checkpointing: bool,
    utilisation: float,
    measured_compute_ms: float | None = None,
) -> Step | None:
    """Return the predicted step, ``None`` where the GPU or a link that is used is not known.

    ``measured_compute_ms`` is a step's computation on this GPU, its update included, in place of the
    estimate; checkpointing adds its forward pass to it again.
    """
    gpu = cluster.gpu
    precision = PRECISIONS[question.training.precision]
    peak = None if gpu is None else (gpu.half_tflops if precision.compute == 2 else gpu.fp32_tflops)
    if gpu is None or peak is None:
        return None
    rate = peak * 1e12 * utilisation
    forward, backward = (f / rate for f in step_flops(question, checkpointing=checkpointing))
    if measured_compute_ms is not None:
        once = sum(step_flops(question, checkpointing=False)) / rate
        forward, backward = (part / once * measured_compute_ms / 1e3 for part in (forward, backward))
    by_phase = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    unhidden = {"forward": 0.0, "backward": 0.0}
    for transfer in transfers(question, strategy):
        taken = seconds(transfer, question, cluster)
        if taken is None:
            return None
        by_phase[transfer.phase] += taken
        if transfer.phase in unhidden:
            unhidden[transfer.phase] += taken / transfer.calls
    optimizer, host = _update(question, strategy, gpu.hbm_gbps)
    optimizer = optimizer if measured_compute_ms is None else 0.0
    fixed = optimizer + host + by_phase["step"]
    best = fixed
    for phase, compute in (("forward", forward), ("backward", backward)):
        comm = by_phase[phase]
        best += max(comm, compute + unhidden[phase])
    worst = fixed + forward + backward + by_phase["forward"] + by_phase["backward"]
    comm = sum(by_phase.values())
    return Step(*(1e3 * s for s in (forward + backward, optimizer, host, comm, min(best, worst), worst)))


def _update(question: Question, strategy: Strategy, hbm_gbps: float) -> tuple[float, float]:
    # The update reads and writes states and parameters and reads gradients: bound by memory.
    training = question.training
    precision = PRECISIONS[training.precision]
    part = shards(strategy, question.gpus, question.nodes) if "optimizer" in strategy.split else 1
    owned = question.trainable / part
    each = 2 * (optimizer_bytes(training, question.model.hidden) + (precision.master or precision.compute))
    touched = owned * (each + precision.gradient)
    if training.offload == "none":
        return touched / (hbm_gbps * 1e9), 0.0
    node = question.gpus_per_node
    copied = owned * (precision.gradient + precision.compute)
    if training.offload != "optimizer":
        copied += 2 * (question.trainable * precision.compute + frozen_bytes(question)) / part
    host = copied / (HOST_LINK_GBPS * 1e9) + touched * node / (HOST_MEMORY_GBPS * 1e9)
    if training.offload == "nvme":
        host += 2 * model_states(question, STRATEGIES["zero-3"]).host * node / (NVME_GBPS * 1e9)
    return 0.0, host
