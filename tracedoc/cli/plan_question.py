"""Turn the options of ``tracedoc plan`` and what a run gives into the question that is planned for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracedoc.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tracedoc.cli.captured import Captured
    from tracedoc.cli.scripted import Scripted
    from tracedoc.planner.candidates import Wish
    from tracedoc.planner.hardware import Cluster, Gpu, LinkKind
    from tracedoc.planner.plan import Ask
    from tracedoc.planner.setup import Question, Training
    from tracedoc.planner.shape import ModelShape


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
    micro_batch: str | None = None
    accumulation: int | None = None
    batch: int | None = None
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


class Asked(msgspec.Struct, frozen=True):
    """What is planned: the question, what is wanted, what else is asked for, and where numbers come from."""

    question: Question
    wish: Wish
    ask: Ask
    notes: tuple[str, ...]


def question_of(options: Options) -> Asked:
    """Return the question; raise :class:`InputError` for options that contradict each other."""
    from tracedoc.cli.scripted import scripted
    from tracedoc.planner.candidates import FRAMEWORKS, OBJECTIVES, Wish
    from tracedoc.planner.setup import Question

    _one_of("objective", options.objective, OBJECTIVES)
    _one_of("framework", options.framework, FRAMEWORKS)
    if options.utilisation is not None and not 0 < options.utilisation <= 1:
        raise InputError(
            f"--utilisation is {options.utilisation:g}", "it is a share of the peak: --utilisation 0.4"
        )
    found = _captured(options)
    script = scripted(options)
    model = script.model if script else _model(options, found)
    count, machines = _machines(options, found)
    gpu, memory = _gpu(options, found)
    cluster = _cluster(options, gpu, machines, found)
    training = _as_scripted(options, script) if script else _training(options, gpu, model, found)
    _can_compute(gpu, training)
    question = Question(model, training, count, machines, memory)
    wish = Wish(cluster, options.objective, options.framework, options.utilisation, batch=options.batch)
    notes = (*(script.notes if script else ()), *_notes(options, found, machines, cluster))
    if found is not None and not (options.params or options.config or options.gpu_name):
        wish, notes = _measured(question, wish, options, found, notes)
    return Asked(question, wish, _ask(options), notes)


def _measured(
    question: Question, wish: Wish, options: Options, found: Captured, notes: tuple[str, ...]
) -> tuple[Wish, tuple[str, ...]]:
    """Hold the prediction for the present strategy against the run, and scale all others by what it computed.

    Where the run does not tell its tokens, its computation stands for every strategy, as long as nothing
    else is asked about.
    """
    from tracedoc.planner.measured import beside_computation, compare, peak_note

    now = found.present
    if now.compute_ms is None or options.utilisation is not None:
        return wish, notes
    if now.tokens_known:
        seen = question.changed(
            sequence=now.sequence,
            micro_batch=now.micro_batch,
            accumulation=now.accumulation or 1,
            precision=now.precision or question.training.precision,
        )
        if now.peak_bytes:
            peak = peak_note(seen, now.strategy, now.peak_bytes, checkpointing=bool(now.checkpointing))
            notes = (*notes, peak) if peak else notes
        found_out = compare(seen, wish, now.strategy, now.compute_ms, checkpointing=bool(now.checkpointing))
        if found_out is None:
            return wish, notes
        wish = replace(wish, scale=found_out.scale, idle_ms=found_out.idle_ms(now.step_ms))
        note = found_out.note(now.step_ms)
        return _replayed(question, seen, wish, found, (*notes, note) if note else notes)
    if options.seq is None and options.micro_batch is None and options.accumulation is None:
        changed = (options.precision, options.lora_rank)
        if not options.qlora and changed == (None, None):
            wish = replace(wish, measured_compute_ms=now.compute_ms)
            if now.step_ms is not None:
                idle_ms, note = beside_computation(
                    question, wish, now.strategy, now.step_ms, checkpointing=bool(now.checkpointing)
                )
                wish, notes = replace(wish, idle_ms=idle_ms), (*notes, note)
                wish, notes = _replayed(question, question, wish, found, notes)
    return wish, notes


def _replayed(
    question: Question, seen: Question, wish: Wish, found: Captured, notes: tuple[str, ...]
) -> tuple[Wish, tuple[str, ...]]:
    """Let the replay of the run stand for estimates; ``seen`` is asked about as the run trains."""
    from tracedoc.planner.replayed import note, replayed_steps

    now = found.present
    run = seen.changed(gpus=found.gpus or seen.gpus, nodes=found.nodes)
    steps = replayed_steps(
        run, now.strategy, now.step_ms, now.replayed, checkpointing=bool(now.checkpointing)
    )
    said = note(question, steps)
    return replace(wish, replayed=steps), (*notes, said) if said else notes


def _ask(options: Options) -> Ask:
    from tracedoc.planner.layouts import PARALLEL_FRAMEWORKS
    from tracedoc.planner.plan import Ask
    from tracedoc.planner.quantities import parse_count

    tokens = parse_count(options.tokens, "--tokens") if options.tokens else None
    if options.price is not None and not options.tokens:
        raise InputError("--price has no effect without --tokens", "add: --tokens 100B")
    if options.price is not None and options.price <= 0:
        raise InputError(f"--price is {options.price:g}", "the price of a GPU and hour: --price 2.5")
    if options.batch is not None and options.batch < 1:
        raise InputError(f"--batch is {options.batch}, and must be 1 or more", "the least is: --batch 1")
    if options.framework in PARALLEL_FRAMEWORKS:  # layouts have their own micro-batches
        return Ask(False, None, tokens, options.price)
    if options.batch is not None and options.micro_batch != "auto":
        raise InputError("--batch has no effect without a search", "add: --micro-batch auto")
    return Ask(options.micro_batch == "auto", options.batch, tokens, options.price)


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
    from tracedoc.cli.captured_training import Present
    from tracedoc.planner.setup import Training
    from tracedoc.planner.shape import lora_parameters

    now = found.present if found else Present()
    rank = options.lora_rank or (16 if options.qlora else 0)
    if not rank and now.trained and not options.params and not options.config:
        # As many parameters as the run trains: adapters of the rank that comes nearest.
        rank = max(1, round(now.trained / max(1, lora_parameters(model, 1, model.lora_targets))))

    if options.lora_rank is not None and options.lora_rank < 1:
        raise InputError(
            f"--lora-rank is {options.lora_rank}, and must be 1 or more", "commonly: --lora-rank 16"
        )
    training = Training(
        precision=options.precision
        or (options.gpu_name is None and now.precision)
        or ("fp16-mixed" if gpu is not None and not gpu.bf16 else "bf16-mixed"),
        optimizer=(options.optimizer or now.optimizer or "adamw").lower(),
        sequence=options.seq
        or (now.sequence if options.seq is None else 0)
        or _usual_sequence(options, model),
        micro_batch=_micro_batch(options.micro_batch, now.micro_batch or 1),
        accumulation=_given(options.accumulation, now.accumulation or 1),
        lora_rank=rank,
        lora_targets=_names(options.lora_targets),
        base_bits=4 if options.qlora else 16,
        checkpointing=options.checkpointing,
        fused_attention=not options.no_fused_attention,
        offload=options.offload,
        loss=options.loss,
        compiled=options.compiled,
        fp8=options.fp8,
        optimizer_in_backward=options.optimizer_in_backward,
    )
    if options.lora_targets and not training.lora_rank:
        raise InputError("--lora-targets has no effect without adapters", "add: --lora-rank 16")
    return training


def _as_scripted(options: Options, script: Scripted) -> Training:
    """Return the training that the script does; another micro-batch or accumulation may be asked about."""
    from tracedoc.planner.setup import Training

    return Training(
        precision=script.precision,
        optimizer=script.optimizer,
        sequence=script.sequence,
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


def _usual_sequence(options: Options, model: ModelShape) -> int:
    return min(2048, model.context or 2048) if options.seq is None else options.seq


def _micro_batch(text: str | None, otherwise: int) -> int:
    if text is None or text == "auto":
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--micro-batch {text!r} is no number", "as in: --micro-batch 4, or --micro-batch auto"
        ) from None


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
    from tracedoc.cli.captured import captured

    return captured(run)


def _model(options: Options, found: Captured | None) -> ModelShape:
    from tracedoc.planner.model_config import read_model_config
    from tracedoc.planner.quantities import parse_count
    from tracedoc.planner.shape import shape_from_parameters

    if options.config:
        return read_model_config(options.config)
    if options.params:
        return shape_from_parameters(parse_count(options.params, "--params"))
    from tracedoc.cli.captured import require_model

    assert found is not None
    return require_model(found, options.run or "")


def _gpu(options: Options, found: Captured | None) -> tuple[Gpu | None, float]:
    from tracedoc.planner.hardware import find_gpu, gpu_of_device
    from tracedoc.planner.quantities import parse_size

    name = options.gpu_name
    gpu = find_gpu(name) if name else (gpu_of_device(found.device, found.memory_bytes) if found else None)
    if options.gpu_memory:
        return gpu, parse_size(options.gpu_memory, "--gpu-memory")
    if found is not None and found.memory_bytes and name is None:
        return gpu, found.memory_bytes
    if gpu is None:
        of = f" ({found.device} is not in the table)" if found and found.device else ""
        raise InputError(
            f"no GPU is given{of}", 'name it, as --gpu "NVIDIA L4", or its memory, as --gpu-memory 24GB'
        )
    return gpu, gpu.memory_bytes


def _cluster(options: Options, gpu: Gpu | None, nodes: int, found: Captured | None) -> Cluster:
    from tracedoc.planner.hardware import Cluster, find_link, link_of

    link, network = options.link, options.network
    if network and nodes == 1:
        raise InputError("--network has no effect inside one node", "add: --nodes 2")
    inside = find_link(link, across=False) if link else (link_of(gpu) if gpu else None)
    across = find_link(network, across=True) if network else None
    if nodes > 1 and across is None:
        across = find_link(gpu.network if gpu else ASSUMED_NETWORK, across=True)
    if found is not None and found.busbw_gbps:
        if found.nodes == 1 and link is None and inside is not None:
            inside = _as_measured(inside, found)
        elif found.nodes > 1 and network is None and across is not None:
            across = _as_measured(across, found)
    return Cluster(gpu, inside, across if nodes > 1 else None)


def _as_measured(link: LinkKind, found: Captured) -> LinkKind:
    """Return the link with what the run's collectives reached, which may include the latency of a call."""
    from tracedoc.planner.hardware import replace_gbps

    measured = replace_gbps(link, found.busbw_gbps or link.gbps, measured=True)
    return replace(measured, latency_us=found.latency_us or 0.0)


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


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _one_of(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise InputError(
            f"--{option} {word!r} is not known{did_you_mean(word, known)}", f"use one of {', '.join(known)}"
        )
