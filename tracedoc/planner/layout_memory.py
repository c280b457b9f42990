"""Compute what one GPU of a layout holds at its peak: its stage's states, activations and logits."""

from __future__ import annotations

import msgspec

from tracedoc.planner.activations import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    NCCL_BYTES,
    Memory,
    block_activations,
    block_backward,
    cached_logit_bytes,
    kept_by_block,
    logit_bytes,
)
from tracedoc.planner.layouts import Layout, stage_blocks
from tracedoc.planner.memory import ModelStates
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.strategies import STRATEGIES

SHARDED = STRATEGIES["full-shard"]
"""The strategy whose tensors these frameworks keep: 16-bit activations, no copies by autocast."""

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


def layout_memory(question: Question, layout: Layout, *, checkpointing: bool) -> Memory:
    """Return the peak of the fullest GPU: of the first two stages, which keep most activations, or the last.

    ``question`` has the layout's micro-batch. With sequence parallelism tensor parallelism divides all
    activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2), as context parallelism does.
    """
    stages = layout.pipeline
    numbers = sorted({0, min(1, stages - 1), stages - 1})
    every = (_stage(question, layout, number, checkpointing=checkpointing) for number in numbers)
    return max(every, key=lambda memory: memory.total)


class Weights(msgspec.Struct, frozen=True):
    """How many weights one GPU computes with: ``experts`` those of split experts, ``dense`` the rest."""

    dense: float
    experts: float

    @property
    def all(self) -> float:
        """Both together."""
        return self.dense + self.experts

    def owned(self, layout: Layout) -> float:
        """Return of how many a GPU keeps the states, where these are sharded: no weight's states twice.

        GPUs with other experts share no expert's states.
        """
        return self.dense / layout.shards + self.experts * layout.expert / layout.shards


def stage_weights(question: Question, layout: Layout, blocks: int, *, ends: int) -> Weights:
    """Return the weights of so many blocks on one GPU, and of ``ends``: embedding and head, split as well."""
    block = block_weights(question, layout)
    outside = ends * _end(question) / layout.tensor
    return Weights(blocks * block.dense + outside, blocks * block.experts)


def block_weights(question: Question, layout: Layout) -> Weights:
    """Return the weights of a mean block on one GPU; norms count as split, too."""
    model = question.model
    every = (model.parameters - model.outside_parameters) / model.blocks / layout.tensor
    if layout.expert == 1:
        return Weights(every, 0.0)
    spread = ((m, model.blocks if m.blocks is None else m.blocks) for m in model.linears if m.count > 1)
    experts = sum(m.inputs * m.outputs * m.count * times for m, times in spread) / model.blocks
    experts /= layout.tensor
    return Weights(every - experts, experts / layout.expert)


def _end(question: Question) -> float:
    return float(question.model.vocabulary * question.model.hidden)


def _stage(question: Question, layout: Layout, number: int, *, checkpointing: bool) -> Memory:
    """Return the peak of a GPU of one stage: at its loss, or as backward reaches its first block."""
    training, model = question.training, question.model
    split = layout.tensor * layout.context
    gathered = _gathered(question, layout)
    kept = kept_by_block(question, SHARDED, checkpointing=checkpointing) / split
    # DTensor keeps what attention and MLP were given whole; Megatron gathers that again in backward.
    whole = 2 * gathered if layout.family == "torchtitan" else 0.0
    if not checkpointing:
        kept += whole - _saved_in_8_bits(question, layout) / split
    activations = _blocks(question, layout, number) * kept * _held(layout, number)
    activations += _between_stages(question, layout, number)
    backward = block_backward(question, SHARDED) / split + gathered + _keys_and_values(question, layout)
    if checkpointing:
        backward += block_activations(question, SHARDED) / split + whole
    logits = cached = 0.0
    if number == layout.pipeline - 1:
        here = training.tokens * model.vocabulary / split
        logits = here * _logit_bytes(question, layout) + gathered
        cached = here * cached_logit_bytes(question, SHARDED)
    states, each_step, (at_loss, in_backward) = _states(question, layout, number)
    moments = (("loss", logits, at_loss, cached), ("first block", backward, in_backward, 0.0))
    moment, working, units, unused = max(moments, key=lambda each: each[1] + each[2])
    communicators = 1 + sum(size > 1 for _, size in layout.parts)
    return Memory(
        moment=moment,
        states=states,
        activations=activations,
        working=working,
        units=units,
        absent=0.0,
        reserve=FRAGMENTATION * (activations + working + units + each_step) + unused,
        context=CONTEXT_BYTES + communicators * NCCL_BYTES,
    )


def _keys_and_values(question: Question, layout: Layout) -> float:
    """Return what torchtitan gathers of the other parts of a sequence in one block, and as many gradients.

    Megatron passes keys and values on from GPU to GPU, part by part.
    """
    if layout.context == 1 or layout.family != "torchtitan":
        return 0.0
    c = PRECISIONS[question.training.precision].compute
    whole = 2 * c * question.model.kv_width * question.training.tokens / layout.tensor
    return 2 * whole * (1 - 1 / layout.context)


def _saved_in_8_bits(question: Question, layout: Layout) -> float:
    """Return what a block keeps less as Transformer Engine saves what it multiplied in 8 bits.

    That is the input of each matrix; what attention gave is kept in 16 bits as well.
    """
    training, model = question.training, question.model
    if not training.fp8 or layout.family != "megatron":
        return 0.0
    inputs = (1 + max(1, model.experts_met)) * model.hidden + model.mlp_width
    return training.tokens * (PRECISIONS[training.precision].compute - 1) * (inputs - model.q_width)


def _blocks(question: Question, layout: Layout, number: int) -> int:
    first, most, last = stage_blocks(question.model.blocks, layout)
    return first if number == 0 else last if number == layout.pipeline - 1 else most


def _ends(question: Question, layout: Layout, number: int) -> int:
    """Return how many matrices of the vocabulary a stage has: the embedding, the head, or one for both."""
    tied = question.model.outside_parameters < 1.5 * _end(question)
    if layout.pipeline == 1:
        return 1 if tied else 2
    return int(number in (0, layout.pipeline - 1))


def _logit_bytes(question: Question, layout: Layout) -> float:
    per_logit = logit_bytes(question, SHARDED)
    if layout.family == "torchtitan" and layout.tensor > 1 and question.training.loss == "eager":
        return max(per_logit, LOSS_PARALLEL_BYTES)
    return per_logit


def _stream(question: Question, layout: Layout) -> float:
    """Return the bytes of the residual stream of one micro-batch that the GPUs of a tensor group share."""
    c = PRECISIONS[question.training.precision].compute
    return question.training.tokens / layout.context * question.model.hidden * c


def _gathered(question: Question, layout: Layout) -> float:
    """Return the bytes of the gathered residual stream, less the part that a GPU has anyway."""
    return _stream(question, layout) * (1 - 1 / layout.tensor)


def _held(layout: Layout, number: int) -> float:
    """Return how many micro-batches a stage keeps: one for each stage that follows it, and its own.

    Interleaved, so many parts of stages: Korthikanti et al. 2022, section 4.2.3, 1 + (p - 1) / (p v) times as
    many in the first. Never more than there are.
    """
    after, parts = layout.pipeline - 1 - number, layout.chunks
    if parts == 1:
        return min(layout.rounds, after + 1)
    return min(layout.rounds, ((parts - 1) * layout.pipeline + 2 * after + 1) / parts)


def _between_stages(question: Question, layout: Layout, number: int) -> float:
    """Return what a stage of PyTorch's pipelining holds of what it receives and sends.

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


def _states(
    question: Question, layout: Layout, number: int
) -> tuple[ModelStates, float, tuple[float, float]]:
    """Return a stage's states, what of them is allocated in each step, and what is gathered or reduced beside
    them at the loss and in backward.

    A pipeline of torchtitan keeps its stage gathered, and gradients in fp32 until the last micro-batch; with
    one round of interleaved micro-batches, those of one part at a time.
    """
    precision = PRECISIONS[question.training.precision]
    c = precision.compute
    ends = _ends(question, layout, number)
    weights = stage_weights(question, layout, _blocks(question, layout, number), ends=ends)
    if layout.family == "megatron":
        weight, gradient, sharded = MEGATRON_BYTES[question.training.precision]
        states = ModelStates(weights.all * weight, weights.all * gradient, weights.owned(layout) * sharded)
        return states, 0.0, (0.0, 0.0)
    wide = precision.master or c
    states = ModelStates(*(weights.owned(layout) * each * wide for each in (1, 1, 2)))
    block, outside = block_weights(question, layout).all, ends * _end(question) / layout.tensor
    if layout.pipeline == 1:
        # The root's unit stays gathered, and the last block; in backward two blocks are, and gradients come.
        in_backward = (2 * outside + 3 * block) * c + block * wide
        return states, 0.0, ((outside + block) * c, in_backward)
    unreduced = weights.all * wide if layout.rounds > 1 else 0.0
    if layout.rounds <= layout.pipeline:
        unreduced /= layout.chunks
    copies = float(weights.all * c)
    states = ModelStates(states.parameters, states.gradients + unreduced, states.optimizer, copies=copies)
    return states, unreduced + copies, (0.0, block * c)
