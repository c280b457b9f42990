"""The shape of a transformer: what memory, traffic and arithmetic are computed from."""

from __future__ import annotations

import msgspec

from tracedoc.errors import InputError

VOCABULARY_ASSUMED = 32_000
"""Entries of the vocabulary where only the number of parameters is known (that of Llama 1 and 2)."""

_PARAMETERS_PER_ENTRY = 2048
"""Parameters for each entry of the vocabulary that a smaller model is given."""

LANGUAGE_MODEL_PARAMETERS = _PARAMETERS_PER_ENTRY * VOCABULARY_ASSUMED
"""From so many on, a model of which only the size is known is taken for a language model."""


_OF_ITS_RESULT = 1.2
"""A block that keeps less than so much of its result has its activations checkpointed already."""


class OneStep(msgspec.Struct, frozen=True):
    """Bytes and FLOPs of one micro-batch of ``tokens`` tokens (samples, where a model reads none).

    ``block_bytes`` is what the forward passes of all ``blocks`` keep, their results included, of which
    ``output_bytes`` are these results and ``input_bytes`` is what goes in; ``activation_bytes`` the most that
    is live beside parameters and gradients. ``trained`` parameters get gradients.
    """

    tokens: int
    trained: int
    blocks: int
    block_bytes: int
    input_bytes: int
    output_bytes: int
    activation_bytes: int
    matmul_flops: int
    attention_flops: int

    @property
    def checkpointed(self) -> bool:
        """Whether the step recomputes its blocks already."""
        return self.blocks > 0 and self.block_bytes < _OF_ITS_RESULT * self.output_bytes

    def kept(self, tokens: int, *, checkpointing: bool) -> float:
        """Return the bytes that forward keeps in blocks: with checkpointing what goes into them."""
        kept = min(self.block_bytes, self.input_bytes) if checkpointing else self.block_bytes
        return kept * tokens / self.tokens

    def beside(self, tokens: int) -> float:
        """Return the bytes outside of blocks at the peak: loss, logits, what a head works on."""
        return max(0, self.activation_bytes - self.block_bytes) * tokens / self.tokens

    def one_block(self, tokens: int) -> float:
        """The bytes that the forward pass of one block keeps."""
        return self.block_bytes / max(1, self.blocks) * tokens / self.tokens


class Linear(msgspec.Struct, frozen=True):
    """One matrix of a block: ``inputs`` x ``outputs`` weights, ``count`` of them (experts).

    ``name`` is its path inside the block. ``blocks`` is in how many blocks it is, ``None`` for all. PEFT
    gives it adapters unless ``adapted`` is off, of ``ranks`` times the rank; ``needs`` are the names that
    have to be among the targets for it, where its own name is none.
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1
    blocks: int | None = None
    ranks: int = 1
    adapted: bool = True
    needs: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """The weights of all that there are in a block."""
        return self.inputs * self.outputs * self.count

    def named_by(self, targets: tuple[str, ...]) -> bool:
        """Whether PEFT takes this matrix for one of the targets: by its path, or by the end of it."""
        if self.needs:
            return set(self.needs) <= set(targets)
        return any(self.name == target or self.name.endswith(f".{target}") for target in targets)

    @property
    def names(self) -> tuple[str, ...]:
        """The words that name this matrix as a target."""
        return self.needs or (self.name.rsplit(".", 1)[-1],)


class ModelShape(msgspec.Struct, frozen=True):
    """A stack of equal transformer blocks, with embeddings and head outside of them.

    ``parameters`` is all of them; ``active_parameters`` those that one token meets (fewer with experts).
    ``block_parameters`` is the largest block, ``outside_parameters`` what belongs to no block. ``q_width``
    and ``kv_width`` are heads times head size. ``mlp_width`` is what one token meets, over all its experts.
    ``attentions`` is the attention layers of a mean block (1.5 in an encoder-decoder), ``norms`` its norms,
    ``mlp_tensors`` how many tensors of the MLP's width its forward pass keeps, ``experts_met`` the experts
    that a token meets (0: there are none), ``experts_biased`` says that they add biases, and
    ``dense_attention`` that the model computes its scores itself, whatever kernel is chosen, and keeps
    ``score_bytes`` of each where that is not what eager attention usually keeps; ``math_attention`` that
    no fused kernel takes its heads or its bias, so that PyTorch computes in fp32. The share ``windowed`` of
    the blocks sees the last ``window`` positions only. The first
    ``encoder_blocks`` see ``encoder_tokens``, whatever the sequence is. ``softcapped`` says that its
    logits pass a tanh; ``head_norms`` that queries and keys do a norm; ``fp32_loss`` that the loss is
    computed in fp32. ``norm_bytes`` is what an RMS norm in fp32 keeps of a number; 0 is a copy and the
    result. Where a ``step`` of it was counted, that takes the place of all these.
    """

    name: str
    parameters: int
    active_parameters: int
    blocks: int
    block_parameters: int
    outside_parameters: int
    hidden: int
    heads: int
    q_width: int
    kv_width: int
    mlp_width: int
    vocabulary: int
    linears: tuple[Linear, ...]
    outside_linears: tuple[Linear, ...] = ()
    gated: bool = True
    rms_norm: bool = True
    norms: float = 2
    head_norms: bool = False
    norm_bytes: int = 0
    rotary: bool = False
    softcapped: bool = False
    fp32_loss: bool = True
    dense_attention: bool = False
    math_attention: bool = False
    score_bytes: int = 0
    window: int = 0
    windowed: float = 0.0
    encoder_blocks: int = 0
    encoder_tokens: int = 0
    experts_met: int = 0
    experts_biased: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    mlp_dropout: bool = False
    fused_qkv: bool = False
    mlp_tensors: float = 4
    has_logits: bool = True
    attentions: float = 1.0
    context: int | None = None
    wrap_classes: tuple[str, ...] = ()
    layers_path: str = "model.model.layers"
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    assumed: bool = False
    step: OneStep | None = None

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values; latent attention has as many as there are of queries."""
        head = max(1, self.q_width // max(1, self.heads))
        return self.heads if self.kv_width % head else max(1, self.kv_width // head)

    def attended(self, context: int) -> float:
        """The share of a causal attention's scores that are not outside of a window."""
        return 1 - self.windowed * max(0.0, 1 - self.window / context) ** 2

    @property
    def experts(self) -> int:
        """The experts of a block, 1 where there are none."""
        return max((m.count for m in self.linears), default=1)

    def times(self, matrix: Linear) -> int:
        """In how many blocks a matrix is."""
        return self.blocks if matrix.blocks is None else matrix.blocks

    @property
    def latent_linears(self) -> tuple[Linear, ...]:
        """The matrices that make queries, keys and values of what latent attention keeps."""
        return tuple(m for m in self.linears if m.name.endswith(("q_b_proj", "kv_b_proj")))

    @property
    def attention_width(self) -> int:
        """The heads times the mean of what a key and a value have: of latent attention values are smaller."""
        return self.kv_width if self.kv_heads == self.heads else self.q_width


def shape_from_parameters(parameters: int) -> ModelShape:
    """Return a Llama-like shape of exactly so many parameters, for when nothing else is known.

    A block holds 12 hidden^2 weights; depth is hidden / 128, of small models hidden / 64. 7e9 gives 33 blocks
    of 4096 (Llama-2-7B has 32). What the blocks leave is embeddings and head. Raises
    :class:`InputError` below 100 000 parameters.
    """
    if parameters < 100_000:
        raise InputError(
            f"{parameters} parameters are too few for a transformer", "give the count, as 350e6 or 7B"
        )
    head = 128 if parameters >= 500e6 else 64
    vocabulary = min(VOCABULARY_ASSUMED, max(16, parameters // _PARAMETERS_PER_ENTRY))

    def distance(hidden: int) -> float:
        return abs(12 * hidden**3 / head + 2 * vocabulary * hidden - parameters)

    largest = int((head * parameters / 12) ** (1 / 3) / head) + 2
    hidden = min((n * head for n in range(1, largest)), key=distance)
    block = 12 * hidden * hidden
    blocks = max(1, (parameters - 2 * vocabulary * hidden) // block)
    if parameters <= blocks * block:  # one block is already too large
        block = parameters * 9 // 10
    outside = parameters - blocks * block
    # Gated: gate, up and down of 8/3 hidden each hold as much as 8 hidden^2.
    mlp = 8 * hidden // 3
    linears = (
        *(Linear(f"self_attn.{name}_proj", hidden, hidden) for name in "qkvo"),
        Linear("mlp.gate_proj", hidden, mlp),
        Linear("mlp.up_proj", hidden, mlp),
        Linear("mlp.down_proj", mlp, hidden),
    )
    return ModelShape(
        name="Llama shape assumed" if parameters >= LANGUAGE_MODEL_PARAMETERS else "layers not known",
        parameters=parameters,
        active_parameters=parameters,
        blocks=blocks,
        block_parameters=block,
        outside_parameters=outside,
        hidden=hidden,
        heads=hidden // head,
        q_width=hidden,
        kv_width=hidden,
        mlp_width=mlp,
        vocabulary=vocabulary,
        linears=linears,
        assumed=True,
    )


def lora_parameters(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> int:
    """Return the trainable parameters of LoRA adapters: rank x (inputs + outputs) of every target matrix.

    ``targets`` names matrices as PEFT takes names, or is ``("all-linear",)``; the head that makes logits gets
    none there, as in PEFT. Hu et al. 2021, arXiv 2106.09685, section 4.1.
    """
    every = targets == ("all-linear",)

    def size(matrices: tuple[Linear, ...], blocks: int) -> int:
        chosen = [m for m in matrices if (every and m.adapted) or (not every and m.named_by(targets))]
        repeats = ((m, blocks if m.blocks is None else m.blocks) for m in chosen)
        return sum(times * m.ranks * rank * (m.inputs + m.outputs) * m.count for m, times in repeats)

    return size(shape.linears, shape.blocks) + size(shape.outside_linears, 1)
