"""Answer a question with a Plan: what ``tracedoc plan`` shows, in every format."""

from __future__ import annotations

import msgspec

from tracedoc.planner.activations import CONTEXT_BYTES, FRAGMENTATION, NCCL_BYTES
from tracedoc.planner.advice import Advice, advise
from tracedoc.planner.candidates import Candidate, Wish, step_range, with_checkpointing
from tracedoc.planner.changes import Change
from tracedoc.planner.configurations import Configuration, configurations_of
from tracedoc.planner.hardware import Gpu, LinkKind
from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS
from tracedoc.planner.loading import load_bytes_per_node, loading_note
from tracedoc.planner.search import Found, search
from tracedoc.planner.setup import OPTIMIZERS, PRECISIONS, Question, Training, check
from tracedoc.planner.shape import LANGUAGE_MODEL_PARAMETERS, ModelShape
from tracedoc.units import format_count, format_gb, format_ms, format_percent

PLAN_SCHEMA = "1"


class Asked(msgspec.Struct, frozen=True):
    """The question in the words and numbers that the answer repeats."""

    model: str
    parameters: int
    trainable_parameters: int
    gpus: int
    nodes: int
    gpu: str
    gpu_memory_bytes: float
    training: Training


class Ask(msgspec.Struct, frozen=True):
    """What else is asked: to search the fastest micro-batch, with so many sequences for each update; how long
    training takes for so many tokens, and what it costs at a price of a GPU and hour.
    """

    search: bool = False
    batch: int | None = None
    tokens: int | None = None
    price: float | None = None


class Plan(msgspec.Struct, frozen=True):
    """Everything ``tracedoc plan`` has to say. Bytes, milliseconds, shares 0..1.

    ``recommended`` is the id of a strategy, ``None`` if nothing fits; ``because`` its reason or, then, what
    is missing. ``changes`` are single changes after which something fits, the smallest first. ``faster`` is a
    strategy that even with nothing hidden is predicted ahead of the recommended one's middle, if any;
    ``least`` is the framework's strategy that takes least. ``load_bytes_per_node`` is the host memory of a
    node while a checkpoint is loaded, ``None`` where that is not known.
    """

    schema_version: str
    summary: str
    asked: Asked
    recommended: str | None
    rule: str
    because: str
    strategies: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    turning_points: tuple[str, ...]
    faster: str | None
    least: str
    configurations: tuple[Configuration, ...]
    assumptions: tuple[str, ...]
    objective: str
    framework: str
    tokens_per_second: float | None = None
    days: float | None = None
    cost: float | None = None
    found: tuple[Found, ...] = ()
    load_bytes_per_node: float | None = None


def plan(question: Question, wish: Wish, *, notes: tuple[str, ...] = (), ask: Ask | None = None) -> Plan:
    """Return the plan for a question; ``notes`` say where its numbers come from.

    Where a search is asked for, the plan is that of the fastest combination, if one fits. Raises
    :class:`tracedoc.errors.InputError` for what cannot be.
    """
    ask = ask or Ask()
    found: tuple[Found, ...] = ()
    if ask.search:
        check(question)
        found = search(question, wish, batch=ask.batch)
        for best in found[:1]:
            question = question.changed(
                micro_batch=best.micro_batch,
                accumulation=best.accumulation,
                checkpointing=best.checkpointing,
            )
    advice = advise(question, wish)
    chosen = advice.chosen
    model = question.model
    written: tuple[Configuration, ...] = ()
    if chosen is not None:
        written = configurations_of(question, chosen)
    return Plan(
        schema_version=PLAN_SCHEMA,
        summary=_summary(advice),
        asked=Asked(
            model=model.name,
            parameters=model.parameters,
            trainable_parameters=question.trainable,
            gpus=question.gpus,
            nodes=question.nodes,
            gpu=wish.cluster.gpu.name if wish.cluster.gpu else "",
            gpu_memory_bytes=question.memory_bytes,
            training=question.training,
        ),
        recommended=chosen.strategy if chosen else None,
        rule=advice.rule,
        because=advice.because if chosen else _missing(advice),
        strategies=_ordered(advice),
        changes=advice.changes,
        turning_points=advice.turning_points,
        faster=advice.faster.strategy if advice.faster else None,
        least=advice.least.strategy,
        configurations=written,
        assumptions=(*notes, *_assumptions(question, wish, chosen), *_short(chosen, wish)),
        objective=wish.objective,
        framework=wish.framework,
        tokens_per_second=chosen.tokens_per_second if chosen else None,
        **_duration(question, chosen, ask),
        found=found,
        load_bytes_per_node=load_bytes_per_node(question, chosen, wish.framework) if chosen else None,
    )


def _duration(question: Question, chosen: Candidate | None, ask: Ask) -> dict[str, float]:
    if ask.tokens is None or chosen is None or chosen.tokens_per_second is None:
        return {}
    days = ask.tokens / chosen.tokens_per_second / 86_400
    cost = {} if ask.price is None else {"cost": days * 24 * question.gpus * ask.price}
    return {"days": days, **cost}


def _summary(advice: Advice) -> str:
    question, chosen = advice.question, advice.chosen
    each = "the GPU" if question.gpus == 1 else f"each of {question.gpus} GPUs"
    memory = format_gb(question.memory_bytes)
    if chosen is not None:
        time = f", {step_range(chosen)} a step predicted" if chosen.step else ""
        title = with_checkpointing(chosen.title, chosen.checkpointing, selective=chosen.selective)
        title = title[:1].upper() + title[1:]
        return f"{title}: {format_gb(chosen.total_bytes)} of the {memory} on {each}{time}."
    least = advice.least
    needed = f"{'training' if least.strategy == 'single' else f'even {least.title}'} needs"
    nothing = "Nothing of DeepSpeed's" if advice.wish.framework == "deepspeed" else "Nothing"
    text = f"{nothing} fits: {each} has {memory}, and {needed} {format_gb(least.total_bytes)}."
    if not advice.changes:
        return f"{text} No single change that is known here helps."
    smallest = advice.changes[0]
    then = with_checkpointing(smallest.strategy, smallest.checkpointing, selective=smallest.selective)
    return (
        f"{text} The smallest change that would: {smallest.what} ({then}, {format_gb(smallest.total_bytes)})."
    )


def _missing(advice: Advice) -> str:
    least = advice.least
    states = format_gb(least.memory.states.states)
    missing = format_gb(-least.headroom_bytes)
    return (
        f"{missing} are missing on each GPU with {least.title}; its parameters, gradients and optimizer"
        f" alone take {states} there."
    )


def _ordered(advice: Advice) -> tuple[Candidate, ...]:
    # The chosen one leads; the ranking stays as it is below.
    chosen = advice.chosen
    rest = [c for c in advice.candidates if chosen is None or c.strategy != chosen.strategy]
    return (chosen, *rest) if chosen else tuple(rest)


def _assumptions(question: Question, wish: Wish, chosen: Candidate | None) -> list[str]:
    training, model, cluster = question.training, question.model, wish.cluster
    texts = []
    if model.assumed:
        texts.append(_assumed_shape(model))
    attention = "" if training.fused_attention else ", attention scores kept"
    each = f"Each GPU and step: {training.micro_batch} x {training.sequence} tokens, {_rounds(training)}"
    if wish.framework in PARALLEL_FRAMEWORKS:
        sequences = wish.batch or training.micro_batch * training.accumulation * question.gpus
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
    if chosen is not None and (note := loading_note(question, chosen, wish.framework)):
        texts.append(note)
    return [*texts, *_about_time(question, wish, cluster.inside, cluster.across)]


def _rounds(training: Training) -> str:
    if training.accumulation == 1:
        return "no gradient accumulation"
    return f"{training.accumulation} times for each update"


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


def _short(chosen: Candidate | None, wish: Wish) -> list[str]:
    measured = wish.measured_compute_ms is not None or wish.idle_ms > 0
    if chosen is None or chosen.step is None or chosen.step.worst_ms >= 10 or measured:
        return []
    return ["So short a step is usually bound by the host, which launches its kernels: expect more."]


def _arithmetic(wish: Wish, gpu: Gpu, peak: float) -> str:
    of = f"of {peak:g} TFLOP/s ({gpu.name})"
    if wish.utilisation is not None:
        return f"arithmetic at {format_percent(wish.utilisation)} {of}"
    basis = "fitted to published runs" if gpu.matmul else "a guess: no run on it is published"
    efficiencies = " and ".join(format_percent(share) for share in gpu.shares)
    return f"matrix products and attention at {efficiencies} {of}, {basis}; all else at the speed of memory"


def _about_time(
    question: Question, wish: Wish, inside: LinkKind | None, across: LinkKind | None
) -> list[str]:
    gpu = wish.cluster.gpu
    if gpu is None:
        return ['No time is predicted without a GPU\'s name: add --gpu "NVIDIA L4", say.']
    half = PRECISIONS[question.training.precision].compute == 2
    peak = gpu.half_tflops if half else gpu.fp32_tflops
    if peak is None:
        return [f"No time is predicted: the fp32 peak of {gpu.name} is not in the table."]
    arithmetic = _arithmetic(wish, gpu, peak)
    if wish.measured_compute_ms is not None:
        arithmetic = f"{format_ms(wish.measured_compute_ms)} of computation in a step, as the run measured"
    hidden = (
        "Of communication beside it 30 to 75 % lengthen the step, the more the faster the link; all at worst."
    )
    if wish.framework in PARALLEL_FRAMEWORKS:
        hidden = (
            "What tensor and expert parallelism send is not hidden, but half of the former by Megatron; of the"
            " rest 30 to 75 % lengthen the step. Published runs of layouts spread by 30 %."
        )
    texts = [f"Time: {arithmetic}. {hidden}"]
    used = [link for link in (inside, across) if link is not None]
    if question.gpus > 1:
        for link in used:
            place = "a node, all adapters" if link.across else "a GPU, one way"
            what = (
                f"{link.gbps:.3g} GB/s, as collectives reached"
                if link.measured
                else f"{format_percent(link.efficiency)} of {link.gbps:g} GB/s ({place})"
            )
            texts.append(f"Link: {link.title} at {what}; {link.latency_us:g} us a call ({link.source}).")
    if question.training.offload != "none":
        texts.append(
            "Copies to the host at 16 GB/s, the CPUs' update at 100 GB/s a node, NVMe at 6 GB/s: estimates."
        )
    return texts
