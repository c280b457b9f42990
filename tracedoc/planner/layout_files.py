"""Write a layout for torchtitan's TOML and as Megatron-LM's arguments.

Names are those of torchtitan's ``config/job_config.py`` (0.2) and Megatron-LM's ``training/arguments.py``.
"""

from __future__ import annotations

from tracedoc.planner.layouts import Layout
from tracedoc.planner.setup import Question
from tracedoc.planner.shape import ModelShape

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
    """Return the arguments of Megatron-LM's ``pretrain_gpt.py`` that layout and shape decide."""
    training, model = question.training, question.model
    words = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
    ]
    if layout.tensor > 1:
        words += ["--sequence-parallel", "--tp-comm-overlap"]
    if layout.chunks > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
    if layout.pipeline > 1 and model.blocks % layout.pipeline and not model.assumed:
        words += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if model.experts_met:
        words += [f"--expert-model-parallel-size {layout.expert}", "--moe-token-dispatcher-type alltoall"]
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
    words += _shape(model)
    return "\n".join(["LAYOUT=(", *(f"  {word}" for word in words), ")"])


_PRECISION = {
    "bf16-mixed": ["--bf16"],
    "bf16-mixed-reduce": ["--bf16", "--grad-reduce-in-bf16"],
    "fp16-mixed": ["--fp16"],
    "fp32": [],
}


def _shape(model: ModelShape) -> list[str]:
    if model.assumed:  # what is printed would be another model
        return []
    words = [
        f"--num-layers {model.blocks}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
    ]
    if model.kv_width != model.q_width and model.q_width % model.heads == 0:
        groups = model.kv_width // (model.q_width // model.heads)
        words += ["--group-query-attention", f"--num-query-groups {groups}"]
    if not model.experts_met:
        words.append(f"--ffn-hidden-size {model.mlp_width}")
    if model.gated:
        words.append("--swiglu")
    if model.rms_norm:
        words.append("--normalization RMSNorm")
    if model.outside_parameters > 1.5 * model.vocabulary * model.hidden:
        words.append("--untie-embeddings-and-output-weights")
    return words
