"""Predict how long a training step takes: arithmetic, memory traffic, communication and update.

Arithmetic is 6 FLOPs a parameter and token (Kaplan et al. 2020, arXiv 2001.08361) and 12 a layer, position
and width for attention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Matrix products and attention
reach a share of the GPU's peak; norms, activation functions and the loss are bound by its memory. The
shares and the constants below are fitted to published runs; ``make bench-plan`` prints how well they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from tracedoc.planner.activations import EAGER_LOGIT_BYTES, block_activations, mean_tokens, routed_bytes
from tracedoc.planner.hardware import Cluster, Gpu
from tracedoc.planner.layouts import STRATEGIES, Layout, data_parallel, stage_blocks
from tracedoc.planner.memory import frozen_bytes, largest_stage, model_states, optimizer_bytes, state_bytes
from tracedoc.planner.setup import PRECISIONS, Question, Training
from tracedoc.planner.shape import Linear, ModelShape, OneStep
from tracedoc.planner.traffic import bandwidth, transfers

PASSES_OVER_ACTIVATIONS = 9.2
"""How often the bytes that a block keeps for backward cross the memory of the GPU in forward and backward."""
COMPILED_PASSES = 0.5
"""What of these passes ``torch.compile`` leaves, by fusing what works element by element."""
LOGIT_TRAFFIC_BYTES = 48
"""Bytes that the loss moves for each logit, in forward and backward."""
RECOMPUTED_MATMUL = 0.8
"""What a recomputed matrix product takes of what the mean of forward and backward does."""
EXPOSED_SHARE, SLOW_EXPOSED_SHARE = 0.75, 0.30
"""Share of the communication beside computation that lengthens the step, by waiting or contention.

Collectives take memory traffic and multiprocessors from computation, the more the faster they are: the first
holds from :data:`CONTENTION_GBPS` on, the second for very slow ones. It is fitted to fms-fsdp's runs.
"""
CONTENTION_GBPS = 160.0
"""Bandwidth of a ring, from which faster ones lengthen the step no further."""
FP8_SPEEDUP = 1.45
"""Gain of matrix products in 8 bits over 16, with the conversions that they need."""

NARROW_SPREAD, WIDE_SPREAD = (0.91, 1.15), (0.72, 1.40)
"""Spread around the prediction, for GPUs of which runs are published and for others."""
WIDEST_RANGE = 1.5
"""The most that the worst of a range is over its best, for GPUs of which runs are published."""
NARROW_SPLIT, EXPERTS_SPLIT, WIDE_SPLIT = (0.83, 1.20), (0.84, 1.26), (0.65, 1.60)
"""Spread of layouts: of dense models, of those with experts, and for GPUs of which no run is published."""

GUESSED_LINK = (1.35, 0.75)
"""What is sent over PCIe may take so many times what is predicted: servers differ by switches and CPUs."""

NARROW_TRAFFIC = 1.9
"""How often what a product moves more, as its matrices are cut, crosses the memory of the GPU.

Its kernels have fewer tiles beside which it could hide. Fitted to torchtitan's and Megatron's published runs.
"""
MEGATRON_ATTENTION = 0.5
"""Share of the peak that Transformer Engine's attention reaches, fitted to NeMo's published runs."""
MEGATRON_MATMUL = 1.15
"""What Transformer Engine's products reach over what PyTorch's do, fitted to published runs in 16 bits."""
BIAS_SECONDS = 46e-12
"""What Megatron takes to add the bias of an expert's last matrix, for each number of its result.

Bias times weight, sum, putting the experts together again, and their gradients are kernels of their own
(``TEGroupedMLP._apply_bias``), which broadcast and convert. Fitted to gpt-oss, whose published runs take 43
to 58 ps on any GPU from H100 to GB300: it is not memory that bounds them.
"""
LAUNCH_SECONDS, LAUNCH_EACH_SECONDS = 0.9e-3, 0.33e-3
"""What the host needs to launch a block with experts, forward and backward, and each expert of a GPU.

Fitted to published runs of Megatron with micro-batches of one sequence, which take it on any GPU.
"""
LAUNCHED_AHEAD = 0.5
"""Share of the GPU's work on a block with experts beside which the host launches more.

In forward it waits for how many tokens each expert got, unless their number is fixed.
"""
FP8_RATE = 1.72
"""How many times faster Transformer Engine multiplies matrices in 8 bits than in 16, conversions apart.

Data sheets say twice. Fitted to published runs of Megatron.
"""
CONVERSION_BYTES = 6
"""What crosses the GPU's memory to convert a 16-bit number for 8-bit products: it is read for the largest
value, read to be scaled, and written twice, as it is and transposed (Transformer Engine, current scaling)."""


HOST_LINK_GBPS = 16.0
"""What copies between host and GPU reach over PCIe 4: an estimate."""
HOST_MEMORY_GBPS = 100.0
"""What all optimizers of a node on its CPUs read and write: an estimate for a server of two sockets."""
NVME_GBPS = 6.0
"""What the NVMe drives of a node read or write: an estimate for two drives."""


class Step(msgspec.Struct, frozen=True):
    """A predicted optimizer step in milliseconds, all its micro-batches together.

    ``compute_ms``, ``optimizer_ms``, ``host_ms`` (what only the host does) and ``comm_ms`` are its parts.
    ``expected_ms`` counts the part of communication that published runs did not hide; ``best_ms`` and
    ``worst_ms`` two thirds of that or all communication, and add the spread of the published runs; those of
    layouts add their spread alone, and that of servers over PCIe. What cannot hide is in all three: the first
    gather, the last reduction, and what follows the optimizer.
    """

    compute_ms: float
    optimizer_ms: float
    host_ms: float
    comm_ms: float
    best_ms: float
    expected_ms: float
    worst_ms: float

    @property
    def width(self) -> float:
        """The worst over the best."""
        return self.worst_ms / self.best_ms


class Flops(msgspec.Struct, frozen=True):
    """FLOPs of one micro-batch on one GPU, in matrix products and in attention."""

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.matmul + self.attention


def step_flops(question: Question, family: str = "") -> tuple[Flops, Flops, Flops]:
    """Return the FLOPs of one micro-batch: forward, backward, and what checkpointing computes again.

    With adapters the weights' gradients are not computed: 4 FLOPs a parameter and token instead of 6. The
    head and the loss are in no block and are not recomputed. Of the families, Megatron's selective
    recomputation is that of attention alone.
    """
    model, training = question.model, question.training
    if model.step is not None:
        return _counted_flops(model.step, training)
    of_experts = sum(m.inputs * m.outputs * model.times(m) for m in model.linears if m.count > 1)
    met = model.active_parameters + (question.routed - model.experts_met) * of_experts
    inside = max(0.0, 2.0 * (met - model.outside_parameters) * mean_tokens(question))
    head = model.vocabulary * model.hidden if model.has_logits else model.outside_parameters
    linear = inside + 2.0 * min(model.active_parameters, model.outside_parameters, head) * training.tokens
    context = float(model.encoder_tokens or training.sequence)
    if family == "megatron":  # its kernels compute no scores outside of a window
        context *= model.attended(training.sequence)
    attention = (
        4.0 * model.blocks * model.attentions * model.attention_width * context * mean_tokens(question)
    )
    forward = Flops(linear, attention)
    backward = Flops(linear * (1 if question.frozen else 2), 2 * attention)
    if not training.recomputes:
        return forward, backward, Flops(0.0, 0.0)
    if training.checkpointing == "selective" and family == "megatron":
        modules = training.recomputed or ("core_attn",)
        up = 2.0 * sum(m.inputs * m.outputs for m in model.latent_linears) * ("mla_up_proj" in modules)
        again = Flops(up * model.blocks * training.tokens, attention * ("core_attn" in modules))
        return forward, backward, again
    if training.checkpointing == "selective":
        return forward, backward, Flops(inside * (1 - kept_matmuls(question)), 0.0)
    return forward, backward, Flops(inside, attention)


def _counted_flops(step: OneStep, training: Training) -> tuple[Flops, Flops, Flops]:
    """Split the FLOPs of a counted step: a third is forward, or a quarter where it recomputes already."""
    scale = training.tokens / step.tokens
    parts = 4 if step.checkpointed else 3
    forward = Flops(step.matmul_flops * scale / parts, step.attention_flops * scale / parts)
    backward = Flops(forward.matmul * (parts - 1), forward.attention * (parts - 1))
    return forward, backward, forward if training.recomputes and not step.checkpointed else Flops(0.0, 0.0)


def kept_matmuls(question: Question) -> float:
    """Return the share of a block's products that selective checkpointing keeps: every second one."""
    sizes = [m.weights for m in question.model.linears]
    return sum(sizes[::2]) / sum(sizes) if sizes else 0.5


def predict(
    question: Question,
    layout: Layout,
    cluster: Cluster,
    *,
    utilisation: float | None = None,
    measured_compute_ms: float | None = None,
    scale: float = 1.0,
    idle_ms: float = 0.0,
) -> Step | None:
    """The predicted step, ``None`` where the GPU or a link that is used is not known.

    ``question`` has the layout's micro-batch. ``utilisation`` is a share of the peak that replaces the fitted
    model of computation. ``measured_compute_ms`` is a step's computation on this GPU, its update included, in
    place of the estimate; checkpointing adds its forward pass to it again. ``scale`` multiplies the estimate
    of computation, ``idle_ms`` is added to each step. The slowest stage sets the pace: one with most blocks,
    or the last with the head.
    """
    gpu = cluster.gpu
    sent = _communication(question, layout, cluster)
    if gpu is None or sent is None:
        return None
    parts = _computation(question, layout, gpu, utilisation)
    if parts is None:
        return None
    if measured_compute_ms is not None:
        forward, backward, again = step_flops(question, layout.family)
        once = forward.total + backward.total
        each = measured_compute_ms / 1e3 / layout.rounds
        parts = [f.total / once * each for f in (forward, backward, again)]
        scale = 1.0
    compute = scale * sum(parts) * _slowest(question, layout) / layout.split_work
    optimizer, host = _update(question, layout, gpu.hbm_gbps)
    optimizer = optimizer if measured_compute_ms is None else 0.0
    each_round, last, after = sent
    fixed = optimizer + host + after + idle_ms / 1e3
    rounds, passes = layout.rounds, layout.rounds + layout.waits
    ahead = 1.0 if question.training.capacity else LAUNCHED_AHEAD
    waited = max(0.0, _launched(question, layout) - ahead * compute)

    def step(shown: float, of: Callable[[_Sent], float]) -> float:
        # Where the link is the bottleneck, computation hides behind it.
        # What travels once an update hides beside the first or last micro-batch alone.
        once = max(shown * of(last), last.hideable - compute - waited)
        computing = passes * (compute + waited + shown * of(each_round)) + once
        overlapped = max(computing, rounds * each_round.hideable + last.hideable)
        return fixed + overlapped + passes * each_round.unhidden + last.unhidden

    own = measured_compute_ms is not None or scale != 1.0
    known = own or not _unlike_published(question, layout, gpu)
    comm = rounds * each_round.seconds + last.seconds + after
    times = (rounds * compute, optimizer, host + rounds * waited, comm)
    expected = step(1.0, lambda sent: sent.exposed)
    if layout.strategy in STRATEGIES:
        low, high = NARROW_SPREAD if known else WIDE_SPREAD
        best = low * step(2 / 3, lambda sent: sent.exposed)
        worst = high * step(1.0, lambda sent: sent.seconds - sent.unhidden)
        if known:
            worst = min(worst, max(WIDEST_RANGE * best, high * expected))
            best = max(best, worst / WIDEST_RANGE)
    else:
        narrow = EXPERTS_SPLIT if question.model.experts_met else NARROW_SPLIT
        low, high = narrow if known else WIDE_SPLIT
        slow, fast = GUESSED_LINK if _unlike_other_servers(layout, cluster) else (1.0, 1.0)
        best = low * step(fast, lambda sent: sent.exposed)
        worst = high * step(slow, lambda sent: sent.exposed)
    return Step(*(1e3 * t for t in (*times, best, expected, worst)))


def widened(question: Question, layout: Layout, cluster: Cluster) -> list[str]:
    """What makes the range of a step wide, and what narrows it, in words; nothing where that is known."""
    gpu = cluster.gpu
    reasons = [
        _unlike_published(question, layout, gpu) if gpu else "",
        _unlike_other_servers(layout, cluster),
    ]
    return [reason for reason in reasons if reason]


def _unlike_published(question: Question, layout: Layout, gpu: Gpu) -> str:
    if not gpu.matmul:
        return f"hardly a run on {gpu.name} is published (--measure there, or a captured RUN, narrows it)"
    if question.model.step is not None:
        return "no run of a script's own model is published (a captured RUN narrows it)"
    if question.model.experts_met and layout.strategy in STRATEGIES:
        return "no run of experts under DDP, FSDP or ZeRO is published (a captured RUN narrows it)"
    return ""


def _unlike_other_servers(layout: Layout, cluster: Cluster) -> str:
    inside = cluster.inside
    if layout.strategy in STRATEGIES or inside is None or not inside.near or inside.measured:
        return ""
    return "servers differ in what joins their GPUs over PCIe (--measure narrows it)"


class _Sent(msgspec.Struct):
    """Seconds of communication: all, what of it cannot hide, what can, and what lengthens the step.

    Of what can hide, ``hideable`` is the part that runs beside computation that does not wait for it.
    """

    seconds: float = 0.0
    unhidden: float = 0.0
    hideable: float = 0.0
    exposed: float = 0.0


def _communication(question: Question, layout: Layout, cluster: Cluster) -> tuple[_Sent, _Sent, float] | None:
    """What each micro-batch sends, what only the last one does, and the seconds after the optimizer."""
    each, last, after = _Sent(), _Sent(), 0.0
    for transfer in transfers(question, layout):
        link = bandwidth(transfer, question, cluster)
        if link is None:
            return None
        gbps, latency = link
        taken = transfer.seconds(gbps, latency)
        if transfer.phase == "step":
            after += taken
            continue
        sent = each if transfer.every_round else last
        first = taken / (1.0 if transfer.exposed else transfer.calls) if transfer.of_states else 0.0
        share = exposed_share(gbps) if transfer.exposed is None else transfer.exposed
        sent.seconds += taken
        sent.unhidden += first
        sent.hideable += taken - first if transfer.of_states else 0.0
        sent.exposed += share * (taken - first)
    return each, last, after


def exposed_share(gbps: float) -> float:
    """Return the share of a ring's transfers beside computation that lengthens the step."""
    return SLOW_EXPOSED_SHARE + (EXPOSED_SHARE - SLOW_EXPOSED_SHARE) * min(1.0, gbps / CONTENTION_GBPS)


def _computation(
    question: Question, layout: Layout, gpu: Gpu, utilisation: float | None
) -> list[float] | None:
    """The seconds of forward, backward and recomputation of one micro-batch on one GPU without any split.

    ``None`` where the GPU's peak is not known.
    """
    gpu = _with_its_kernels(gpu, question, layout)
    training, model = question.training, question.model
    precision = PRECISIONS[training.precision]
    peak = gpu.half_tflops if precision.compute == 2 else gpu.fp32_tflops
    if peak is None:
        return None
    flops = step_flops(question, layout.family)
    converted = _conversions(question, layout, gpu)
    if utilisation is not None:
        return [*(f.total / (peak * 1e12 * utilisation) for f in flops), converted]
    faster = FP8_SPEEDUP if training.fp8 else 1.0
    shares = gpu.shares
    matmul, attention = peak * 1e12 * shares[0] * faster, peak * 1e12 * shares[1]
    matmul = 1 / (1 / matmul + _narrower(question, layout) / (gpu.hbm_gbps * 1e9))
    forward, backward, again = (f.matmul / matmul + f.attention / attention for f in flops)
    again -= (1 - RECOMPUTED_MATMUL) * flops[2].matmul / matmul
    passes = PASSES_OVER_ACTIVATIONS * (COMPILED_PASSES if training.compiled else 1.0)
    moved = passes * model.blocks * block_activations(question, layout)
    # What picks tokens for experts, and puts their results back, is fused with nothing.
    picked = 2 * precision.compute * question.routed * model.hidden
    picked = PASSES_OVER_ACTIVATIONS * picked - passes * routed_bytes(question, layout)
    moved += model.blocks * training.tokens * picked
    if model.has_logits:
        moved += LOGIT_TRAFFIC_BYTES * training.tokens * model.vocabulary
        if training.loss == "chunked":  # each chunk's logits are computed again in backward
            backward += 2.0 * training.tokens * model.vocabulary * model.hidden / matmul
    if model.step is not None:
        each = LOGIT_TRAFFIC_BYTES / EAGER_LOGIT_BYTES if model.step.blocks else passes
        moved += each * model.step.beside(training.tokens)
    elementwise = moved / (gpu.hbm_gbps * 1e9)
    if model.experts_biased and layout.family == "megatron":
        elementwise += BIAS_SECONDS * model.blocks * training.tokens * question.routed * model.hidden
    return [forward + elementwise / 3, backward + elementwise * 2 / 3, again, converted]


def _narrower(question: Question, layout: Layout) -> float:
    """The bytes that products of a layout move more for each FLOP, as they are narrow.

    A product of M x K by K x N moves 1/M + 1/N + 1/K numbers for each of its FLOPs. Those of matrices that
    are not cut are in the fitted shares already, whose runs have many tokens; what an expert's move is held
    against a product of the model's width.
    """
    model, training = question.model, question.training
    tokens, met = training.tokens / layout.context, max(1.0, question.routed)
    moved = flops = 0.0
    for matrix in model.linears:
        sides = matrix.inputs, matrix.outputs
        narrow, wide = sorted(sides) if matrix.count > 1 else _sides(matrix, model)
        size = 1.0 * narrow * wide * model.times(matrix)
        cut = layout.tensor if matrix.count == 1 else layout.cut_experts
        more = cut / narrow - 1 / (narrow if matrix.count == 1 else model.hidden)
        if matrix.count > 1:
            size *= met
            more += matrix.count / (layout.expert * met * tokens)
        else:
            more += 1 / tokens
        moved, flops = moved + size * more, flops + size
    number = 1.0 if training.fp8 else PRECISIONS[training.precision].compute
    return NARROW_TRAFFIC * number / 2 * moved / flops if flops else 0.0


def _sides(matrix: Linear, model: ModelShape) -> tuple[int, int]:
    """The side of a matrix that tensor parallelism cuts, and that of the residual stream."""
    own = matrix.inputs == model.hidden
    return (matrix.outputs, matrix.inputs) if own else (matrix.inputs, matrix.outputs)


def _update(question: Question, layout: Layout, hbm_gbps: float) -> tuple[float, float]:
    """The seconds of the optimizer's update on the GPU, and on the host.

    It reads and writes states and parameters and reads gradients: bound by memory.
    """
    training, split = question.training, layout.states.split
    precision = PRECISIONS[training.precision]
    weights = largest_stage(question, layout)
    owned = weights.owned(layout) if "optimizer" in split else weights.all
    _, gradient, _ = state_bytes(question, layout)
    each = 2 * (optimizer_bytes(question) + (precision.master or precision.compute))
    touched = owned * (each + gradient)
    if training.offload == "none":
        return touched / (hbm_gbps * 1e9), 0.0
    node = question.gpus_per_node
    copied = owned * (precision.gradient + precision.compute)
    if training.offload != "optimizer":
        whole = question.trainable * precision.compute + frozen_bytes(question)
        copied += 2 * whole / (layout.shards if "optimizer" in split else 1)
    host = copied / (HOST_LINK_GBPS * 1e9) + touched * node / (HOST_MEMORY_GBPS * 1e9)
    if training.offload == "nvme":
        host += 2 * model_states(question, data_parallel(question, "zero-3")).host * node / (NVME_GBPS * 1e9)
    return 0.0, host


def _with_its_kernels(gpu: Gpu, question: Question, layout: Layout) -> Gpu:
    """Return the GPU with the shares of its peak that the framework's kernels reach."""
    if layout.family != "megatron" or not gpu.fp8:
        return gpu
    matmul, attention = gpu.shares
    matmul *= MEGATRON_MATMUL
    if question.training.fp8:
        matmul *= FP8_RATE / FP8_SPEEDUP
    return replace(gpu, matmul=matmul, attention=max(MEGATRON_ATTENTION, attention))


def _conversions(question: Question, layout: Layout, gpu: Gpu) -> float:
    """Return the seconds in which Megatron converts inputs and gradients of outputs for 8-bit products.

    The narrower the matrices, the more that is beside their products; experts are narrowest. (For torchtitan
    it is in :data:`FP8_SPEEDUP`.)
    """
    training, model = question.training, question.model
    if not (training.fp8 and gpu.fp8 and layout.family == "megatron"):
        return 0.0
    met = max(1, question.routed)
    inputs = (1 + met) * model.hidden + model.q_width + model.mlp_width
    first = (2 if model.gated else 1) * model.mlp_width
    outputs = (1 + met) * model.hidden + model.q_width + 2 * model.kv_width + first
    again = inputs if training.checkpointing == "on" else 0
    numbers = model.blocks * training.tokens * (inputs + outputs + again)
    return numbers * CONVERSION_BYTES / (gpu.hbm_gbps * 1e9)


def _launched(question: Question, layout: Layout) -> float:
    """The seconds that the host needs to launch the blocks of a stage with experts, for a micro-batch."""
    if layout.family != "megatron" or not question.model.experts_met:
        return 0.0
    again = question.training.checkpointing == "on"
    _, blocks, _ = stage_blocks(question.model.blocks, layout)
    experts = question.model.experts / layout.expert
    if question.training.capacity:  # as many tokens for each: one product for all
        experts = 1.0
    return blocks * (LAUNCH_SECONDS + experts * LAUNCH_EACH_SECONDS) * (4 / 3 if again else 1)


def _slowest(question: Question, layout: Layout) -> float:
    """Return the share of the model's computation that the slowest stage has."""
    model = question.model
    if layout.pipeline == 1:
        return 1.0
    _, most, last = stage_blocks(model.blocks, layout)
    head = model.vocabulary * model.hidden
    block = max(1.0, (model.active_parameters - model.outside_parameters) / model.blocks)
    return max(most, last + head / block) / (model.blocks + head / block)
