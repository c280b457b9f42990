"""Split a model in several ways at once: tensor, pipeline, context and expert parallel."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError
from tracedoc.planner.setup import Question

PARALLEL_FRAMEWORKS = ("torchtitan", "megatron")
SHORTEST_PART = 4096
"""Tokens of a sequence below which it is not worth splitting."""
LARGEST_MICRO_BATCH = 8
LARGEST_EXPERT = 64
"""As many GPUs as published runs share experts over; over more, uneven routing costs what is not counted."""


class Layout(msgspec.Struct, frozen=True):
    """How the GPUs share the work: ``data`` x ``context`` x ``pipeline`` x ``tensor`` of them.

    ``tensor`` GPUs share each matrix, and with sequence parallelism the activations between them;
    ``pipeline`` GPUs share the blocks, ``context`` GPUs each sequence, ``data`` groups see other sequences.
    Of data x context GPUs, ``expert`` share the experts. Each update takes ``rounds`` micro-batches of
    ``micro_batch`` sequences; with ``chunks`` of 2 each stage is two parts of the model (interleaved 1F1B).
    """

    family: str
    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    micro_batch: int = 1
    rounds: int = 1

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each way of splitting that is in use, with its degree."""
        data = "FSDP" if self.family == "torchtitan" else "DP"
        sizes = (self.tensor, self.pipeline, self.context, self.expert, self.data)
        named = zip(("TP", "PP", "CP", "EP", data), sizes, strict=True)
        return tuple(part for part in named if part[1] > 1) or ((data, 1),)

    @property
    def id(self) -> str:
        """A name without spaces, as ``tp8-pp8-fsdp8``."""
        return "-".join(f"{name.lower()}{size}" for name, size in self.parts)

    @property
    def title(self) -> str:
        """The layout in words, as ``TP 8 x PP 8 x FSDP 8``."""
        return " x ".join(f"{name} {size}" for name, size in self.parts)

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits for first or last micro-batches (2104.04473, 2.2)."""
        waits = (self.pipeline - 1) / self.chunks
        return waits / (self.rounds + waits)

    @property
    def shards(self) -> int:
        """Over how many GPUs a stage's states are sharded beside the tensor split."""
        return self.data * self.context

    @property
    def schedule(self) -> str:
        """The micro-batches of an update in words."""
        size = f"{self.micro_batch} sequence{'s' if self.micro_batch > 1 else ''}"
        if self.rounds == 1:
            return f"one micro-batch of {size}"
        order = {1: "1F1B, ", 2: "interleaved 1F1B, "}[self.chunks] if self.pipeline > 1 else ""
        return f"{order}{self.rounds} micro-batches of {size}"


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
    fused = replace(model, norm_bytes=norm, mlp_tensors=tensors, dense_attention=False, score_bytes=0)
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


def check_layouts(question: Question, family: str) -> None:
    """Raise :class:`InputError` for what these frameworks do not train, or this file does not know."""
    if question.gpus == 1:
        raise InputError(f"--framework {family} splits a model over several GPUs", "add: --gpus 8")
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


def layouts(question: Question, family: str, sequences: int) -> Iterator[Layout]:
    """Yield the layouts of a framework for an update of so many sequences of all GPUs."""
    if any(refused for _, refused in _refused(question, family)):
        return
    model, gpus = question.model, question.gpus
    experts = max((linear.count for linear in model.linears), default=1)
    for tensor in _powers(question.gpus_per_node):
        if not model.assumed and (model.heads % tensor or _kv_heads(question) % tensor):
            continue
        for pipeline in _stages(question, gpus // tensor):
            for context in _powers(gpus // tensor // pipeline):
                data, rest = divmod(gpus, tensor * pipeline * context)
                long = context == 1 or question.training.sequence // context >= SHORTEST_PART
                if rest or not long or sequences % data:
                    continue
                for expert in _powers(min(experts, data * context, LARGEST_EXPERT)):
                    if experts % expert or (data * context) % expert:
                        continue
                    if family == "torchtitan" and expert > 1 and expert % context:
                        continue
                    base = Layout(family, data, tensor, pipeline, context, expert)
                    yield from _schedules(base, model.blocks, sequences // data)


def _schedules(base: Layout, blocks: int, sequences: int) -> Iterator[Layout]:
    """Yield the layout with every micro-batch and schedule that divides evenly."""
    for size in _powers(min(sequences, LARGEST_MICRO_BATCH)):
        if sequences % size:
            continue
        rounds = sequences // size
        if base.pipeline == 1:
            yield replace(base, micro_batch=size, rounds=rounds)
            continue
        if rounds < base.pipeline:  # stages would only wait
            continue
        yield replace(base, micro_batch=size, rounds=rounds)
        if rounds % base.pipeline == 0 and blocks + 2 >= 4 * base.pipeline:
            yield replace(base, micro_batch=size, rounds=rounds, chunks=2)


def _stages(question: Question, most: int) -> Iterator[int]:
    blocks = question.model.blocks
    for stages in range(1, min(most, blocks // 2) + 1):
        if question.gpus % stages or (most % stages):
            continue
        even = blocks % stages == 0 or (blocks + 2) % stages == 0
        if even or stages & (stages - 1) == 0:
            yield stages


def _kv_heads(question: Question) -> int:
    model = question.model
    return max(1, model.kv_width * model.heads // max(1, model.q_width))


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
