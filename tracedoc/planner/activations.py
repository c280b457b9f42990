"""Count what a training step allocates in a block and at the loss, tensor by tensor.

Activations are counted as Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count them
for GPT; for their model in 16 bits the sum is theirs, ``s b h (34 + 5 a s / h)`` bytes a block. Other norms,
gated MLPs, grouped attention and autocast change the terms; the tests hold them against what PyTorch saves.
Bytes are those of the whole block, before tensor and context parallelism divide them.
"""

from __future__ import annotations

from tracedoc.planner.layouts import Layout
from tracedoc.planner.setup import PRECISIONS, Question


def kept_by_block(question: Question, layout: Layout, *, checkpointing: bool) -> float:
    """Return the bytes that a block keeps from forward to backward: all, or what is not computed again."""
    training = question.training
    if not checkpointing:
        return block_activations(question, layout)
    kept = mean_tokens(question) * question.model.hidden * residual_bytes(question, layout)
    if training.checkpointing == "selective":
        kept += training.tokens * _kept_selectively(question)
    return kept


def _kept_selectively(question: Question) -> float:
    """Return the bytes a token that a block keeps beside its input: attention, and every second product.

    ``torch.compile`` leaves out the block's last product: it is added to the residual stream, and no gradient
    needs it.
    """
    model, c = question.model, PRECISIONS[question.training.precision].compute
    kept = model.linears[::2]
    if question.training.compiled and len(model.linears) % 2:
        kept = kept[:-1]
    products = sum(model.mlp_width if m.count > 1 else m.outputs for m in kept)
    return c * (products + model.q_width) + 4 * model.heads


def recomputed_bytes(question: Question, layout: Layout) -> float:
    """Return the bytes on a GPU that a block does not keep, as Megatron's modules compute them again.

    Inputs of matrices are in 8 bits where these multiply so. Fused attention keeps no scores anyway.
    """
    training, model = question.training, question.model
    if training.checkpointing != "selective" or layout.family != "megatron":
        return 0.0
    c = PRECISIONS[training.precision].compute
    read = 1 if training.fp8 else c
    last = [m for m in model.linears if m.count > 1][-1:]
    activated = sum(m.inputs * model.times(m) / model.blocks for m in last)
    each = {
        "layernorm": 2 * read * model.hidden,
        "moe_act": read * activated * question.routed,
        "mla_up_proj": c * (model.q_width + 2 * model.kv_width),
    }
    return training.tokens / layout.split_work * sum(each.get(module, 0.0) for module in training.recomputed)


EAGER_LOGIT_BYTES = 12
"""Bytes of one logit at the peak: as computed and its gradient (2 + 2), log-softmax and its gradient in fp32.

That is what Transformers' causal-language loss holds, which computes in fp32.
"""

CHUNKS = 16
"""Parts in which a chunked loss computes its logits (torchtune's default is 8)."""


def logit_bytes(question: Question, layout: Layout) -> float:
    """Return the bytes of one logit at the peak; a fused loss writes the gradient over the logits."""
    training, model = question.training, question.model
    c = PRECISIONS[training.precision].compute
    if training.loss == "fused":
        return 2.0 * c
    if layout.family == "megatron" and training.loss == "eager":
        return 4.0 + c  # in place: an fp32 copy of the logits, which becomes softmax and gradient
    # Without a loss in fp32: as computed, log-softmax, and its gradient. Autocast computes losses in fp32.
    wide = model.fp32_loss or residual_bytes(question, layout) > c
    each = EAGER_LOGIT_BYTES if wide else 3 * c
    each += 2 * c if model.softcapped else 0  # the tanh, and what it was given
    return each / (CHUNKS if training.loss == "chunked" else 1)


def cached_logit_bytes(question: Question, layout: Layout) -> int:
    """Return the bytes of one logit that PyTorch's allocator holds at the peak though nothing uses them.

    An eager loss in fp32 frees the 16-bit logits before backward allocates their gradient, of twice the size,
    which does not fit where they were.
    """
    c = PRECISIONS[question.training.precision].compute
    wide = question.model.fp32_loss or residual_bytes(question, layout) > c
    eager = question.training.loss == "eager" and question.model.has_logits and question.model.step is None
    eager = eager and layout.family != "megatron"
    return c if eager and wide and c < 4 else 0


def residual_bytes(question: Question, layout: Layout) -> int:
    """Return the bytes of a number of the residual stream; autocast over fp32 parameters keeps it fp32."""
    precision = PRECISIONS[question.training.precision]
    wide = layout.family == "ddp" and precision.autocast and not question.frozen
    return precision.master if wide else precision.compute


def block_activations(question: Question, layout: Layout) -> float:
    """Return the bytes that the forward pass of one block keeps for backward, without checkpointing."""
    model = question.model
    if model.step is not None:
        return model.step.one_block(question.training.tokens)
    per_token = model.norms * _norm_bytes(question, layout) * model.hidden
    per_token += model.attentions * _attention_bytes(question, layout)
    per_token += _mlp_bytes(question, layout)
    if model.dropout:  # of each sublayer's result
        per_token += (1 + model.attentions) * model.hidden
    return mean_tokens(question) * per_token


def residual_activations(question: Question, layout: Layout) -> float:
    """Return what of a block's activations is as wide as the residual stream, and no matrix splits.

    Norms, the inputs of attention and MLP, and what dropout keeps: "10 s b h" of Korthikanti et al.
    """
    model = question.model
    each = model.norms * _norm_bytes(question, layout) + 2 * PRECISIONS[question.training.precision].compute
    dropped = 1 + model.attentions if model.dropout else 0
    return mean_tokens(question) * model.hidden * (each + dropped)


def mean_tokens(question: Question) -> float:
    """Return the tokens that a mean block sees: a sound encoder's are as many as its sound has positions."""
    model, training = question.model, question.training
    if not model.encoder_tokens:
        return training.tokens
    seen = model.encoder_blocks * model.encoder_tokens
    seen += (model.blocks - model.encoder_blocks) * training.sequence
    return training.micro_batch * seen / model.blocks


def _norm_bytes(question: Question, layout: Layout) -> int:
    """The bytes a norm keeps of a number: its input; an RMS norm in fp32 a copy of it, and the result."""
    model, residual = question.model, residual_bytes(question, layout)
    if not model.rms_norm:
        return residual
    return model.norm_bytes or (4 + (0 if question.frozen else residual))


def _attention_bytes(question: Question, layout: Layout) -> float:
    """The bytes that attention keeps for a token: inputs, queries, keys, values, scores, result."""
    training, model = question.training, question.model
    c = PRECISIONS[training.precision].compute
    wide = residual_bytes(question, layout) > c  # autocast: each matrix casts its input anew
    kept = c * (3 if wide and not model.fused_qkv else 1) * model.hidden
    kept += c * (2 * model.q_width + 2 * model.kv_width)
    if model.fused_qkv and model.rotary:  # values are a part of one tensor, which stays whole
        kept += c * (model.q_width + model.kv_width)
    if model.head_norms:
        kept += (model.norm_bytes or 4 + c) * (model.q_width + model.kv_width)
    if model.math_attention:
        # Computed in fp32, with all heads; cross attention has no bias, and takes a fused kernel.
        share = 1.0 if model.attention_dropout else 1 / model.attentions
        copies = (4 * 3 - c) * model.q_width - 2 * c * model.kv_width
        scores = 12 if model.attention_dropout else 4
        return kept + share * (copies + scores * model.heads * training.sequence)
    if training.fused_attention and not model.dense_attention:
        return kept + 4 * model.heads  # log-sum-exp
    # With dropout: softmax, mask and result, 5 bytes in 16 bits. Without: softmax in fp32, and its cast.
    scores = (2 * c + 1) if model.dropout else (4 + c if c < 4 else 4)
    scores = (model.score_bytes or scores) + (c if model.softcapped else 0)
    return kept + scores * model.heads * training.sequence


def _mlp_bytes(question: Question, layout: Layout) -> float:
    """The bytes the MLP keeps for a token: inputs, and tensors of its width, of each expert that is met."""
    training, model = question.training, question.model
    c = PRECISIONS[training.precision].compute
    wide = residual_bytes(question, layout) > c
    targets = training.lora_targets or model.lora_targets
    adapted = targets == ("all-linear",) or any(linear.named_by(targets) for linear in model.linears[-1:])
    frozen = bool(question.frozen) and not adapted
    # With one norm for both, the MLP sees what attention saw.
    inputs = 0 if frozen or model.norms == 1 else c * (2 if wide and model.gated else 1)
    # The last of them is the input of a matrix, and not kept if that is frozen.
    tensors = model.mlp_tensors - (1 if frozen and model.mlp_tensors > 1 else 0)
    dropped = c + 1 if model.mlp_dropout else 0  # the result, and a mask
    # With experts all but that of shared ones is as often there as tokens are routed.
    padded = question.routed / model.experts_met if model.experts_met else 1.0
    of_width = (tensors * c + dropped) * model.mlp_width * padded
    return inputs * model.hidden + of_width + routed_bytes(question, layout)


def routed_bytes(question: Question, layout: Layout) -> float:
    """The bytes a block keeps for a token as it is picked for its experts, and their results are put back.

    Megatron weighs what goes into an expert's last matrix, and keeps no result (arXiv 2603.07685, 4.1).
    """
    copies = 1 if layout.family == "megatron" else 2
    return copies * PRECISIONS[question.training.precision].compute * question.routed * question.model.hidden


def outside_activations(question: Question, layout: Layout) -> float:
    """The bytes that the embedding keeps, its output, and the last norm, with its output."""
    c = PRECISIONS[question.training.precision].compute
    model = question.model
    residual = residual_bytes(question, layout)
    norm = (4 + residual) if model.rms_norm else residual
    return question.training.tokens * model.hidden * (norm + c)


def block_backward(question: Question, layout: Layout) -> float:
    """Return the gradients that live at once in a block: three of the MLP's width, three of the residual."""
    c = PRECISIONS[question.training.precision].compute
    model = question.model
    return question.training.tokens * (
        3 * c * model.mlp_width + 3 * residual_bytes(question, layout) * model.hidden
    )
