"""The ways to share the work among GPUs: data parallelism of all kinds, and a model split in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.setup import OPTIMIZERS, PlanRequest, Question

SHORTEST_PART = 4096
"""Tokens of a sequence below which it is not worth splitting."""
LARGEST_MICRO_BATCH = 8
LARGEST_EXPERT = 64
"""As many GPUs as published runs share experts over; over more, uneven routing costs what is not counted."""


class Strategy(msgspec.Struct, frozen=True):
    """What of the model states is split over data-parallel GPUs, and by which framework.

    ``split`` holds of ``parameters``, ``gradients`` and ``optimizer`` what each GPU has only a share of.
    ``gathers`` keeps fp32 shards and gathers a 16-bit copy: of the whole model until its backward pass
    (``whole``), or unit by unit (``unit``). ``hybrid`` splits over ``over`` nodes only, and repeats that.
    ``kept_in_node`` keeps what forward gathered split over the node. ``alone`` is for one GPU, where it
    serves to offload; ``variant`` is named only where it is the fastest of its family.
    """

    id: str
    title: str
    family: str  # "ddp" | "fsdp" | "deepspeed" | "torchtitan" | "megatron"
    split: frozenset[str] = frozenset()
    gathers: str = ""  # "" | "whole" | "unit"
    hybrid: bool = False
    over: float = 1.0
    kept_in_node: bool = False
    alone: bool = False
    variant: bool = False


_GRADIENTS = frozenset({"gradients", "optimizer"})
_ALL = frozenset({"parameters", "gradients", "optimizer"})

STRATEGIES = {
    s.id: s
    for s in (
        Strategy("single", "one GPU", "ddp"),
        Strategy("single-fsdp", "FSDP on one GPU", "fsdp", _ALL, gathers="unit", alone=True),
        Strategy("single-zero-2", "DeepSpeed ZeRO-2 on one GPU", "deepspeed", _GRADIENTS, alone=True),
        Strategy(
            "single-zero-3", "DeepSpeed ZeRO-3 on one GPU", "deepspeed", _ALL, gathers="unit", alone=True
        ),
        Strategy("ddp", "DDP", "ddp"),
        Strategy("zero-redundancy", "DDP + ZeRO-1 optimizer", "ddp", frozenset({"optimizer"})),
        Strategy("shard-grad-op", "FSDP SHARD_GRAD_OP", "fsdp", _ALL, gathers="whole"),
        Strategy("full-shard", "FSDP FULL_SHARD", "fsdp", _ALL, gathers="unit"),
        Strategy("hsdp", "FSDP HYBRID_SHARD", "fsdp", _ALL, gathers="unit", hybrid=True),
        Strategy(
            "hsdp-half", "FSDP HYBRID_SHARD over half a node", "fsdp", _ALL, gathers="unit", hybrid=True,
            over=0.5, variant=True,
        ),
        Strategy(
            "hsdp-2", "FSDP HYBRID_SHARD over 2 nodes", "fsdp", _ALL, gathers="unit", hybrid=True, over=2,
            variant=True,
        ),
        Strategy(
            "full-shard-node", "FSDP FULL_SHARD, resharded to a node", "fsdp", _ALL, gathers="unit",
            kept_in_node=True, variant=True,
        ),
        Strategy("zero-1", "DeepSpeed ZeRO-1", "deepspeed", frozenset({"optimizer"})),
        Strategy("zero-2", "DeepSpeed ZeRO-2", "deepspeed", _GRADIENTS),
        Strategy("zero-3", "DeepSpeed ZeRO-3", "deepspeed", _ALL, gathers="unit"),
    )
}  # fmt: skip
"""Every strategy of data parallelism by id.

FSDP has no ZeRO-1; DDP with ZeroRedundancyOptimizer is PyTorch's.
"""

_OF_LAYOUTS = {
    "torchtitan": Strategy("torchtitan", "FSDP of torchtitan", "torchtitan", _ALL, gathers="unit"),
    "megatron": Strategy(
        "megatron", "Megatron's distributed optimizer", "megatron", frozenset({"optimizer"})
    ),
}
"""What the frameworks that split a model in other ways as well do with its states."""

_BY_ID = STRATEGIES | _OF_LAYOUTS


OVERLAPS = ("data", "tensor", "expert")
"""Kinds of communication that can run beside computation: of states, of split matrices, of experts."""
CONTEXTS = ("ring", "all-to-all", "gather")
"""How GPUs share a sequence: keys and values go round, heads are exchanged for tokens, or all is gathered."""


class Layout(msgspec.Struct, frozen=True):
    """How the GPUs share the work: ``data`` x ``context`` x ``pipeline`` x ``tensor`` of them.

    ``data`` groups see other sequences, and keep the states as ``strategy`` says, in so many ``replicas``.
    ``tensor`` GPUs share each matrix, and with sequence parallelism the activations between them;
    ``pipeline`` GPUs share the blocks, ``context`` GPUs each sequence. The experts are spread over ``expert``
    parts, and each is cut over ``expert_tensor`` GPUs: over as many as a matrix, where that is 0. Each update
    takes ``rounds`` micro-batches of ``micro_batch`` sequences; with ``chunks`` of 2 each stage is two parts
    of the model (interleaved 1F1B). What is trained data-parallel
    alone has a size of 1 in all other ways. ``overlaps`` names of :data:`OVERLAPS` what is sent beside
    computation, ``context_by`` one of :data:`CONTEXTS`. Without ``sequence_parallel`` a tensor group keeps
    whole what its matrices do not split. ``flex`` sends tokens to experts by DeepEP or HybridEP, not NCCL.
    """

    strategy: str
    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    expert_tensor: int = 0
    micro_batch: int = 1
    rounds: int = 1
    replicas: int = 1
    overlaps: tuple[str, ...] | None = None
    context_by: str = ""
    sequence_parallel: bool = True
    flex: bool = False

    @property
    def overlapped(self) -> tuple[str, ...]:
        """Whose communication runs beside computation: as said, else as the framework's default is."""
        if self.overlaps is not None:
            return self.overlaps
        return OVERLAPS if self.family == "megatron" else ("data",)

    @property
    def shares_context(self) -> str:
        """How GPUs share a sequence, one of :data:`CONTEXTS`: as said, else as the framework's default is."""
        return self.context_by or ("gather" if self.family == "torchtitan" else "ring")

    @property
    def states(self) -> Strategy:
        """What of the model states is split over the data-parallel GPUs."""
        return _BY_ID[self.strategy]

    @property
    def family(self) -> str:
        """Whose it is: "ddp", "fsdp", "deepspeed", "torchtitan" or "megatron"."""
        return _BY_ID[self.strategy].family

    @property
    def splits_states_alone(self) -> bool:
        """Whether it is data parallelism alone: each GPU computes the whole model."""
        return self.tensor == self.pipeline == self.context == self.expert == 1

    @property
    def shards(self) -> int:
        """Over how many GPUs a stage's states are sharded beside the tensor split, where they are."""
        return self.data * self.context // self.replicas

    @property
    def cut_experts(self) -> int:
        """Over how many GPUs each expert is cut."""
        return self.expert_tensor or self.tensor

    @property
    def expert_shards(self) -> int:
        """Over how many GPUs the states of an expert are sharded, where they are."""
        return self.shards * self.tensor // (self.expert * self.cut_experts)

    @property
    def split_work(self) -> int:
        """Over how many GPUs the work of each block is split."""
        return self.tensor * self.context

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each way of splitting that is in use, with its degree."""
        data = "FSDP" if self.family == "torchtitan" else "DP"
        sizes = (self.tensor, self.pipeline, self.context, self.expert, self.data)
        named = zip(("TP", "PP", "CP", "EP", data), sizes, strict=True)
        parts = tuple(part for part in named if part[1] > 1) or ((data, 1),)
        return (*parts, ("ETP", self.cut_experts)) if self.cut_experts != self.tensor else parts

    @property
    def ways(self) -> int:
        """How many ways of splitting the model have to be set up; to spread experts needs no other model."""
        if self.strategy in STRATEGIES:
            kept = self.states
            return bool(kept.split) + (kept.hybrid or kept.kept_in_node)
        return sum(size > 1 for size in (self.tensor, self.pipeline, self.context, self.data))

    @property
    def id(self) -> str:
        """A name without spaces: that of the strategy, or as ``tp8-pp8-fsdp8``."""
        if self.strategy in STRATEGIES:
            return self.strategy
        return "-".join(f"{name.lower()}{size}" for name, size in self.parts)

    @property
    def title(self) -> str:
        """The layout in words: the strategy's, or as ``TP 8 x PP 8 x FSDP 8``."""
        if self.strategy in STRATEGIES:
            return self.states.title
        return " x ".join(f"{name} {size}" for name, size in self.parts)

    @property
    def waits(self) -> float:
        """The micro-batches for which a stage waits in an update (2104.04473, 2.2)."""
        return (self.pipeline - 1) / self.chunks

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits for first or last micro-batches, 0 to 1."""
        return self.waits / (self.rounds + self.waits)

    @property
    def schedule(self) -> str:
        """The micro-batches of an update in words."""
        size = f"{self.micro_batch} sequence{'s' if self.micro_batch > 1 else ''}"
        if self.rounds == 1:
            return f"one micro-batch of {size}"
        order = f"{'interleaved ' if self.chunks > 1 else ''}1F1B, " if self.pipeline > 1 else ""
        return f"{order}{self.rounds} micro-batches of {size}"


def data_parallel(question: Question, strategy: str) -> Layout:
    """The layout of a strategy of data parallelism on all GPUs of a question, with its micro-batches."""
    gpus, training, chosen = question.gpus, question.training, STRATEGIES[strategy]
    part = min(gpus, max(1, int(question.gpus_per_node * chosen.over))) if chosen.hybrid else gpus
    return Layout(
        strategy,
        data=gpus,
        micro_batch=training.micro_batch,
        rounds=training.accumulation,
        replicas=gpus // part,
    )


def possible(gpus: int, nodes: int) -> tuple[Strategy, ...]:
    """Return the strategies that mean something on so many GPUs."""
    if gpus == 1:
        return tuple(s for s in STRATEGIES.values() if s.alone or s.id == "single")
    several = (s for s in STRATEGIES.values() if not s.alone and s.id != "single")
    return tuple(s for s in several if _splits_evenly(s, gpus // nodes, nodes))


def _splits_evenly(strategy: Strategy, gpus_per_node: int, nodes: int) -> bool:
    """Whether a strategy is one of its own: a node's part has to be one, and to be repeated."""
    if strategy.kept_in_node:
        return nodes > 1 and gpus_per_node > 1
    if not strategy.hybrid:
        return True
    if strategy.over < 1:
        return gpus_per_node >= 4 and gpus_per_node % 2 == 0
    return gpus_per_node > 1 and nodes > strategy.over and nodes % int(strategy.over) == 0


def can_offload(strategy: Strategy, offload: str) -> bool:
    """Whether a strategy's framework can move this to the host.

    DeepSpeed moves the optimizer from stage 1 on, everything in stage 3, and it alone uses NVMe; on one GPU
    it is its stage 2 with one shard. FSDP moves everything or nothing (``CPUOffloadPolicy``), on one GPU as
    well.
    """
    if offload == "none":
        return not strategy.alone
    if offload == "optimizer":
        return strategy.family == "deepspeed"
    if offload == "all":
        return strategy.family == "fsdp" or strategy.id in ("zero-3", "single-zero-3")
    return strategy.id in ("zero-3", "single-zero-3")


def can_train(strategy: Strategy, question: Question) -> bool:
    """Whether a strategy trains with this optimizer, and with adapters, at all.

    ``torch.optim.Adafactor`` has no version for sharded tensors, Muon needs whole matrices, and
    ``ZeroRedundancyOptimizer`` fails where a rank owns parameters without gradients. DeepSpeed checkpoints
    whole blocks.
    """
    optimizer, deepspeed = OPTIMIZERS[question.training.optimizer], strategy.family == "deepspeed"
    if optimizer.whole_matrices and strategy.split and ("parameters" in strategy.split or not deepspeed):
        return False
    if deepspeed and question.training.checkpointing == "selective":
        return False
    return not (strategy.id == "zero-redundancy" and (question.frozen or not optimizer.plain))


def in_framework(question: Question, layout: Layout) -> Question:
    """Return the question with the layout's micro-batch, and the kernels of its framework.

    Megatron's are Transformer Engine's: norms keep their input alone, and an MLP what goes into its
    activation and what comes out; what works element by element is fused.
    """
    asked = question.changed(micro_batch=layout.micro_batch, accumulation=layout.rounds)
    if layout.family != "megatron":
        return asked
    model = question.model
    tensors = min(model.mlp_tensors, 3 if model.gated else 2)
    norm = 2 if model.rms_norm else model.norm_bytes
    kernels = {"dense_attention": False, "math_attention": False, "score_bytes": 0}
    fused = replace(model, norm_bytes=norm, mlp_tensors=tensors, **kernels)
    return asked.changed(model=fused, compiled=True, fused_attention=True)


def stage_blocks(blocks: int, layout: Layout) -> tuple[int, int, int]:
    """Return the blocks of the first stage, of the largest, and of the last.

    Embedding and head count as a block each, but for Megatron where the blocks alone come out even.
    """
    stages = layout.pipeline
    if stages == 1:
        return blocks, blocks, blocks
    if layout.family == "megatron" and blocks % stages == 0:
        return (blocks // stages,) * 3
    most = ceil((blocks + 2) / stages)
    return most - 1, most if stages > 2 else most - 1, most - 1


_WAYS = {
    "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor",
    "vpp": "chunks", "dp": "data", "fsdp": "data",
}  # fmt: skip
"""How layouts are typed, and what each part is."""


def parse_layout(text: str, question: Question, family: str) -> Layout:
    """The layout of ``tp2-pp4-dp8``; what is not typed is 1, and ``dp`` what the other parts leave.

    Raises :class:`InputError` for what is no layout, and for one that these GPUs or this model cannot have.
    """
    option, example = f"--layout {text}", "as in: --layout tp2-pp4-dp8"
    sizes: dict[str, int] = {}
    for part in text.lower().split("-"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d{0,5})", part)
        if match is None or match[1] not in _WAYS or _WAYS[match[1]] in sizes:
            raise InputError(
                f"{option}: {part!r} is no part of a layout", f"{example}; parts: {', '.join(_WAYS)}"
            )
        sizes[_WAYS[match[1]]] = int(match[2])
    asked = replace(Layout(family, data=1), **sizes)
    others = asked.tensor * asked.pipeline * asked.context
    asked = replace(asked, data=sizes.get("data", max(1, question.gpus // others)))
    for wrong, why in _cannot_have(question, asked):
        if wrong:
            raise InputError(f"{option}: {why}", example)
    if (gpus := asked.data * others) != question.gpus:
        raise InputError(f"{option} is for {gpus} GPUs, not {question.gpus}", f"add: --gpus {gpus}")
    return asked


def _cannot_have(question: Question, layout: Layout) -> tuple[tuple[bool, str], ...]:
    """Whether each thing that a layout needs is missing, with that in words."""
    model, heads, experts = question.model, question.model.kv_heads, question.model.experts
    expert, stages = layout.expert, layout.pipeline * layout.chunks
    peers = layout.data * layout.context * layout.tensor // layout.cut_experts
    # Megatron copies the heads of keys where more GPUs share a matrix than there are of them.
    copied = layout.family == "megatron" and layout.tensor % heads == 0
    whole = not model.assumed and (model.heads % layout.tensor or (heads % layout.tensor and not copied))
    shared = f"{layout.tensor} GPUs cannot share its {model.heads} heads, {heads} of keys"
    return (
        (bool(whole), f"{model.name}: {shared}"),
        # Megatron's first and last part may be embedding and head alone.
        (
            stages > model.blocks + 2 * (layout.family == "megatron"),
            f"{model.blocks} blocks are fewer than its {stages} stages",
        ),
        (layout.chunks > 1 and layout.pipeline == 1, "vpp is for a pipeline, and this has none"),
        (bool(experts % expert), f"the experts of a block, {experts}, do not divide by {expert}"),
        (bool(peers % expert), f"the {peers} GPUs that could share experts do not divide by {expert}"),
    )


def exchanges_heads(question: Question, layout: Layout) -> bool:
    """Whether each GPU of a sequence can take a part of the heads, where they are exchanged for tokens."""
    parts, model = layout.tensor * layout.context, question.model
    return layout.shares_context != "all-to-all" or model.assumed or model.heads % parts == 0


def check_layouts(question: Question, request: PlanRequest) -> None:
    """Raise :class:`InputError` for what these frameworks do not train, or this file does not know."""
    family = request.framework
    if question.gpus == 1 and not request.layout:
        raise InputError(f"--framework {family} splits a model over several GPUs", "add: --gpus 8")
    if family == "torchtitan" and request.context_by == "all-to-all":
        raise InputError(
            "torchtitan does not exchange heads for tokens", "take --context-parallel ring or gather"
        )
    if not request.sequence_parallel and (family == "torchtitan" or question.model.experts_met):
        raise InputError(
            f"--framework {family} has sequence parallelism with this model",
            "leave out --no-sequence-parallel",
        )
    capacity, experts = question.training.capacity, question.model.experts_met
    if (capacity or request.flex) and not (family == "megatron" and experts):
        raise InputError(
            "--capacity and --flex-dispatch are for Megatron's models with experts", "leave it out"
        )
    if capacity < 0 or (capacity and request.flex):
        raise InputError(
            f"--capacity is {capacity:g}{' with --flex-dispatch' * request.flex}",
            "Megatron pads an even share with NCCL's all-to-all alone: --capacity 1",
        )
    for what, refused in _refused(question, family):
        if refused:
            raise InputError(
                f"{what} is not planned for --framework {family}", "use --framework pytorch or deepspeed"
            )


def _refused(question: Question, family: str) -> tuple[tuple[str, bool], ...]:
    training, model = question.training, question.model
    known = {
        "torchtitan": ("bf16-mixed", "fp32"),
        "megatron": ("bf16-mixed", "bf16-mixed-reduce", "fp16-mixed", "fp32"),
    }[family]
    return (
        ("--lora-rank", training.lora_rank > 0),
        (f"--offload {training.offload}", training.offload != "none"),
        (f"--optimizer {training.optimizer}", training.optimizer not in ("adamw", "adam")),
        (f"--precision {training.precision}", training.precision not in known),
        ("--optimizer-in-backward", training.optimizer_in_backward),
        ("--script", model.step is not None),
        (f"a model like {model.name}", model.attentions != 1 or not model.has_logits),
    )


class Update(msgspec.Struct, frozen=True):
    """The sequences of all GPUs for an update, in micro-batches of so many, so often; ``None`` is left open.

    Without ``sequences`` the other two are there, and each layout has as many as that gives its groups.
    """

    sequences: int | None
    micro_batch: int | None = None
    rounds: int | None = None

    def of(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with each micro-batch that makes its part of the update."""
        if self.sequences is None:
            yield replace(layout, micro_batch=self.micro_batch or 1, rounds=self.rounds or 1)
            return
        each, rest = divmod(self.sequences, layout.data)
        size = self.micro_batch or (self.rounds and each // self.rounds)
        for one in _powers(min(each, LARGEST_MICRO_BATCH)) if size is None else (size,):
            if each and not rest and one and each % one == 0 and (self.rounds or each // one) == each // one:
                yield replace(layout, micro_batch=one, rounds=each // one)


def layouts(question: Question, family: str, update: Update) -> Iterator[Layout]:
    """Yield the layouts of a framework for an update."""
    if any(refused for _, refused in _refused(question, family)):
        return
    model, gpus, experts = question.model, question.gpus, question.model.experts
    for tensor in _powers(question.gpus_per_node):
        if not model.assumed and (model.heads % tensor or question.model.kv_heads % tensor):
            continue
        for pipeline in _stages(question, gpus // tensor):
            for context in _powers(gpus // tensor // pipeline):
                data, rest = divmod(gpus, tensor * pipeline * context)
                long = context == 1 or question.training.sequence // context >= SHORTEST_PART
                if rest or not long:
                    continue
                for expert in _powers(min(experts, data * context, LARGEST_EXPERT)):
                    if experts % expert or (data * context) % expert:
                        continue
                    if family == "torchtitan" and expert > 1 and expert % context:
                        continue
                    base = Layout(family, data, tensor, pipeline, context, expert)
                    yield from _schedules(base, model.blocks, update)


def _schedules(base: Layout, blocks: int, update: Update) -> Iterator[Layout]:
    """Yield the layout with every schedule that makes stages do more than wait."""
    for one in update.of(base):
        if one.pipeline > 1 and one.rounds < one.pipeline:
            continue
        yield one
        if one.pipeline > 1 and one.rounds % one.pipeline == 0 and blocks + 2 >= 4 * one.pipeline:
            yield replace(one, chunks=2)


def _stages(question: Question, most: int) -> Iterator[int]:
    blocks = question.model.blocks
    for stages in range(1, min(most, blocks // 2) + 1):
        if question.gpus % stages or (most % stages):
            continue
        even = blocks % stages == 0 or (blocks + 2) % stages == 0
        if even or stages & (stages - 1) == 0:
            yield stages


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
