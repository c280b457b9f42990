"""What a plan is asked about: how the model is trained, and on what."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError, did_you_mean
from tracedoc.planner.hardware import Cluster
from tracedoc.planner.shape import ModelShape, lora_parameters


class Precision(msgspec.Struct, frozen=True):
    """Bytes a number of the model takes in each place.

    ``compute`` is what matrices are multiplied in, ``master`` the precise copy that the optimizer updates
    (0: there is none), ``gradient`` what a framework that keeps 16-bit parameters keeps, ``state`` one number
    of the optimizer.
    """

    name: str
    title: str
    compute: int
    master: int
    gradient: int
    state: int
    reduce: int = 0
    """What FSDP reduces gradients in; 0: as they are computed. Other frameworks reduce what they keep."""

    @property
    def autocast(self) -> bool:
        """Whether parameters and gradients stay fp32 in plain PyTorch, and autocast casts on the way."""
        return self.master > 0


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "fp32", compute=4, master=0, gradient=4, state=4),
        # Parameter 2, gradient 2, fp32 master 4, Adam 4 + 4: Rajbhandari et al. 2020, arXiv 1910.02054, 3.1.
        Precision("bf16-mixed", "bf16 mixed precision", compute=2, master=4, gradient=2, state=4, reduce=4),
        Precision("fp16-mixed", "fp16 mixed precision", compute=2, master=4, gradient=2, state=4, reduce=4),
        Precision("bf16-mixed-reduce", "bf16 mixed precision, reduced in bf16", 2, 4, 2, 4),
        # The optimizer's states follow the dtype of the parameters that it holds.
        Precision("bf16", "pure bf16", compute=2, master=0, gradient=2, state=2),
    )
}


class Optimizer(msgspec.Struct, frozen=True):
    """States for each parameter: full numbers, single bytes, and rows plus columns (Adafactor).

    ``whole_matrices`` have to be on one GPU for the update. ``paged`` states move to the host when memory is
    short. ``plain`` is one of ``torch.optim``, with one state for each number.
    """

    name: str
    title: str
    full: float = 0
    one_byte: int = 0
    factored: bool = False
    whole_matrices: bool = False
    paged: bool = False
    plain: bool = True


OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer("adamw", "AdamW", full=2),
        Optimizer("adam", "Adam", full=2),
        Optimizer("sgd", "SGD"),
        Optimizer("sgd-momentum", "SGD with momentum", full=1),
        Optimizer("adafactor", "Adafactor", factored=True, whole_matrices=True, plain=False),
        # Jordan 2024, kellerjordan.github.io/posts/muon: one momentum for matrices, AdamW for the rest.
        Optimizer("muon", "Muon", full=1, whole_matrices=True, plain=False),
        # Dettmers et al. 2022, arXiv 2110.02861; a quantisation constant for 2048 numbers is left out.
        Optimizer("adamw-8bit", "8-bit AdamW", one_byte=2, plain=False),
        Optimizer("paged-adamw", "paged AdamW", full=2, paged=True, plain=False),
        Optimizer("paged-adamw-8bit", "paged 8-bit AdamW", one_byte=2, paged=True, plain=False),
    )
}

OFFLOADS = ("none", "optimizer", "all", "nvme")
CHECKPOINTING = ("auto", "on", "selective", "off")
LOSSES = ("eager", "fused", "chunked")

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight, one constant in 8 bits for 64: double quantisation, 4.127 bits a weight.

Dettmers et al. 2023, arXiv 2305.14314; constants are quantised in blocks of 256.
"""


class Training(msgspec.Struct, frozen=True):
    """How the model is trained. Sizes are per GPU and micro-step; ``sequence`` is in tokens.

    ``lora_rank`` 0 means that all parameters are trained. ``base_bits`` 4 is QLoRA with double quantisation.
    ``fused_attention`` keeps no attention scores (flash attention,
    PyTorch's SDPA). ``loss`` "eager" is that of Transformers, which computes in fp32; "fused" keeps the
    logits once, in place; "chunked" a part of them at a time. ``accumulation`` is micro-batches for each
    update. ``optimizer_in_backward`` updates each parameter as its gradient comes, and frees that.
    ``compiled`` is ``torch.compile``, ``fp8`` matrix products in 8 bits. ``checkpointing`` "selective"
    keeps attention and every second matrix product, as torchtitan does; Megatron computes again the
    modules of a block that are ``recomputed``, attention if none is named. ``offload`` moves to host memory
    the optimizer (and its gradients), or all model states, or these to NVMe. ``capacity`` pads what each
    expert computes on to so many times its even share of the tokens, and drops the rest; 0: as many as come.
    """

    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    sequence: int = 2048
    micro_batch: int = 1
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    base_bits: int = 16
    checkpointing: str = "auto"
    recomputed: tuple[str, ...] = ()
    fused_attention: bool = True
    offload: str = "none"
    loss: str = "eager"
    accumulation: int = 1
    optimizer_in_backward: bool = False
    compiled: bool = False
    fp8: bool = False
    capacity: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of one GPU and step."""
        return self.sequence * self.micro_batch

    @property
    def recomputes(self) -> bool:
        """Whether backward computes activations again, all or some; what is left open does not."""
        return self.checkpointing in ("on", "selective")


class Question(msgspec.Struct, frozen=True):
    """One model, trained in one way, on equal GPUs of ``memory_bytes`` in ``nodes`` equal machines."""

    model: ModelShape
    training: Training
    gpus: int
    nodes: int
    memory_bytes: float

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one machine."""
        return self.gpus // self.nodes

    @property
    def routed(self) -> float:
        """Experts that compute on a token, in the mean of tokens; 0 where there are none."""
        return self.model.experts_met * (self.training.capacity or 1.0)

    @property
    def trainable(self) -> int:
        """Parameters that get gradients and optimizer states."""
        training = self.training
        if not training.lora_rank:
            return self.model.step.trained if self.model.step else self.model.parameters
        return lora_parameters(
            self.model, training.lora_rank, training.lora_targets or self.model.lora_targets
        )

    @property
    def frozen(self) -> int:
        """Parameters that are only read: with adapters, those of the model."""
        if self.training.lora_rank:
            return self.model.parameters
        return self.model.parameters - self.trainable

    def changed(self, **changes: object) -> Question:
        """Return the question with other values of the training or of itself."""
        own = {k: v for k, v in changes.items() if k in ("gpus", "nodes", "memory_bytes", "model")}
        rest = {k: v for k, v in changes.items() if k not in own}
        return replace(self, training=replace(self.training, **rest), **own)


class Replayed(msgspec.Struct, frozen=True):
    """The step of one strategy that a run's replay predicts: low, likely and high, in milliseconds.

    It holds for ``training`` on so many ``gpus`` in so many ``nodes``, and for nothing else.
    """

    strategy: str
    training: Training
    gpus: int
    nodes: int
    step_ms: tuple[float, float, float]


PARALLEL_FRAMEWORKS = ("torchtitan", "megatron")
FRAMEWORKS = ("pytorch", "accelerate", "trainer", "deepspeed", *PARALLEL_FRAMEWORKS)
OBJECTIVES = ("speed", "memory")


class PlanRequest(msgspec.Struct, frozen=True):
    """What is known of the machines, and what is wanted of the answer."""

    cluster: Cluster
    objective: str = "speed"
    framework: str = "pytorch"
    utilisation: float | None = None
    """Share of the peak that all arithmetic reaches, in place of the fitted model."""
    measured_compute_ms: float | None = None
    """What the GPU of a captured run computed in a step, without recomputation; it replaces the estimate."""
    scale: float = 1.0
    """What a captured run computed over what was predicted for it; the estimate is multiplied by it."""
    idle_ms: float = 0.0
    """What a captured run's step took beside computation and communication; every step takes it."""
    replayed: tuple[Replayed, ...] = ()
    """Steps that the replay of a captured run predicts; they replace the estimate."""
    batch: int | None = None
    """Sequences of all GPUs for each update, for layouts and for a search."""
    layout: str = ""
    """The layout that is asked about, as ``tp2-pp4-dp8``; empty where it is left open."""
    overlaps: tuple[str, ...] | None = None
    """What layouts send beside computation, of ``layouts.OVERLAPS``; ``None`` for what is usual."""
    context_by: str = ""
    """How layouts share a sequence, of ``layouts.CONTEXTS``; empty for what is usual."""
    sequence_parallel: bool = True
    """Whether tensor parallelism splits what is outside of its matrices, too."""
    flex: bool = False
    """Whether Megatron's layouts send tokens to experts by DeepEP or HybridEP."""
    strategy: str = ""
    """The strategy that a search found; empty where the decision rules choose."""
    keeps_micro_batch: bool = False
    """Whether layouts take the question's micro-batch; else they find their own."""
    keeps_accumulation: bool = False
    """Whether the layout that is asked about takes the question's accumulation."""
    search: bool = False
    """Whether the fastest micro-batch is searched."""
    tokens: int | None = None
    """Tokens to train on, for how long that takes."""
    price: float | None = None
    """Price of a GPU and hour, for what these tokens cost."""


def check(question: Question) -> None:
    """Raise :class:`InputError` for what cannot be, with the nearest value that can."""
    training, model = question.training, question.model
    _known("precision", training.precision, PRECISIONS)
    _known("optimizer", training.optimizer, OPTIMIZERS)
    _known("offload", training.offload, OFFLOADS)
    _known("checkpointing", training.checkpointing, CHECKPOINTING)
    _known("loss", training.loss, LOSSES)
    for module in training.recomputed:
        _known("checkpointing", module, (*CHECKPOINTING, *_modules(model)))
    for name, value in (
        ("gpus", question.gpus),
        ("nodes", question.nodes),
        ("seq", training.sequence),
        ("micro-batch", training.micro_batch),
        ("accumulation", training.accumulation),
    ):
        if value < 1:
            raise InputError(f"--{name} is {value}, and must be 1 or more", f"the least is: --{name} 1")
    if question.memory_bytes <= 0:
        raise InputError("a GPU has no memory here", "give it as --gpu-memory 24GB")
    if question.gpus % question.nodes:
        near = max(1, round(question.gpus / question.nodes)) * question.nodes
        raise InputError(
            f"{question.gpus} GPUs do not divide evenly over {question.nodes} nodes",
            f"nearest: --gpus {near}",
        )
    if training.lora_rank < 0 or training.lora_rank > model.hidden:
        most = 16 if training.lora_rank < 0 else model.hidden
        raise InputError(
            f"--lora-rank is {training.lora_rank}; the hidden size of {model.name} is {model.hidden}",
            f"a rank is 1 to {model.hidden}, commonly 8 to 64: --lora-rank {min(most, 64)}",
        )
    if training.base_bits not in (4, 16):
        raise InputError(f"a base of {training.base_bits} bits is not known", "use 4 (QLoRA) or 16")
    if training.base_bits == 4 and not training.lora_rank:
        raise InputError("4-bit weights cannot be trained themselves", "add adapters: --lora-rank 16")
    matrices = (*model.linears, *model.outside_linears)
    names = list(dict.fromkeys(name for linear in matrices for name in linear.names))
    for target in training.lora_targets:
        known = target in names or any(linear.named_by((target,)) for linear in matrices)
        if target != "all-linear" and not known:
            raise InputError(
                f"{model.name} has no matrix called {target!r}{did_you_mean(target, names)}",
                f"known: all-linear, {', '.join(names)}",
            )
    if model.context is not None and training.sequence > model.context:
        raise InputError(
            f"--seq {training.sequence} is longer than the {model.context} positions of {model.name}",
            f"the longest is: --seq {model.context}",
        )


def _modules(model: ModelShape) -> Iterator[str]:
    """What Megatron can compute again of a block: attention, norms, experts' activation, latent keys."""
    yield from ("core_attn", "layernorm")
    if model.experts_met:
        yield "moe_act"
    if model.latent_linears:
        yield "mla_up_proj"


def _known(what: str, word: str, words: object) -> None:
    names = list(words)  # type: ignore[call-overload]
    if word not in names:
        raise InputError(
            f"no {what} is called {word!r}{did_you_mean(word, names)}", f"known: {', '.join(names)}"
        )
