"""Predict a layout's step: what each micro-batch computes and sends on a stage, the bubble, the reduction.

A pipeline of p stages and m micro-batches waits for (p - 1) / v of them more (Narayanan et al. 2021, arXiv
2104.04473, section 2.2).
"""

from __future__ import annotations

from msgspec.structs import replace

from tracedoc.planner.hardware import Cluster, Gpu
from tracedoc.planner.layout_memory import SHARDED, stage_weights
from tracedoc.planner.layout_traffic import traffic
from tracedoc.planner.layouts import Layout, stage_blocks
from tracedoc.planner.setup import Question
from tracedoc.planner.timing import FP8_SPEEDUP, Step, computation

NARROW, WIDE = (0.80, 1.30), (0.65, 1.60)
"""Spread around the prediction, for GPUs of which runs are published and for others."""

MEGATRON_ATTENTION = 0.5
"""Share of the peak that Transformer Engine's attention reaches, fitted to NeMo's published runs."""
DISPATCH_SECONDS = 2.6e-3
"""What a block with experts takes beside in forward, whatever the micro-batch.

The host reads how many tokens each expert gets before it can launch what follows; the GPU is idle meanwhile.
The median of what NeMo's six published runs of four such models took beside all else (make bench-plan).
"""
FP8_RATE = 2.0
"""How many times faster matrices are multiplied in 8 bits than in 16: the data sheets of GPUs that do."""
CONVERSION_BYTES = 6
"""What crosses the GPU's memory to convert a 16-bit number for 8-bit products: it is read for the largest
value, read to be scaled, and written twice, as it is and transposed (Transformer Engine, current scaling)."""


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
    whole = sum(parts) + _conversions(question, layout, own, checkpointing=checkpointing)
    compute = scale * whole * _slowest(question, layout) / (layout.tensor * layout.context)
    _, blocks, _ = stage_blocks(model.blocks, layout)
    weights = stage_weights(question, layout, blocks, ends=1)
    optimizer = weights.owned(layout) * 28 / (gpu.hbm_gbps * 1e9)
    passes = layout.rounds + (layout.pipeline - 1) / layout.chunks
    dispatch = blocks * _dispatch(question, layout, checkpointing=checkpointing)

    def step(best: float, least: float) -> float:
        # ``best`` scales the share that is exposed, which is ``least`` at least.
        exposed = {one.what: max(least, best * one.exposed) * one.seconds for one in sent}
        each = sum(exposed[one.what] for one in sent if not one.once)
        update = sum(exposed[one.what] for one in sent if one.once)
        return passes * (compute + dispatch + each) + update + optimizer + idle_ms / 1e3

    low, high = NARROW if gpu.matmul else WIDE
    comm = sum(one.seconds * (1 if one.once else layout.rounds) for one in sent)
    times = (layout.rounds * compute, optimizer, layout.rounds * dispatch, comm)
    span = (low * step(0.5, 0.0), step(1.0, 0.0), high * step(1.0, 1.0))
    return Step(*(1e3 * time for time in (*times, *span)))


def _with_its_kernels(gpu: Gpu, question: Question, layout: Layout) -> Gpu:
    """Return the GPU with the shares of its peak that the framework's kernels reach."""
    if layout.family != "megatron" or not gpu.fp8:
        return gpu
    matmul, attention = gpu.shares
    if question.training.fp8:
        matmul *= FP8_RATE / FP8_SPEEDUP
    return replace(gpu, matmul=matmul, attention=max(MEGATRON_ATTENTION, attention))


def _conversions(question: Question, layout: Layout, gpu: Gpu, *, checkpointing: bool) -> float:
    """Return the seconds in which Megatron converts inputs and gradients of outputs for 8-bit products.

    The narrower the matrices, the more that is beside their products; experts are narrowest. (For torchtitan
    it is in :data:`FP8_SPEEDUP`.)
    """
    training, model = question.training, question.model
    if not (training.fp8 and gpu.fp8 and layout.family == "megatron"):
        return 0.0
    met = max(1, model.experts_met)
    inputs = (1 + met) * model.hidden + model.q_width + model.mlp_width
    first = (2 if model.gated else 1) * model.mlp_width
    outputs = (1 + met) * model.hidden + model.q_width + 2 * model.kv_width + first
    again = inputs if checkpointing and training.checkpointing != "selective" else 0
    numbers = model.blocks * training.tokens * (inputs + outputs + again)
    return numbers * CONVERSION_BYTES / (gpu.hbm_gbps * 1e9)


def _dispatch(question: Question, layout: Layout, *, checkpointing: bool) -> float:
    """Return the seconds that the host holds up a block with experts, for each micro-batch.

    PyTorch's grouped products need no counts on the host: in torchtitan only sending tokens does.
    """
    counted = question.model.experts_met if layout.family == "megatron" else layout.expert > 1
    again = checkpointing and question.training.checkpointing != "selective"
    return DISPATCH_SECONDS * (2 if again else 1) if counted else 0.0


def _slowest(question: Question, layout: Layout) -> float:
    """Return the share of the model's computation that the slowest stage has."""
    model = question.model
    if layout.pipeline == 1:
        return 1.0
    _, most, last = stage_blocks(model.blocks, layout)
    head = model.vocabulary * model.hidden
    block = max(1.0, (model.active_parameters - model.outside_parameters) / model.blocks)
    return max(most, last + head / block) / (model.blocks + head / block)
