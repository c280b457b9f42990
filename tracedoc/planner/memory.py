"""Compute the peak of one GPU of a layout: its stage's states, activations, logits, units and buffers.

Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 5 and figure 1, is where the formulas of states come
from. Bytes are plain numbers; GB in the words of the planner is 1e9 of them, as GPUs are sold.
"""

from __future__ import annotations

import msgspec

from tracedoc.planner.activations import (
    block_activations,
    block_backward,
    cached_logit_bytes,
    kept_by_block,
    logit_bytes,
    outside_activations,
    recomputed_bytes,
    residual_activations,
)
from tracedoc.planner.layouts import Layout, Strategy, can_offload, stage_blocks
from tracedoc.planner.setup import NF4_BYTES, OPTIMIZERS, PRECISIONS, Question

SPREAD = 0.08
"""How far peaks lie from what is predicted: nine of ten published ones within this share (make bench-plan).

None of the predictions was fitted to a peak, so it is what new runs can be expected to be off.
"""

BUCKET_ELEMENTS = 50_000_000
"""Elements of a DeepSpeed bucket in the configuration that is printed (DeepSpeed's own default is 5e8)."""

FRAGMENTATION = 0.10
"""Reserve on what is allocated and freed in each step: an estimate; the allocator rounds and splits."""

CONTEXT_BYTES = 0.6e9
"""CUDA context, libraries and their workspaces on each GPU: an estimate, drivers differ by some 0.2 GB."""

NCCL_BYTES = 0.3e9
"""Buffers of the communicators, where there are peers: an estimate."""

LOSS_PARALLEL_BYTES = 16
"""Bytes of one logit in the backward pass of PyTorch's ``loss_parallel``, which fuses nothing.

In fp32: log-softmax, the gradient, its exponential, and their sum (torch.distributed.tensor.parallel.loss).
"""

MEGATRON_BYTES = {
    "bf16-mixed": (2, 4, 12),
    "bf16-mixed-reduce": (2, 2, 12),
    "fp16-mixed": (2, 2, 16),
    "fp32": (4, 4, 8),
}
"""Parameters and gradients on each GPU, and what its distributed optimizer shards: Megatron Core's guide."""


class ModelStates(msgspec.Struct, frozen=True):
    """Bytes on one GPU, and on the host (memory or NVMe) for each GPU.

    ``copies`` is what is held beside the states from forward to backward: the 16-bit parameters that
    SHARD_GRAD_OP gathered (a node's share of them where they are kept in the node), or those that autocast
    makes of fp32 parameters.
    """

    parameters: float
    gradients: float
    optimizer: float
    copies: float = 0.0
    host: float = 0.0

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states, as the published tables count them."""
        return self.parameters + self.gradients + self.optimizer


class Memory(msgspec.Struct, frozen=True):
    """The peak of one GPU in bytes, by what takes it.

    ``activations`` is what forward keeps for backward; ``working`` what the moment of the peak adds: the loss
    with its logits, or one block's backward. ``units`` is gathered parameters, their gradients and buffers.
    ``absent`` is of the states and copies what does not exist at that moment, to subtract. ``moment`` is
    "loss", "first block" (of backward) or "last block".
    """

    moment: str
    states: ModelStates
    activations: float
    working: float
    units: float
    absent: float
    reserve: float
    context: float

    @property
    def total(self) -> float:
        """Everything on the GPU at its peak."""
        kept = self.states.states + self.states.copies - self.absent
        return kept + self.activations + self.working + self.units + self.reserve + self.context


def peak_memory(question: Question, layout: Layout) -> Memory:
    """The peak of the fullest GPU: of the first two stages, which keep most activations, or the last.

    ``question`` has the layout's micro-batch. With sequence parallelism tensor parallelism divides all
    activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2), as context parallelism does.
    """
    stages = layout.pipeline
    # Megatron's selective recomputation is that of modules, not of a block.
    alone = layout.family == "megatron" and question.training.checkpointing == "selective"
    checkpointing = question.training.recomputes and not alone
    block = block_activations(question, layout)
    backward = _backward(question, layout, block, checkpointing=checkpointing)
    left = 0.0 if checkpointing else block / layout.split_work
    peaks = []
    for number in sorted({0, min(1, stages - 1), stages - 1}):
        stored = _stored(question, layout, number, checkpointing=checkpointing)
        peaks.append(_stage_peak(question, layout, number, stored, left, backward))
    return max(peaks, key=lambda memory: memory.total)


def _stage_peak(
    question: Question, layout: Layout, number: int, stored: float, left: float, backward: float
) -> Memory:
    """The peak of a GPU of one stage: the largest of the loss, the first and the last block of backward.

    ``stored`` is what it keeps until the loss, ``left`` what of that is there for the last block, and
    ``backward`` what work on one block takes in backward.
    At the loss all activations are there, at the end of backward all gradients. On one GPU ``zero_grad``
    frees the gradients between; the buckets of DDP and shards of the others are counted as always there.
    The copies that autocast makes are gone at the end.
    """
    states, unreduced = _states(question, layout, number)
    logits, cached = _logits(question, layout) if number == layout.pipeline - 1 else (0.0, 0.0)
    at_loss, in_backward = unit_bytes(question, layout)
    before = states.gradients if layout.strategy == "single" else 0.0
    after = states.copies if layout.family == "ddp" else 0.0
    moments = (
        ("loss", stored, logits, at_loss, before),
        ("first block", stored, backward, in_backward, before),
        ("last block", left, backward, in_backward, after),
    )
    moment, activations, working, units, absent = max(moments, key=lambda m: m[1] + m[2] + m[3] - m[4])
    copies = states.copies - (after if moment == "last block" else 0.0)
    reserve = FRAGMENTATION * (activations + working + units + copies + unreduced)
    reserve += cached if moment == "loss" else 0.0
    context = CONTEXT_BYTES + _communicators(layout) * NCCL_BYTES
    return Memory(moment, states, activations, working, units, absent, reserve, context)


def _communicators(layout: Layout) -> int:
    """The groups of GPUs that a GPU is in: the whole job, and one for each of several ways of splitting."""
    ways = sum(size > 1 for _, size in layout.parts)
    return ways + 1 if ways > 1 else ways


def _stored(question: Question, layout: Layout, number: int, *, checkpointing: bool) -> float:
    """The bytes that a stage keeps from forward to backward, of all its micro-batches under way."""
    model, split = question.model, layout.split_work
    if model.step is not None:
        return model.step.kept(question.training.tokens, checkpointing=checkpointing)
    kept = kept_by_block(question, layout, checkpointing=checkpointing) / split
    kept += _unsplit(question, layout, checkpointing=checkpointing)
    if not checkpointing:
        kept += _kept_whole(question, layout) - _saved_in_8_bits(question, layout) / split
        kept -= recomputed_bytes(question, layout)
    stored = _blocks(question, layout, number) * kept * _held(layout, number)
    if layout.pipeline == 1:
        stored += outside_activations(question, layout) / split
    return stored + _between_stages(question, layout, number)


def _backward(question: Question, layout: Layout, block: float, *, checkpointing: bool) -> float:
    """The bytes that work on one block in backward, and what of it is computed again."""
    split = layout.split_work
    gradients = block if question.model.step is not None else block_backward(question, layout)
    working = gradients / split + _gathered(question, layout) + _keys_and_values(question, layout)
    again = block / split + _kept_whole(question, layout) + _unsplit(question, layout, checkpointing=False)
    return working + (again if checkpointing else recomputed_bytes(question, layout))


def _logits(question: Question, layout: Layout) -> tuple[float, float]:
    """The bytes of the loss at the peak, and those that the allocator holds though nothing uses them."""
    training, model = question.training, question.model
    if model.step is not None:
        return model.step.beside(training.tokens), 0.0
    each = logit_bytes(question, layout) if model.has_logits else 0.0
    if layout.family == "torchtitan" and layout.tensor > 1 and training.loss == "eager":
        each = max(each, LOSS_PARALLEL_BYTES)
    here = training.tokens * model.vocabulary / layout.split_work
    return here * each + _gathered(question, layout), here * cached_logit_bytes(question, layout)


def _kept_whole(question: Question, layout: Layout) -> float:
    """The bytes that DTensor keeps of a block beside its parts: what attention and MLP were given, whole.

    Megatron gathers that again in backward.
    """
    return 2 * _gathered(question, layout) if layout.family == "torchtitan" else 0.0


def _unsplit(question: Question, layout: Layout, *, checkpointing: bool) -> float:
    """The bytes that a block keeps more where tensor parallelism leaves the residual stream whole."""
    if layout.sequence_parallel:
        return 0.0
    if checkpointing:
        return _gathered(question, layout)
    return residual_activations(question, layout) * (1 - 1 / layout.tensor) / layout.context


def _keys_and_values(question: Question, layout: Layout) -> float:
    """The bytes of keys and values that are gathered of other parts of a sequence, and of their gradients."""
    if layout.context == 1 or layout.shares_context != "gather":
        return 0.0
    c = PRECISIONS[question.training.precision].compute
    whole = 2 * c * question.model.kv_width * question.training.tokens / layout.tensor
    return 2 * whole * (1 - 1 / layout.context)


def _saved_in_8_bits(question: Question, layout: Layout) -> float:
    """The bytes that a block saves as Transformer Engine keeps what it multiplied in 8 bits.

    That is the input of each matrix; what attention gave is kept in 16 bits as well.
    """
    training, model = question.training, question.model
    if not training.fp8 or layout.family != "megatron":
        return 0.0
    inputs = (1 + max(1, question.routed)) * model.hidden + model.mlp_width
    return training.tokens * (PRECISIONS[training.precision].compute - 1) * (inputs - model.q_width)


def _blocks(question: Question, layout: Layout, number: int) -> int:
    first, most, last = stage_blocks(question.model.blocks, layout)
    return first if number == 0 else last if number == layout.pipeline - 1 else most


def _stream(question: Question, layout: Layout) -> float:
    """Return the bytes of the residual stream of one micro-batch that the GPUs of a tensor group share."""
    c = PRECISIONS[question.training.precision].compute
    return question.training.tokens / layout.context * question.model.hidden * c


def _gathered(question: Question, layout: Layout) -> float:
    """Return the bytes of the gathered residual stream, less the part that a GPU has anyway."""
    return _stream(question, layout) * (1 - 1 / layout.tensor)


def _held(layout: Layout, number: int) -> float:
    """The micro-batches that a stage keeps: one for each stage that follows it, and its own.

    Interleaved, so many parts of stages: Korthikanti et al. 2022, section 4.2.3, 1 + (p - 1) / (p v) times as
    many in the first. Never more than there are.
    """
    after, parts = layout.pipeline - 1 - number, layout.chunks
    if parts == 1:
        return min(layout.rounds, after + 1)
    return min(layout.rounds, ((parts - 1) * layout.pipeline + 2 * after + 1) / parts)


def _between_stages(question: Question, layout: Layout, number: int) -> float:
    """The bytes that a stage of PyTorch's pipelining holds of what it receives and sends.

    It keeps what it sent until backward, and has buffers for each micro-batch's input and gradient; inputs in
    use are counted as what the first block keeps. Megatron frees what it sent, and allocates as it receives.
    """
    if layout.pipeline == 1 or layout.family != "torchtitan":
        return 0.0
    last, rounds = number == layout.pipeline - 1, layout.rounds
    gradients = rounds * (layout.chunks - last)
    inputs = (rounds - _held(layout, number)) * (layout.chunks - (number == 0))
    passed_on = _held(layout, number) * (layout.chunks - last)
    return (gradients + inputs + passed_on) * _stream(question, layout) / layout.tensor


class Weights(msgspec.Struct, frozen=True):
    """How many weights one GPU computes with: ``experts`` those of split experts, ``dense`` the rest."""

    dense: float
    experts: float

    @property
    def all(self) -> float:
        """Both together."""
        return self.dense + self.experts

    def owned(self, layout: Layout) -> float:
        """Those of which a GPU keeps the states, where these are sharded: no weight's states twice.

        GPUs with other experts share no expert's states.
        """
        return self.dense / layout.shards + self.experts / layout.expert_shards


def stage_weights(question: Question, layout: Layout, number: int) -> Weights:
    """The trained weights of one stage on one GPU: its blocks, and what of embedding and head it has."""
    if layout.splits_states_alone:
        return Weights(question.trainable, 0.0)
    outside = _outside_weights(question, layout, number in (0, layout.pipeline - 1))
    return _with_blocks(question, layout, _blocks(question, layout, number), outside, first=number == 0)


def largest_stage(question: Question, layout: Layout) -> Weights:
    """The trained weights of a stage with most blocks, and with the embedding or the head."""
    if layout.splits_states_alone:
        return Weights(question.trainable, 0.0)
    _, blocks, _ = stage_blocks(question.model.blocks, layout)
    outside = _outside_weights(question, layout, True)
    return _with_blocks(question, layout, blocks, outside, first=layout.pipeline == 1)


def _with_blocks(question: Question, layout: Layout, blocks: int, outside: float, *, first: bool) -> Weights:
    """The weights of so many blocks; the leading ones, which have no experts, are in the ``first`` stage."""
    model, mean = question.model, block_weights(question, layout)
    sparse = min((model.times(m) for m in model.linears if m.count > 1), default=model.blocks)
    leading = model.blocks - sparse
    if not leading:
        return Weights(blocks * mean.dense + outside, blocks * mean.experts)
    full = block_weights(question, layout, largest=True)
    missing = model.blocks * first * min(1.0, blocks / layout.chunks / leading)
    return Weights(
        blocks * full.dense - missing * (full.dense - mean.dense) + outside,
        blocks * full.experts - missing * (full.experts - mean.experts),
    )


def _outside_weights(question: Question, layout: Layout, end: bool) -> float:
    """The weights of no block on one GPU of a stage: of all stages ``end`` ones have embedding or head."""
    model = question.model
    every = model.outside_parameters if layout.pipeline == 1 else end * model.vocabulary * model.hidden
    return every / layout.tensor


def block_weights(question: Question, layout: Layout, *, largest: bool = False) -> Weights:
    """The weights of a mean block on one GPU, or of the ``largest``; norms count as split, too."""
    model = question.model
    every = (model.parameters - model.outside_parameters) / model.blocks
    spread = (m for m in model.linears if m.count > 1)
    experts = sum(m.weights * (1 if largest else model.times(m) / model.blocks) for m in spread)
    every = model.block_parameters if largest else every
    if layout.expert == 1 and layout.cut_experts == layout.tensor:
        return Weights(every / layout.tensor, 0.0)
    return Weights((every - experts) / layout.tensor, experts / (layout.expert * layout.cut_experts))


def model_states(question: Question, layout: Layout) -> ModelStates:
    """The model states of one GPU of the first stage."""
    return _states(question, layout, 0)[0]


def _states(question: Question, layout: Layout, number: int) -> tuple[ModelStates, float]:
    """The model states of one GPU of a stage, and of its gradients the bytes that wait to be reduced.

    A pipeline of torchtitan keeps its stage gathered, and gradients in fp32 until the last micro-batch; with
    one round of interleaved micro-batches, those of one part at a time.
    """
    training, split = question.training, layout.states.split
    weight, gradient, optimizer = state_bytes(question, layout)
    weights = stage_weights(question, layout, number)
    held = {what: weights.owned(layout) if what in split else weights.all for what in _KINDS}
    base = frozen_bytes(question)
    parameters = held["parameters"] * weight + base / (layout.shards if "parameters" in split else 1)
    gradients = held["gradients"] * gradient
    if training.optimizer_in_backward:
        # Freed as soon as it is used: those of a block, or of the largest matrix outside, are there at once.
        largest = max(question.model.block_parameters, question.model.vocabulary * question.model.hidden)
        gradients = min(gradients, largest * gradient / (layout.shards if "gradients" in split else 1))
    unreduced = 0.0
    if _keeps_its_stage_gathered(layout) and layout.rounds > 1:
        unreduced = weights.all * gradient / (layout.chunks if layout.rounds <= layout.pipeline else 1)
    states, host = held["optimizer"] * optimizer, 0.0
    if OPTIMIZERS[training.optimizer].paged:
        states, host = 0.0, states
    copies = _copies(question, layout, weights)
    whole = ModelStates(parameters, gradients + unreduced, states, copies, host)
    return _offloaded(whole, training.offload, layout.states), unreduced


_KINDS = ("parameters", "gradients", "optimizer")


def state_bytes(question: Question, layout: Layout) -> tuple[float, float, float]:
    """The bytes of a trained parameter, of its gradient, and of its optimizer with a master copy.

    In mixed precision DeepSpeed keeps parameters and gradients in 16 bits and the fp32 copy with the
    optimizer; plain PyTorch keeps fp32 parameters and gradients. Both are 16 bytes a parameter with Adam, but
    what ZeRO-1 leaves whole differs: 4 bytes there, 8 here. LoRA adapters are fp32 beside 16-bit weights.
    """
    precision = PRECISIONS[question.training.precision]
    if layout.family == "megatron":
        return MEGATRON_BYTES[precision.name]
    optimizer = optimizer_bytes(question)
    if layout.family == "deepspeed" and not question.frozen:
        return precision.compute, precision.gradient, optimizer + precision.master
    if precision.autocast:
        return precision.master, precision.master, optimizer
    return precision.compute, precision.gradient, optimizer


def _keeps_its_stage_gathered(layout: Layout) -> bool:
    return layout.family == "torchtitan" and layout.pipeline > 1


def _copies(question: Question, layout: Layout, weights: Weights) -> float:
    """The bytes of 16-bit parameters beside the states, from forward to backward."""
    precision, kept = PRECISIONS[question.training.precision], layout.states
    copied = weights.all * precision.compute
    if _keeps_its_stage_gathered(layout) or (layout.family == "ddp" and precision.autocast):
        return float(copied)
    if kept.gathers == "whole":
        return copied + frozen_bytes(question)
    if kept.kept_in_node:
        return (copied + frozen_bytes(question)) / question.gpus_per_node
    return 0.0


def optimizer_bytes(question: Question) -> float:
    """Return the bytes of optimizer state for each trained parameter, without a master copy.

    Adafactor keeps a row and a column of fp32 for each matrix, counted as square (Shazeer and Stern 2018,
    arXiv 1804.04235). Muon updates the matrices of blocks; embeddings and head have AdamW's two states.
    """
    training, model = question.training, question.model
    optimizer = OPTIMIZERS[training.optimizer]
    full = optimizer.full
    if training.optimizer == "muon" and not question.frozen:
        full += model.outside_parameters / model.parameters
    factored = 4 * 2 / model.hidden if optimizer.factored else 0.0
    return full * PRECISIONS[training.precision].state + optimizer.one_byte + factored


def frozen_bytes(question: Question) -> float:
    """Return the bytes of the weights that LoRA leaves alone; 4 bits shrink only the matrices of blocks."""
    if not question.frozen:
        return 0.0
    wide = PRECISIONS[question.training.precision].compute
    if question.training.base_bits == 16:
        return float(question.frozen * wide)
    model = question.model
    matrices = sum(m.weights * model.times(m) for m in model.linears)
    quantised = min(matrices, model.blocks * model.block_parameters)
    return quantised * NF4_BYTES + (question.frozen - quantised) * wide


def unit_bytes(question: Question, layout: Layout) -> tuple[float, float]:
    """The bytes that a framework holds beside the shards: at the loss, and in a block's backward.

    FSDP keeps the root's unit (embeddings, head) gathered from forward to backward; in backward also two
    blocks (one is prefetched), the gradients of a block and of the head, and a buffer to reduce a block.
    """
    model = question.model
    c = PRECISIONS[question.training.precision].compute
    if layout.family == "deepspeed":
        # "4.5 x" for overlap_comm, two buckets of two bytes: Transformers' DeepSpeed guide.
        buckets = 2 * 4.5 * min(BUCKET_ELEMENTS, question.trainable) * c
        if not layout.states.gathers:
            return buckets, buckets
        live = frozen_share(question) * (model.outside_parameters + 2 * model.block_parameters)
        return buckets + live, buckets + live
    if not layout.states.gathers:
        return 0.0, 0.0
    block = _largest_block(question, layout)
    if layout.pipeline > 1:
        return 0.0, block * c
    per_weight, root = frozen_share(question), _outside_weights(question, layout, True)
    if layout.family == "torchtitan":  # embedding and head are units of their own
        root = min(root, model.vocabulary * model.hidden / layout.tensor)
    gathered = root * per_weight + 2 * block * per_weight
    reduce = block * (4 if c < 4 else c)
    gradients = 0 if question.frozen else root * c + block * c + reduce
    if layout.states.gathers == "whole":
        return 0.0, gradients
    # torchtitan leaves the last block gathered, which backward needs first.
    at_loss = root + (block if layout.family == "torchtitan" else 0)
    return at_loss * per_weight, gathered + gradients


def _largest_block(question: Question, layout: Layout) -> float:
    """The weights of the largest block on one GPU."""
    model = question.model
    experts = sum(m.weights for m in model.linears if m.count > 1)
    here = experts / (layout.expert * layout.cut_experts)
    return (model.block_parameters - experts) / layout.tensor + here


def frozen_share(question: Question) -> float:
    """Return the bytes of one gathered weight: those of the compute dtype, fewer if the base has 4 bits."""
    if question.frozen:
        return frozen_bytes(question) / question.frozen
    return float(PRECISIONS[question.training.precision].compute)


def _offloaded(states: ModelStates, offload: str, strategy: Strategy) -> ModelStates:
    if offload == "none" or not can_offload(strategy, offload):
        return states
    if offload == "optimizer":
        # ZeRO-Offload keeps the gradients beside the optimizer, where they are split at all.
        moved = states.host + states.optimizer + (states.gradients if "gradients" in strategy.split else 0.0)
        kept = 0.0 if "gradients" in strategy.split else states.gradients
        return ModelStates(states.parameters, kept, 0.0, states.copies, moved)
    return ModelStates(0.0, 0.0, 0.0, states.copies, states.host + states.states)
