"""Say what a plan assumes: training and loading, and where estimates and times come from."""

from __future__ import annotations

from tracedoc.planner.candidates import Candidate, update_of
from tracedoc.planner.hardware import GPUS_OF_A_CPU, Gpu, LinkKind
from tracedoc.planner.memory import CONTEXT_BYTES, FRAGMENTATION, NCCL_BYTES
from tracedoc.planner.setup import (
    OPTIMIZERS,
    PARALLEL_FRAMEWORKS,
    PRECISIONS,
    PlanRequest,
    Question,
    Training,
)
from tracedoc.planner.shape import LANGUAGE_MODEL_PARAMETERS, ModelShape
from tracedoc.planner.timing import WIDEST_RANGE, widened
from tracedoc.units import format_count, format_gb, format_ms, format_percent


def assumptions(question: Question, request: PlanRequest, chosen: Candidate | None) -> list[str]:
    """What the answer rests on: training, estimates, loading, time; a sentence or two each."""
    training, model, cluster = question.training, question.model, request.cluster
    texts = []
    if model.assumed:
        texts.append(_assumed_shape(model))
    attention = "" if training.fused_attention else ", attention scores kept"
    size = f"{training.micro_batch} x {training.sequence} tokens"
    if training.sequence == 1:
        size = "1 sample" if training.micro_batch == 1 else f"{training.micro_batch} samples"
    each = f"Each GPU and step: {size}, {_rounds(training, question.gpus)}"
    if request.framework in PARALLEL_FRAMEWORKS:
        sequences = update_of(question, request).sequences or ""
        if chosen is not None:
            layout = chosen.layout
            sequences = layout.data * layout.micro_batch * layout.rounds
        each = f"Each update: {sequences} sequences of {training.sequence} tokens, of all GPUs together"
    texts.append(
        f"{each}; {PRECISIONS[training.precision].title}, {OPTIMIZERS[training.optimizer].title}{attention}."
    )
    if training.precision == "bf16" and not training.lora_rank:
        texts.append(
            "Pure bf16 keeps no fp32 copy of the weights: updates below 2^-8 of a weight are lost"
            " (--precision bf16-mixed keeps one)."
        )
    if training.lora_rank:
        bits = ", 4-bit base with double quantisation" if training.base_bits == 4 else ""
        targets = ", ".join(training.lora_targets or model.lora_targets)
        texts.append(
            f"LoRA of rank {training.lora_rank} on {targets}: {format_count(question.trainable)} trained"
            f" parameters{bits}; adapters are kept in fp32."
        )
    nccl = f", {format_gb(NCCL_BYTES)} for communicators" if question.gpus > 1 else ""
    texts.append(
        f"Estimates: {format_gb(CONTEXT_BYTES)} for the CUDA context{nccl}, and"
        f" {format_percent(FRAGMENTATION)} reserve on what is allocated in each step."
    )
    if chosen is not None and (note := loading_note(question, chosen, request.framework)):
        texts.append(note)
    return [*texts, *_about_time(question, request, chosen, cluster.inside, cluster.across)]


def _rounds(training: Training, gpus: int) -> str:
    if training.accumulation == 1:
        return "no gradient accumulation"
    batch = training.micro_batch * training.accumulation * gpus
    return f"{training.accumulation} times for each update of {batch} sequences"


def _assumed_shape(model: ModelShape) -> str:
    blocks = f"{model.blocks} block{'' if model.blocks == 1 else 's'} of {model.hidden}"
    if model.parameters >= LANGUAGE_MODEL_PARAMETERS:
        return (
            f"Shape of the model assumed from its size: {blocks}, vocabulary {model.vocabulary}."
            " --model config.json takes the real one."
        )
    return (
        "Only the size of the model is known, not its layers. Parameters, gradients and optimizer follow"
        f" from it; activations and arithmetic are those of a transformer of that size ({blocks}) and may be"
        " far off for an MLP or a convolutional network."
    )


def short_step(chosen: Candidate | None, request: PlanRequest) -> list[str]:
    """Return a warning where the predicted step is so short that launching its kernels may bound it."""
    measured = request.measured_compute_ms is not None or request.idle_ms > 0
    if chosen is None or chosen.step is None or chosen.step.worst_ms >= 10 or measured:
        return []
    return ["So short a step is usually bound by the host, which launches its kernels: expect more."]


def _arithmetic(question: Question, request: PlanRequest, gpu: Gpu, peak: float) -> str:
    of = f"of {peak:.4g} TFLOP/s ({gpu.name})"
    if request.utilisation is not None:
        return f"arithmetic at {format_percent(request.utilisation)} {of}"
    basis = "fitted to published runs" if gpu.matmul else "a guess"
    if gpu.source.startswith("measured"):
        basis = gpu.source
    efficiencies = " and ".join(format_percent(share) for share in gpu.shares)
    return f"matrix products and attention at {efficiencies} {of}, {basis}; all else at the speed of memory"


def _about_time(
    question: Question,
    request: PlanRequest,
    chosen: Candidate | None,
    inside: LinkKind | None,
    across: LinkKind | None,
) -> list[str]:
    gpu = request.cluster.gpu
    if gpu is None:
        return ['No time is predicted without a GPU\'s name: add --gpu "NVIDIA L4", say.']
    half = PRECISIONS[question.training.precision].compute == 2
    peak = gpu.half_tflops if half else gpu.fp32_tflops
    if peak is None:
        return [f"No time is predicted: the fp32 peak of {gpu.name} is not in the table."]
    arithmetic = _arithmetic(question, request, gpu, peak)
    if request.measured_compute_ms is not None:
        arithmetic = f"{format_ms(request.measured_compute_ms)} of computation in a step, as the run measured"
    hidden = (
        "We assume that 30 to 75 % of the communication is not hidden (most on fast links), all at worst."
    )
    if request.framework in PARALLEL_FRAMEWORKS:
        hidden = (
            "What tensor and expert parallelism send is not hidden, but six tenths where it is overlapped; of"
            " the rest we assume that 30 to 75 % is not hidden. Published runs spread by 20 %, with experts"
            " by 25 %."
        )
    texts = [f"Time: {arithmetic}. {hidden}"]
    if chosen is not None and chosen.step is not None and chosen.step.width > 1.01 * WIDEST_RANGE:
        reasons = widened(question, chosen.layout, request.cluster)
        texts += [f"The range of the step is wide: {'; '.join(reasons)}."] * bool(reasons)
    used = [link for link in (inside, across) if link is not None]
    if question.gpus > 1:
        for link in used:
            place = "a node, all adapters" if link.across else "a GPU, one way"
            what = (
                f"{link.gbps:.3g} GB/s, as collectives reached"
                if link.measured
                else f"{format_percent(link.efficiency)} of {link.gbps:g} GB/s ({place})"
            )
            if link.near:
                what += f", {link.reached(GPUS_OF_A_CPU):.3g} GB/s among {GPUS_OF_A_CPU} GPUs of one CPU"
            call = f"; {format_ms(link.latency_us / 1e3)} a call" if link.latency_us else ""
            texts.append(f"Link: {link.title} at {what}{call} ({link.source}).")
    if question.training.offload != "none":
        texts.append(
            "Copies to the host at 16 GB/s, the CPUs' update at 100 GB/s a node, NVMe at 6 GB/s: estimates."
        )
    return texts


WORTH_SAYING_BYTES = 30e9


def load_bytes_per_node(question: Question, chosen: Candidate, framework: str) -> float | None:
    """Return the bytes that the processes of a node hold while they load, ``None`` where that is not known.

    ``from_pretrained`` makes the whole model in host memory, in each process; Accelerate and the Trainer load
    it in one process and send it to the others under FSDP. 4-bit weights go to the GPU as they are read, and
    under ZeRO-3 a process keeps its part only.
    """
    training = question.training
    if chosen.family in PARALLEL_FRAMEWORKS or chosen.strategy in ("zero-3", "single-zero-3"):
        return None
    if training.base_bits == 4 or question.model.step is not None:
        return None
    one = float(question.model.parameters * _weight_bytes(question))
    alone = chosen.family == "fsdp" and framework in ("accelerate", "trainer")
    return one if alone else one * question.gpus_per_node


def _weight_bytes(question: Question) -> int:
    precision = PRECISIONS[question.training.precision]
    return precision.compute if question.frozen else precision.master or precision.compute


def loading_note(question: Question, chosen: Candidate, framework: str) -> str:
    """A sentence on what loading takes, and how it takes less; empty where that is little."""
    needed = load_bytes_per_node(question, chosen, framework)
    if needed is None or needed < WORTH_SAYING_BYTES:
        return ""
    one = question.model.parameters * _weight_bytes(question)
    where = "each node" if question.nodes > 1 else "the node"
    if needed <= one:
        return f"To load a checkpoint takes {format_gb(needed)} of host memory: one process holds the model."
    text = (
        f"To load a checkpoint takes {format_gb(needed)} of host memory in {where}: each of its"
        f" {question.gpus_per_node} processes holds the model"
    )
    if chosen.family != "fsdp":
        return f"{text}."
    less = "set_model_state_dict with broadcast_from_rank0"
    return f"{text}. On the meta device, filled by {less}, it is {format_gb(one)} in one process."
