"""Write a layout for torchtitan's TOML and as Megatron-LM's arguments.

Names are those of torchtitan's ``config/job_config.py`` (0.2) and Megatron-LM's ``training/arguments.py``.
"""

from __future__ import annotations

from tracedoc.planner.layout_traffic import overlaps_experts
from tracedoc.planner.layouts import Layout
from tracedoc.planner.setup import Question

TOML_NAME, ARGUMENTS_NAME = "layout.toml", "layout.sh"


def torchtitan_toml(question: Question, layout: Layout, *, checkpointing: bool) -> str:
    """Return the sections of torchtitan's file that a layout decides; model and data are the user's.

    Without a pipeline the local batch is a micro-batch, and torchtitan accumulates up to the global batch.
    """
    training = question.training
    local = layout.micro_batch * (layout.rounds if layout.pipeline > 1 else 1)
    parallelism: list[tuple[str, object]] = [
        ("data_parallel_replicate_degree", 1),
        ("data_parallel_shard_degree", layout.data),
        ("tensor_parallel_degree", layout.tensor),
        ("context_parallel_degree", layout.context),
        ("expert_parallel_degree", layout.expert),
        ("pipeline_parallel_degree", layout.pipeline),
    ]
    if layout.expert > 1:
        parallelism.append(("expert_tensor_parallel_degree", layout.tensor))
    if layout.pipeline > 1:
        parallelism += [
            ("pipeline_parallel_schedule", "Interleaved1F1B" if layout.chunks > 1 else "1F1B"),
            ("pipeline_parallel_microbatch_size", layout.micro_batch),
        ]
    recompute: list[tuple[str, object]] = [("mode", _mode(question, checkpointing))]
    if recompute[0][1] == "selective":
        recompute.append(("selective_ac_option", "op"))
    sections: list[tuple[str, list[tuple[str, object]]]] = [
        (
            "training",
            [
                ("seq_len", training.sequence),
                ("local_batch_size", local),
                ("global_batch_size", layout.data * layout.micro_batch * layout.rounds),
                ("mixed_precision_param", "float32" if training.precision == "fp32" else "bfloat16"),
            ],
        ),
        ("parallelism", parallelism),
        ("activation_checkpoint", recompute),
    ]
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {_toml(v)}" for key, v in keys)]) for name, keys in sections
    ]
    return "\n\n".join(blocks)


def _mode(question: Question, checkpointing: bool) -> str:
    if not checkpointing:
        return "none"
    return "selective" if question.training.checkpointing == "selective" else "full"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def megatron_arguments(question: Question, layout: Layout, *, checkpointing: bool) -> str:
    """Return the arguments of Megatron-LM's ``pretrain_gpt.py`` that a layout decides, not the model's."""
    training, model = question.training, question.model
    words = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
    ]
    if layout.tensor > 1:
        words += ["--sequence-parallel", "--tp-comm-overlap"]
    stages = layout.pipeline * layout.chunks
    if stages > 1 and model.blocks % stages and not model.assumed:
        words.append(f"--pipeline-model-parallel-layout '{_stage_by_stage(model.blocks, stages)}'")
    elif layout.chunks > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
    if model.experts_met:
        words += [f"--expert-model-parallel-size {layout.expert}", "--moe-token-dispatcher-type alltoall"]
    if overlaps_experts(question, layout):
        words.append("--overlap-moe-expert-parallel-comm")
    words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    words += [
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.data * layout.micro_batch * layout.rounds}",
        f"--seq-length {training.sequence}",
        f"--max-position-embeddings {training.sequence}",
    ]
    words += _PRECISION[training.precision]
    if training.fp8:
        words += ["--fp8-format hybrid", "--transformer-impl transformer_engine"]
    if checkpointing and training.checkpointing != "selective":
        words += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif checkpointing:
        words.append("--recompute-granularity selective")
    return "\n".join(["LAYOUT=(", *(f"  {word}" for word in words), ")"])


def _stage_by_stage(blocks: int, stages: int) -> str:
    """Return the stages in Megatron's letters: embedding, transformer blocks, loss; as even as they come."""
    letters = f"E{'t' * blocks}L"
    sizes = [(len(letters) + number) // stages for number in range(stages)]  # the shortest are first
    ends = [sum(sizes[: number + 1]) for number in range(stages)]
    return "|".join(letters[end - size : end] for size, end in zip(sizes, ends, strict=True))


_PRECISION = {
    "bf16-mixed": ["--bf16"],
    "bf16-mixed-reduce": ["--bf16", "--grad-reduce-in-bf16"],
    "fp16-mixed": ["--fp16"],
    "fp32": [],
}
