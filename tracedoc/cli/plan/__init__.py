"""``tracedoc plan``: which strategy fits, what it costs, and how to configure it."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from tracedoc.cli.completion import files
from tracedoc.cli.output import format_option, json_text, output_option, quiet_option, send, targets

if TYPE_CHECKING:
    from tracedoc.planner.plan import Plan

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
@click.option(
    "--script",
    metavar="COMMAND",
    shell_complete=files,
    help="Training script and its options: estimate its first step under fake tensors.",
)
@click.option("--gpus", type=int, metavar="N", help="GPUs in all. [1]")
@click.option("--nodes", type=int, metavar="N", help="Machines that they are in. [of 8 GPUs]")
@click.option("--gpu", "gpu_name", metavar="NAME", help='GPU by name, as "NVIDIA L4" or "A100 40GB".')
@click.option("--gpu-memory", metavar="SIZE", help="Memory of a GPU, as 24GB. [that of --gpu]")
@click.option("--link", metavar="NAME", help="Link inside a node, as nvlink4, pcie4, 20GB/s. [that of --gpu]")
@click.option("--network", metavar="NAME", help="Network of a node, as ib-8x400g, 100Gbit/s.")
@click.option("--seq", type=int, metavar="N", help="Tokens of a sequence. [2048, or what the model allows]")
@click.option("--micro-batch", metavar="N", help="Sequences of a GPU at a time, or auto: the fastest. [1]")
@click.option("--accumulation", type=int, metavar="N", help="Micro-batches for each update. [1]")
@click.option("--batch", type=int, metavar="N", help="Sequences of all GPUs for each update.")
@click.option(
    "--layout",
    metavar="LAYOUT",
    help="Answer for tp2-pp4-dp8 (cp, ep, etp, vpp2) with torchtitan or megatron.",
)
@click.option(
    "--overlap",
    metavar="WHAT",
    help="Layouts: what is sent beside computation: on, off, or of data,tensor,expert.",
)
@click.option(
    "--context-parallel", metavar="HOW", help="Layouts: share a sequence by ring, all-to-all or gather."
)
@click.option(
    "--no-sequence-parallel", is_flag=True, help="Layouts: tensor parallelism splits matrices only."
)
@click.option(
    "--capacity",
    type=float,
    metavar="X",
    help="Megatron: each expert computes on X times an even share, padded. [what comes]",
)
@click.option(
    "--flex-dispatch", is_flag=True, help="Megatron: tokens go to experts by DeepEP or HybridEP, not NCCL."
)
@click.option(
    "--precision", metavar="NAME", help="fp32, bf16-mixed(-reduce), fp16-mixed or bf16. [bf16-mixed]"
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="adamw, adam, sgd, sgd-momentum, adafactor, muon, adamw-8bit, paged-adamw(-8bit). [adamw]",
)
@click.option("--lora-rank", type=int, default=None, metavar="N", help="Train LoRA adapters of this rank.")
@click.option("--lora-targets", metavar="NAMES", help="Matrices with adapters, or all-linear. [q and v]")
@click.option("--qlora", is_flag=True, help="LoRA on 4-bit weights with double quantisation.")
@click.option(
    "--checkpointing",
    default="auto",
    metavar="WHEN",
    help="on (full), selective, off, or auto: where needed. Megatron: modules, as layernorm,moe_act. [auto]",
)
@click.option("--loss", default="eager", metavar="NAME", help="eager, fused, or chunked. [eager]")
@click.option("--compile", "compiled", is_flag=True, help="The model is compiled with torch.compile.")
@click.option("--fp8", is_flag=True, help="Matrix products in 8 bits (torchao's float8).")
@click.option("--optimizer-in-backward", is_flag=True, help="Update each parameter when its gradient comes.")
@click.option("--no-fused-attention", is_flag=True, help="Attention keeps its scores (eager).")
@click.option("--offload", default="none", metavar="WHAT", help="none, optimizer, all or nvme. [none]")
@click.option("--objective", default="speed", metavar="WHAT", help="speed or memory. [speed]")
@click.option(
    "--framework",
    default="pytorch",
    metavar="NAME",
    help="pytorch, accelerate, trainer, deepspeed, torchtitan or megatron. [pytorch]",
)
@click.option(
    "--utilisation", type=float, default=None, metavar="SHARE", help="Share of peak FLOP/s. [fitted]"
)
@click.option("--tokens", metavar="N", help="Tokens to train on, as 300B: adds days.")
@click.option("--price", type=float, metavar="X", help="Price of a GPU and hour: adds the cost of --tokens.")
@click.option(
    "--measure", is_flag=True, help="Measure this machine's GPUs, under torchrun: plans on it take that."
)
@format_option("markdown")
@output_option(".txt, .json or .md")
@quiet_option
def plan(**given: object) -> None:
    """Say which training strategy fits, what it costs, and how to set it up.

    The model comes from --params, from --model, or from RUN: the folder of
    a captured run, or a diagnosis in JSON, whose GPUs and measured
    bandwidth count as well. With --script it is an estimate: the script
    runs up to its first update without GPU, data or memory being used,
    and what it writes is thrown away.

    \b
    Examples:
      tracedoc plan --params 7e9 --gpus 4 --gpu "A100 40GB"
      tracedoc plan --params 7B --gpus 2 --gpu-memory 24GB --lora-rank 16
      tracedoc plan --model config.json --gpus 16 --nodes 2 --gpu H100 --network 100Gbit/s
      tracedoc plan runs/a --seq 4096                  the run that was captured
      tracedoc plan --params 7B --gpus 8 --gpu H100 --micro-batch auto --tokens 100B
      tracedoc plan --model config.json --gpus 512 --gpu H100 --seq 8192 --framework torchtitan
      tracedoc plan --script "train.py --depth 24" --gpus 8 --gpu H100
      tracedoc plan --params 13B --gpus 4 --gpu-memory 40GB -f json | jq .changes
    """
    import msgspec

    if given.pop("measure"):
        from tracedoc.cli.plan.measure import measured

        click.echo(measured(), nl=False)
        return
    from tracedoc.cli.plan.question import Options, question_of
    from tracedoc.planner.plan import plan as make_plan

    options = msgspec.convert(given, Options)
    inputs = [path for path in (options.run, options.config) if path]
    places = targets(options.report_format, options.outputs, inputs, _FORMATS)
    question, request, notes = question_of(options)
    answer = make_plan(question, request, notes=notes)
    send(places, lambda *how: [_rendered(answer, options.script, *how)], answer.summary)


def _rendered(answer: Plan, script: str | None, chosen: str, width: int, color: bool) -> str:
    from tracedoc.cli.plan.text import plan_markdown, plan_text

    if chosen == "json":
        return json_text(answer)
    if chosen == "markdown":
        return plan_markdown(answer)
    return plan_text(answer, next_command=_next(answer, script or "train.py"), width=width, color=color)


def _launcher(answer: Plan, script: str) -> str:
    """The command that starts the training script, with the file that was shown, on each node."""
    asked = answer.asked
    local = asked.gpus // asked.nodes
    if answer.framework == "accelerate":
        return f"accelerate launch --config_file accelerate.yaml {script}"
    if answer.framework == "deepspeed":
        nodes = "--hostfile hostfile " if asked.nodes > 1 else f"--num_gpus {local} "
        return f"deepspeed {nodes}{script} --deepspeed_config ds_config.json"
    script = {
        "torchtitan": "-m torchtitan.train --job.config_file layout.toml",
        "megatron": 'pretrain_gpt.py "${LAYOUT[@]}"',
    }.get(answer.framework, script)
    nodes = ""
    if asked.nodes > 1:
        nodes = f"--nnodes {asked.nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "
    return f"torchrun {nodes}--nproc-per-node {local} {script}"


def _next(answer: Plan, script: str) -> str:
    """Return the command to type next: measure what was planned, or ask again with what would fit."""
    if answer.recommended is not None:
        return f"tracedoc collect -- {_launcher(answer, script)}"
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
