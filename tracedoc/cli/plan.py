"""``tracedoc plan``: which strategy fits, what it costs, and how to configure it."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import send, targets
from tracedoc.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tracedoc.cli.captured import Captured
    from tracedoc.planner.hardware import Cluster, Gpu
    from tracedoc.planner.plan import Plan
    from tracedoc.planner.shape import ModelShape

_FORMATS = {".txt": "text", ".json": "json", ".md": "markdown"}


@click.command(short_help="Say which training strategy fits, what it costs, and how to set it up.")
@click.argument("run", required=False, metavar="[RUN]", shell_complete=files)
@click.option("--params", metavar="N", help="Parameters of the model, as 7e9 or 7B.")
@click.option(
    "--model",
    "config",
    metavar="FILE",
    shell_complete=files,
    help="config.json of a Hugging Face model on disk.",
)
@click.option("--gpus", type=int, metavar="N", help="GPUs in all. [1]")
@click.option("--nodes", type=int, metavar="N", help="Machines that they are in. [of 8 GPUs]")
@click.option("--gpu", "gpu_name", metavar="NAME", help='GPU by name, as "NVIDIA L4" or "A100 40GB".')
@click.option("--gpu-memory", metavar="SIZE", help="Memory of a GPU, as 24GB. [that of --gpu]")
@click.option("--link", metavar="NAME", help="Link inside a node, as nvlink4, pcie4, 20GB/s. [that of --gpu]")
@click.option("--network", metavar="NAME", help="Network of a node, as ib-8x400g, 100Gbit/s.")
@click.option("--seq", type=int, metavar="N", help="Tokens of a sequence. [2048]")
@click.option("--micro-batch", type=int, metavar="N", help="Sequences of a GPU and step. [1]")
@click.option("--precision", metavar="NAME", help="fp32, bf16-mixed, fp16-mixed or bf16. [bf16-mixed]")
@click.option(
    "--optimizer",
    default="adamw",
    metavar="NAME",
    help="adamw, adam, sgd, sgd-momentum, adafactor, adamw-8bit. [adamw]",
)
@click.option("--lora-rank", type=int, default=None, metavar="N", help="Train LoRA adapters of this rank.")
@click.option("--lora-targets", metavar="NAMES", help="Matrices with adapters, or all-linear. [q and v]")
@click.option("--qlora", is_flag=True, help="LoRA on 4-bit weights with double quantisation.")
@click.option(
    "--checkpointing", default="auto", metavar="WHEN", help="on, off, or auto: where needed. [auto]"
)
@click.option("--no-fused-attention", is_flag=True, help="Attention keeps its scores (eager).")
@click.option("--offload", default="none", metavar="WHAT", help="none, optimizer, all or nvme. [none]")
@click.option("--objective", default="speed", metavar="WHAT", help="speed or memory. [speed]")
@click.option(
    "--framework",
    default="pytorch",
    metavar="NAME",
    help="pytorch, accelerate, trainer or deepspeed. [pytorch]",
)
@click.option("--utilisation", type=float, default=None, metavar="SHARE", help="Share of peak FLOP/s. [0.4]")
@click.option(
    "-f",
    "--format",
    "report_format",
    type=click.Choice(["text", "json", "markdown"]),
    help="Format of stdout. [text]",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    metavar="FILE",
    shell_complete=files,
    help="Write .txt, .json or .md; - is stdout.",
)
def plan(
    run: str | None,
    params: str | None,
    config: str | None,
    gpus: int | None,
    nodes: int | None,
    gpu_name: str | None,
    gpu_memory: str | None,
    link: str | None,
    network: str | None,
    seq: int | None,
    micro_batch: int | None,
    precision: str | None,
    optimizer: str,
    lora_rank: int | None,
    lora_targets: str | None,
    qlora: bool,
    checkpointing: str,
    no_fused_attention: bool,
    offload: str,
    objective: str,
    framework: str,
    utilisation: float | None,
    report_format: str | None,
    outputs: tuple[str, ...],
) -> None:
    """Say which training strategy fits, what it costs, and how to set it up.

    The model comes from --params, from --model, or from RUN: the folder of
    a captured run, or a diagnosis in JSON, whose GPUs and measured
    bandwidth count as well.

    \b
    Examples:
      tracedoc plan --params 7e9 --gpus 4 --gpu "A100 40GB"
      tracedoc plan --params 7B --gpus 2 --gpu-memory 24GB --lora-rank 16
      tracedoc plan --model config.json --gpus 16 --nodes 2 --gpu H100 --network 100Gbit/s
      tracedoc plan runs/a --seq 4096                  the run that was captured
      tracedoc plan --params 13B --gpus 4 --gpu-memory 40GB -f json | jq .changes
    """
    from tracedoc.planner.advice import FRAMEWORKS, OBJECTIVES, UTILISATION, Wish
    from tracedoc.planner.plan import plan as make_plan
    from tracedoc.planner.setup import Question, Training

    places = targets(report_format, outputs, [path for path in (run, config) if path], _FORMATS)
    _one_of("objective", objective, OBJECTIVES)
    _one_of("framework", framework, FRAMEWORKS)
    share = UTILISATION if utilisation is None else utilisation
    if not 0 < share <= 1:
        raise InputError(f"--utilisation is {share:g}", "it is a share of the peak: --utilisation 0.4")
    if lora_rank is not None and lora_rank < 1:
        raise InputError(f"--lora-rank is {lora_rank}, and must be 1 or more", "commonly: --lora-rank 16")
    found = _captured(run, params, config)
    model = _model(run, params, config, found)
    count = gpus if gpus is not None else (found.gpus if found and found.gpus else 1)
    machines = nodes if nodes is not None else (found.nodes if found and gpus is None else nodes_of_8(count))
    gpu, memory = _gpu(gpu_name, gpu_memory, found)
    cluster = _cluster(gpu, link, network, machines, found)
    training = Training(
        precision=precision or ("fp16-mixed" if gpu is not None and not gpu.bf16 else "bf16-mixed"),
        optimizer=optimizer,
        sequence=2048 if seq is None else seq,
        micro_batch=1 if micro_batch is None else micro_batch,
        lora_rank=lora_rank or (16 if qlora else 0),
        lora_targets=_names(lora_targets),
        base_bits=4 if qlora else 16,
        checkpointing=checkpointing,
        fused_attention=not no_fused_attention,
        offload=offload,
    )
    if gpu is not None and not gpu.bf16 and training.precision.startswith("bf16"):
        raise InputError(f"{gpu.name} has no bf16 arithmetic", "use --precision fp16-mixed")
    if lora_targets and not training.lora_rank:
        raise InputError("--lora-targets has no effect without adapters", "add: --lora-rank 16")
    question = Question(model, training, count, machines, memory)
    own = found is not None and (params, config, gpu_name, precision, lora_rank, utilisation) == (None,) * 6
    own = own and not qlora and (seq, micro_batch) == (None, None)
    measured = found.compute_ms if found and own else None
    wish = Wish(cluster, objective, framework, share, measured)
    notes = _notes(found, network, machines, nodes, cluster)
    answer = make_plan(question, wish, notes=notes)
    send(places, lambda *how: [_rendered(answer, *how)], answer.summary)


def _captured(run: str | None, params: str | None, config: str | None) -> Captured | None:
    if params and config:
        raise InputError("--params and --model both give the model", "leave one of them out")
    if run is None:
        if not (params or config):
            raise InputError(
                "no model is given",
                'as in: tracedoc plan --params 7e9 --gpus 4 --gpu "A100 40GB"',
            )
        return None
    from tracedoc.cli.captured import captured

    return captured(run)


def _model(run: str | None, params: str | None, config: str | None, found: Captured | None) -> ModelShape:
    from tracedoc.planner.model_config import read_model_config
    from tracedoc.planner.quantities import parse_count
    from tracedoc.planner.shape import shape_from_parameters

    if config:
        return read_model_config(config)
    if params:
        return shape_from_parameters(parse_count(params, "--params"))
    from tracedoc.cli.captured import require_model

    assert found is not None
    return require_model(found, run or "")


def _gpu(name: str | None, memory: str | None, found: Captured | None) -> tuple[Gpu | None, float]:
    from tracedoc.planner.hardware import find_gpu, gpu_of_device
    from tracedoc.planner.quantities import parse_size

    gpu = find_gpu(name) if name else (gpu_of_device(found.device) if found else None)
    if memory:
        return gpu, parse_size(memory, "--gpu-memory")
    if gpu is None:
        of = f" ({found.device} is not in the table)" if found and found.device else ""
        raise InputError(
            f"no GPU is given{of}", 'name it, as --gpu "NVIDIA L4", or its memory, as --gpu-memory 24GB'
        )
    return gpu, gpu.memory_gb * 1e9


def _cluster(
    gpu: Gpu | None, link: str | None, network: str | None, nodes: int, found: Captured | None
) -> Cluster:
    from tracedoc.planner.hardware import Cluster, find_link, link_of, replace_gbps

    if network and nodes == 1:
        raise InputError("--network has no effect inside one node", "add: --nodes 2")
    inside = find_link(link, across=False) if link else (link_of(gpu) if gpu else None)
    across = find_link(network, across=True) if network else None
    if nodes > 1 and across is None:
        across = find_link(ASSUMED_NETWORK, across=True)
    if found is not None and found.busbw_gbps:
        if found.nodes == 1 and link is None and inside is not None:
            inside = replace_gbps(inside, found.busbw_gbps, measured=True)
        elif found.nodes > 1 and network is None and across is not None:
            across = replace_gbps(across, found.busbw_gbps, measured=True)
    return Cluster(gpu, inside, across if nodes > 1 else None)


ASSUMED_NETWORK = "roce-100g"
"""The network between nodes where none is named."""


def _notes(
    found: Captured | None, network: str | None, nodes: int, given: int | None, cluster: Cluster
) -> tuple[str, ...]:
    notes = found.notes if found else ()
    if nodes > 1 and network is None and cluster.across is not None and not cluster.across.measured:
        notes = (*notes, f"{cluster.across.title} between nodes assumed; --network names the real one.")
    if nodes > 1 and given is None and not found:
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


def _rendered(answer: Plan, chosen: str, width: int, color: bool) -> str:
    from tracedoc.cli.plan_text import plan_markdown, plan_text

    if chosen == "json":
        import msgspec

        return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n"
    if chosen == "markdown":
        return plan_markdown(answer)
    return plan_text(answer, next_command=_next(answer), width=width, color=color)


def _next(answer: Plan) -> str:
    """Return the command to type next: measure what was planned, or ask again with what would fit."""
    if answer.recommended is not None:
        local = answer.asked.gpus // answer.asked.nodes
        return f"tracedoc collect -- torchrun --nproc-per-node {local} train.py"
    command = ["tracedoc", *sys.argv[1:]] if "plan" in sys.argv[1:2] else ["tracedoc", "plan", "..."]
    if not answer.changes:
        return "tracedoc plan --help"
    smallest = answer.changes[0]
    extra = smallest.option.split()
    if smallest.strategy.startswith("DeepSpeed") and "--framework" not in extra:
        extra += ["--framework", "deepspeed"]
    return shlex.join([*_without(command, extra[::2]), *extra])


def _without(command: list[str], options: list[str]) -> list[str]:
    """Return a command without options, and their values, that are given anew."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip:
            skip = False
        elif word in options and word != "--qlora":
            skip = True
        elif word.partition("=")[0] not in options:
            kept.append(word)
    return kept
