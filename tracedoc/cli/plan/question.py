"""Turn the options of ``tracedoc plan`` and what a run gives into the question that is planned for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracedoc.cli.plan.sources import Scripted, parse_count, parse_size, scripted
from tracedoc.cli.reading import names_in
from tracedoc.errors import InputError, did_you_mean
from tracedoc.planner.families import read_model_config
from tracedoc.planner.hardware import (
    Cluster,
    Gpu,
    LinkKind,
    find_gpu,
    find_link,
    gpu_of_device,
    link_of,
    measured_gpu,
    network_of,
    on_this_machine,
    replace_gbps,
    sold_as,
)
from tracedoc.planner.layouts import CONTEXTS, OVERLAPS
from tracedoc.planner.measured import beside_computation, compare, peak_note, replayed_note, replayed_steps
from tracedoc.planner.setup import (
    CHECKPOINTING,
    FRAMEWORKS,
    OBJECTIVES,
    PARALLEL_FRAMEWORKS,
    PlanRequest,
    Question,
    Training,
)
from tracedoc.planner.shape import ModelShape, lora_parameters, shape_from_parameters

if TYPE_CHECKING:
    from tracedoc.cli.plan.sources import Captured


class Options(msgspec.Struct, frozen=True):
    """The options as they were typed, ``None`` where they were not."""

    run: str | None = None
    params: str | None = None
    config: str | None = None
    script: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    gpu_name: str | None = None
    gpu_memory: str | None = None
    link: str | None = None
    network: str | None = None
    seq: int | None = None
    layout: str | None = None
    micro_batch: str | None = None
    accumulation: int | None = None
    batch: int | None = None
    overlap: str | None = None
    context_parallel: str | None = None
    no_sequence_parallel: bool = False
    capacity: float | None = None
    flex_dispatch: bool = False
    precision: str | None = None
    optimizer: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    qlora: bool = False
    checkpointing: str = "auto"
    loss: str = "eager"
    compiled: bool = False
    fp8: bool = False
    optimizer_in_backward: bool = False
    no_fused_attention: bool = False
    offload: str = "none"
    objective: str = "speed"
    framework: str = "pytorch"
    utilisation: float | None = None
    tokens: str | None = None
    price: float | None = None
    report_format: str | None = None
    outputs: tuple[str, ...] = ()


def question_of(options: Options) -> tuple[Question, PlanRequest, tuple[str, ...]]:
    """The question, what is wanted of the answer, and where numbers come from.

    Raises :class:`InputError` for options that contradict each other.
    """
    _one_of("objective", options.objective, OBJECTIVES)
    _one_of("framework", options.framework, FRAMEWORKS)
    if options.utilisation is not None and not 0 < options.utilisation <= 1:
        raise InputError(
            f"--utilisation is {options.utilisation:g}", "it is a share of the peak: --utilisation 0.4"
        )
    found = _captured(options)
    script = _scripted(options)
    model = script.model if script else _model(options, found)
    count, machines = _machines(options, found)
    gpu, memory = _gpu(options, found)
    cluster = _cluster(options, gpu, (count, machines), found)
    own: tuple[str, ...] = ()
    if found is None:
        cluster, own = on_this_machine(cluster, keeps_link=options.link is not None)
    training = _as_scripted(options, script.training) if script else _training(options, gpu, model, found)
    _can_compute(gpu, training)
    question = Question(model, training, count, machines, memory)
    request = _request(options, cluster)
    notes = (*(script.notes if script else ()), *own, *_notes(options, found, machines, cluster))
    if found is not None and not (options.params or options.config or options.gpu_name):
        request, notes = _measured(question, request, options, found, notes)
    return question, request, notes


def _measured(
    question: Question, request: PlanRequest, options: Options, found: Captured, notes: tuple[str, ...]
) -> tuple[PlanRequest, tuple[str, ...]]:
    """Hold the prediction for the present strategy against the run, and scale all others by what it computed.

    Where the run does not tell its tokens, its computation stands for every strategy, as long as nothing
    else is asked about.
    """
    now = found.present
    if now.compute_ms is None or options.utilisation is not None:
        return request, notes
    kept = "off"
    if now.checkpointing:  # a run tells no more of it
        kept = "selective" if question.training.checkpointing == "selective" else "on"
    question = question.changed(checkpointing=kept)
    if now.tokens_known:
        seen = question.changed(
            sequence=now.sequence,
            micro_batch=now.micro_batch,
            accumulation=now.accumulation or 1,
            precision=now.precision or question.training.precision,
        )
        if now.peak_bytes:
            peak = peak_note(seen, now.strategy, now.peak_bytes)
            notes = (*notes, peak) if peak else notes
        found_out = compare(seen, request, now.strategy, now.compute_ms)
        if found_out is None:
            return request, notes
        request = replace(request, scale=found_out.scale, idle_ms=found_out.idle_ms(now.step_ms))
        note = found_out.note(now.step_ms)
        return _replayed(question, seen, request, found, (*notes, note) if note else notes)
    if options.seq is None and options.micro_batch is None and options.accumulation is None:
        changed = (options.precision, options.lora_rank)
        if not options.qlora and changed == (None, None):
            request = replace(request, measured_compute_ms=now.compute_ms)
            if now.step_ms is not None:
                idle_ms, note = beside_computation(question, request, now.strategy, now.step_ms)
                request, notes = replace(request, idle_ms=idle_ms), (*notes, note)
                request, notes = _replayed(question, question, request, found, notes)
    return request, notes


def _replayed(
    question: Question, seen: Question, request: PlanRequest, found: Captured, notes: tuple[str, ...]
) -> tuple[PlanRequest, tuple[str, ...]]:
    """Let the replay of the run stand for estimates; ``seen`` is asked about as the run trains."""
    now = found.present
    run = seen.changed(gpus=found.gpus or seen.gpus, nodes=found.nodes)
    steps = replayed_steps(run, now.strategy, now.step_ms, now.replayed)
    said = replayed_note(question, steps)
    return replace(request, replayed=steps), (*notes, said) if said else notes


def _request(options: Options, cluster: Cluster) -> PlanRequest:
    batch, price, search = options.batch, options.price, options.micro_batch == "auto"
    if price is not None and not options.tokens:
        raise InputError("--price has no effect without --tokens", "add: --tokens 100B")
    if price is not None and price <= 0:
        raise InputError(f"--price is {price:g}", "the price of a GPU and hour: --price 2.5")
    if batch is not None and batch < 1:
        raise InputError(f"--batch is {batch}, and must be 1 or more", "the least is: --batch 1")
    layouts = options.framework in PARALLEL_FRAMEWORKS
    given = (
        ("--layout", options.layout),
        ("--overlap", options.overlap),
        ("--context-parallel", options.context_parallel),
        ("--no-sequence-parallel", options.no_sequence_parallel),
        ("--capacity", options.capacity is not None),
        ("--flex-dispatch", options.flex_dispatch),
    )
    for option, value in given:
        if value not in (None, False) and not layouts:
            word = f"{option} {value}" if isinstance(value, str) else option
            raise InputError(
                f"{word} is not for --framework {options.framework}",
                "add: --framework torchtitan, or megatron",
            )
    overlaps = None if options.overlap is None else _overlaps(options.overlap)
    context = _SAID_OTHERWISE.get(options.context_parallel or "", options.context_parallel or "")
    if context:
        _one_of("context-parallel", context, CONTEXTS)
    return PlanRequest(
        cluster,
        options.objective,
        options.framework,
        options.utilisation,
        batch=batch,
        layout=options.layout or "",
        overlaps=overlaps,
        context_by=context,
        sequence_parallel=not options.no_sequence_parallel,
        flex=options.flex_dispatch,
        keeps_micro_batch=options.micro_batch is not None and not search,
        keeps_accumulation=options.accumulation is not None,
        search=search and not layouts,
        tokens=parse_count(options.tokens, "--tokens") if options.tokens else None,
        price=price,
    )


_SAID_OTHERWISE = {"p2p": "ring", "a2a": "all-to-all", "ulysses": "all-to-all", "all-gather": "gather"}
"""Other names of the ways to share a sequence."""


def _overlaps(text: str) -> tuple[str, ...]:
    """What ``--overlap`` names: ``off`` and ``none``, ``on`` and ``all``, or kinds of communication."""
    if text in ("off", "none", "on", "all"):
        return OVERLAPS if text in ("on", "all") else ()
    for name in names_in(text) or (text,):
        _one_of("overlap", name, OVERLAPS)
    return names_in(text)


def _machines(options: Options, found: Captured | None) -> tuple[int, int]:
    count = options.gpus if options.gpus is not None else (found.gpus if found and found.gpus else 1)
    if count > MOST_GPUS:
        raise InputError(f"--gpus is {count}: no cluster has so many", f"the most is: --gpus {MOST_GPUS}")
    if options.nodes is not None:
        return count, options.nodes
    return count, found.nodes if found and options.gpus is None else nodes_of_8(count)


MOST_GPUS = 131_072
"""More GPUs than any cluster had."""


def _training(options: Options, gpu: Gpu | None, model: ModelShape, found: Captured | None) -> Training:
    from tracedoc.cli.plan.sources import Present

    now = found.present if found else Present()
    rank = options.lora_rank or (16 if options.qlora else 0)
    if not rank and now.trained and not options.params and not options.config:
        # As many parameters as the run trains: adapters of the rank that comes nearest.
        rank = max(1, round(now.trained / max(1, lora_parameters(model, 1, model.lora_targets))))
    if options.lora_rank is not None and options.lora_rank < 1:
        raise InputError(
            f"--lora-rank is {options.lora_rank}, and must be 1 or more", "commonly: --lora-rank 16"
        )
    kept, modules = _kept(options)
    training = Training(
        precision=options.precision
        or (options.gpu_name is None and now.precision)
        or (gpu.usual_precision if gpu is not None else "bf16-mixed"),
        optimizer=(options.optimizer or now.optimizer or "adamw").lower(),
        sequence=_given(options.seq, now.sequence or min(2048, model.context or 2048)),
        micro_batch=_micro_batch(options.micro_batch, now.micro_batch or 1),
        accumulation=_given(options.accumulation, now.accumulation or 1),
        lora_rank=rank,
        lora_targets=names_in(options.lora_targets or ""),
        base_bits=4 if options.qlora else 16,
        checkpointing=kept,
        recomputed=modules,
        fused_attention=not options.no_fused_attention,
        offload=options.offload,
        loss=options.loss,
        compiled=options.compiled,
        fp8=options.fp8,
        optimizer_in_backward=options.optimizer_in_backward,
        capacity=options.capacity or 0.0,
    )
    if options.lora_targets and not training.lora_rank:
        raise InputError("--lora-targets has no effect without adapters", "add: --lora-rank 16")
    return training


def _kept(options: Options) -> tuple[str, tuple[str, ...]]:
    """What ``--checkpointing`` asks for; with Megatron it may name modules to compute again."""
    asked = "on" if options.checkpointing == "full" else options.checkpointing
    if options.framework != "megatron" or asked in CHECKPOINTING:
        return asked, ()
    return "selective", names_in(asked)


def _as_scripted(options: Options, script: Training) -> Training:
    """Return the training that the script does; another micro-batch or accumulation may be asked about."""
    return replace(
        script,
        micro_batch=_micro_batch(options.micro_batch, script.micro_batch),
        accumulation=_given(options.accumulation, script.accumulation),
        checkpointing=options.checkpointing,
        offload=options.offload,
        compiled=options.compiled or script.compiled,
    )


def _can_compute(gpu: Gpu | None, training: Training) -> None:
    if gpu is not None and not gpu.bf16 and training.precision.startswith("bf16"):
        raise InputError(f"{gpu.name} has no bf16 arithmetic", "use --precision fp16-mixed")
    if gpu is not None and training.fp8 and not gpu.fp8:
        raise InputError(f"{gpu.name} has no 8-bit arithmetic", "leave out --fp8")


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _micro_batch(text: str | None, otherwise: int) -> int:
    if text is None or text == "auto":
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--micro-batch {text!r} is no number", "as in: --micro-batch 4, or --micro-batch auto"
        ) from None


def _scripted(options: Options) -> Scripted | None:
    """What the script that was named does, if one was.

    Raises :class:`InputError` for options that the script decides itself.
    """
    if options.script is None:
        return None
    own = {
        "--seq": options.seq,
        "--precision": options.precision,
        "--optimizer": options.optimizer,
        "--lora-rank": options.lora_rank,
        "--lora-targets": options.lora_targets,
        "--qlora": options.qlora,
        "--fp8": options.fp8,
        "--no-fused-attention": options.no_fused_attention,
        "--optimizer-in-backward": options.optimizer_in_backward,
        "--loss": options.loss != "eager",
        "--checkpointing selective": options.checkpointing == "selective",
    }
    for option, value in own.items():
        if value:
            raise InputError(
                f"{option} has no effect with --script: the script decides that",
                'change it in the script or its options: --script "train.py --seq 4096"',
            )
    return scripted(options.script)


def _captured(options: Options) -> Captured | None:
    run, params, config = options.run, options.params, options.config
    given = {"RUN": run, "--params": params, "--model": config, "--script": options.script}
    names = [name for name, value in given.items() if value is not None]
    if (params and config) or (options.script is not None and len(names) > 1):
        raise InputError(f"{' and '.join(names)} both give the model", "leave one of them out")
    if run is None:
        if not names:
            raise InputError(
                "no model is given",
                'as in: tracedoc plan --params 7e9 --gpus 4 --gpu "A100 40GB"',
            )
        return None
    from tracedoc.cli.plan.sources import captured

    return captured(run)


def _model(options: Options, found: Captured | None) -> ModelShape:
    if options.config:
        return read_model_config(options.config)
    if options.params:
        return shape_from_parameters(parse_count(options.params, "--params"))
    from tracedoc.cli.plan.sources import require_model

    assert found is not None
    return require_model(found, options.run or "")


def _gpu(options: Options, found: Captured | None) -> tuple[Gpu | None, float]:
    name = options.gpu_name
    if found:
        gpu = find_gpu(name) if name else gpu_of_device(found.device, found.memory_bytes)
    else:
        gpu = find_gpu(name) if name else (None if options.gpu_memory else measured_gpu())
    if options.gpu_memory:
        size = parse_size(options.gpu_memory, "--gpu-memory")
        sold = re.fullmatch(r"\s*[\d.]+\s*GB\s*", options.gpu_memory, re.IGNORECASE)
        if sold and gpu is not None and gpu.memory_gb * 1e9 == size:
            return gpu, gpu.memory_bytes
        return gpu, sold_as(size / 1e9) if sold else size
    if found is not None and found.memory_bytes and name is None:
        return gpu, found.memory_bytes
    if gpu is None:
        of = f" ({found.device} is not in the table)" if found and found.device else ""
        raise InputError(
            f"no GPU is given{of}", 'name it, as --gpu "NVIDIA L4", or its memory, as --gpu-memory 24GB'
        )
    return gpu, gpu.memory_bytes


def _cluster(options: Options, gpu: Gpu | None, machines: tuple[int, int], found: Captured | None) -> Cluster:
    gpus, nodes = machines
    link, network = options.link, options.network
    if network and nodes == 1:
        raise InputError("--network has no effect inside one node", "add: --nodes 2")
    inside = find_link(link, across=False) if link else (link_of(gpu) if gpu else None)
    across = find_link(network, across=True) if network else None
    if nodes > 1 and across is None:
        across = network_of(gpu.network if gpu else ASSUMED_NETWORK, gpus // nodes)
    if found is not None and found.busbw_gbps:
        if found.nodes == 1 and link is None and inside is not None:
            inside = _as_measured(inside, found)
        elif found.nodes > 1 and network is None and across is not None:
            across = _as_measured(across, found)
    return Cluster(gpu, inside, across if nodes > 1 else None)


def _as_measured(link: LinkKind, found: Captured) -> LinkKind:
    """Return the link with what the run's collectives reached, which may include the latency of a call."""
    measured = replace_gbps(link, found.busbw_gbps or link.gbps, measured=True)
    return replace(measured, latency_us=found.latency_us or 0.0, source="the run")


ASSUMED_NETWORK = "roce-100g"
"""The network between nodes of an unknown GPU, where none is named."""


def _notes(options: Options, found: Captured | None, nodes: int, cluster: Cluster) -> tuple[str, ...]:
    notes = found.notes if found else ()
    if nodes > 1 and options.network is None and cluster.across is not None and not cluster.across.measured:
        notes = (*notes, f"{cluster.across.title} between nodes assumed; --network names the real one.")
    if nodes > 1 and options.nodes is None and not found:
        notes = (*notes, f"{nodes} nodes assumed, of at most 8 GPUs each; --nodes gives the real number.")
    return notes


def nodes_of_8(gpus: int) -> int:
    """Return the fewest nodes of at most 8 GPUs that split them evenly: what is usual."""
    fewest = -(-gpus // 8)
    return next(n for n in range(max(1, fewest), max(1, gpus) + 1) if gpus % n == 0)


def _one_of(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise InputError(
            f"--{option} {word!r} is not known{did_you_mean(word, known)}", f"use one of {', '.join(known)}"
        )
