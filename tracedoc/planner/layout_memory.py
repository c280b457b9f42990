"""Compute what one GPU of a layout holds at its peak: its stage's states, activations and logits."""

from __future__ import annotations

from tracedoc.planner.activations import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    NCCL_BYTES,
    Memory,
    block_activations,
    block_backward,
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
    """Return the peak of the fullest GPU: of the first stage, which keeps most micro-batches, or the last.

    ``question`` has the layout's micro-batch. With sequence parallelism tensor parallelism divides all
    activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2), as context parallelism does.
    """
    first, _, last = stage_blocks(question.model.blocks, layout)
    ends = (
        _stage(question, layout, first, checkpointing=checkpointing, embedding=True),
        _stage(question, layout, last, checkpointing=checkpointing, head=True),
    )
    return max(ends, key=lambda memory: memory.total)


def stage_weights(question: Question, layout: Layout, blocks: int, *, ends: int) -> float:
    """Return the weights of so many blocks on one GPU, and of ``ends``: embedding and head, split as well."""
    return blocks * block_weights(question, layout) + ends * _end(question) / layout.tensor


def block_weights(question: Question, layout: Layout) -> float:
    """Return the weights of a mean block on one GPU; norms count as split, too."""
    model = question.model
    every = (model.parameters - model.outside_parameters) / model.blocks
    spread = ((m, model.blocks if m.blocks is None else m.blocks) for m in model.linears if m.count > 1)
    experts = sum(m.inputs * m.outputs * m.count * times for m, times in spread) / model.blocks
    return (every - experts + experts / layout.expert) / layout.tensor


def _end(question: Question) -> float:
    return float(question.model.vocabulary * question.model.hidden)


def _stage(
    question: Question,
    layout: Layout,
    blocks: int,
    *,
    checkpointing: bool,
    embedding: bool = False,
    head: bool = False,
) -> Memory:
    training, model = question.training, question.model
    alone = layout.pipeline == 1
    tied = model.outside_parameters < 1.5 * _end(question)
    weights = stage_weights(question, layout, blocks, ends=2 if alone and not tied else 1)
    split = layout.tensor * layout.context
    gathered = _gathered(question, layout)
    kept = kept_by_block(question, SHARDED, checkpointing=checkpointing) / split
    # DTensor keeps what attention and MLP were given whole; Megatron gathers that again in backward.
    whole = 2 * gathered if layout.family == "torchtitan" else 0.0
    if not checkpointing:
        kept += whole
    activations = blocks * kept * (_held(layout) if embedding else 1)
    backward = block_backward(question, SHARDED) / split + gathered
    if checkpointing:
        backward += block_activations(question, SHARDED) / split + whole
    logits = 0.0
    if head or alone:
        per_logit = logit_bytes(question, SHARDED)
        if layout.family == "torchtitan" and layout.tensor > 1 and training.loss == "eager":
            per_logit = max(per_logit, LOSS_PARALLEL_BYTES)
        logits = training.tokens * model.vocabulary * per_logit / split
    states, units = _states(question, layout, weights)
    moment, working = ("loss", logits) if logits > backward else ("first block", backward)
    communicators = 1 + sum(size > 1 for _, size in layout.parts)
    return Memory(
        moment=moment,
        states=states,
        activations=activations,
        working=working,
        units=units,
        absent=0.0,
        reserve=FRAGMENTATION * (activations + working + units),
        context=CONTEXT_BYTES + communicators * NCCL_BYTES,
    )


def _gathered(question: Question, layout: Layout) -> float:
    """Return the bytes of the residual stream of one micro-batch, less the part that a GPU has anyway."""
    if layout.tensor == 1:
        return 0.0
    c = PRECISIONS[question.training.precision].compute
    stream = question.training.tokens / layout.context * question.model.hidden * c
    return stream * (1 - 1 / layout.tensor)


def _held(layout: Layout) -> float:
    """Return how many micro-batches the first stage keeps: as many as stages, interleaved a few more.

    Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) times as many.
    """
    stages = layout.pipeline
    more = 1 + (stages - 1) / (stages * layout.chunks) if layout.chunks > 1 else 1.0
    return min(layout.rounds, stages) * more


def _states(question: Question, layout: Layout, weights: float) -> tuple[ModelStates, float]:
    """Return the states of a stage with so many weights, and what is gathered or reduced beside them."""
    precision = PRECISIONS[question.training.precision]
    shards, c = layout.shards, precision.compute
    if layout.family == "megatron":
        weight, gradient, sharded = MEGATRON_BYTES[question.training.precision]
        return ModelStates(weights * weight, weights * gradient, weights * sharded / shards), 0.0
    wide = precision.master or c
    states = ModelStates(*(weights * each * wide / shards for each in (1, 1, 2)))
    block = block_weights(question, layout)
    if layout.pipeline == 1:
        end = _end(question) / layout.tensor
        return states, 2 * (block + end) * c + (block + end) * c + block * wide
    # torchtitan gathers a stage once for all its micro-batches, and reduces gradients after the last.
    unreduced = weights * wide if layout.rounds > 1 else 0.0
    states = ModelStates(
        states.parameters, states.gradients + unreduced, states.optimizer, copies=float(weights * c)
    )
    return states, block * (c + wide)
