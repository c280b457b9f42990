"""Write the files that launchers read: Accelerate's YAML, the Trainer's arguments, DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from tracedoc.planner.activations import BUCKET_ELEMENTS
from tracedoc.planner.pytorch_code import adapters, module
from tracedoc.planner.setup import Question
from tracedoc.planner.strategies import STRATEGIES, shards

Plain = dict[str, Any]


def _mixed_precision(question: Question) -> str:
    return {"bf16-mixed": "bf16", "bf16-mixed-reduce": "bf16", "fp16-mixed": "fp16"}.get(
        question.training.precision, "no"
    )


def accelerate_yaml(question: Question, strategy: str, checkpointing: bool) -> str:
    """Return a YAML file for ``accelerate launch --config_file``, with the keys of accelerate 1.10."""
    kind = "FSDP" if STRATEGIES[strategy].family == "fsdp" else "MULTI_GPU"
    kind = "DEEPSPEED" if strategy.startswith("zero-") and strategy != "zero-redundancy" else kind
    settings: Plain = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind if question.gpus > 1 or kind != "MULTI_GPU" else "NO",
        "mixed_precision": _mixed_precision(question),
        "num_machines": question.nodes,
        "num_processes": question.gpus,
    }
    if question.nodes > 1:
        settings |= {"machine_rank": 0, "main_process_ip": "FIRST_NODE", "main_process_port": 29500}
    if kind == "FSDP":
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": strategy != "shard-grad-op",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": checkpointing,
            "fsdp_offload_params": question.training.offload == "all",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if classes := question.model.wrap_classes:  # else those that a model of Transformers names itself
            settings["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
        if STRATEGIES[strategy].hybrid:
            part = shards(STRATEGIES[strategy], question.gpus, question.nodes)
            settings["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": question.gpus // part,
                "parallelism_config_dp_shard_size": part,
            }
    elif kind == "DEEPSPEED":
        settings["deepspeed_config"] = {
            "deepspeed_config_file": "ds_config.json",
            "zero3_init_flag": strategy == "zero-3",
        }
        # With a file of its own, DeepSpeed takes the precision from there.
        del settings["mixed_precision"]
    return "\n".join(_yaml(settings))


def _yaml(settings: Plain, indent: str = "") -> list[str]:
    lines = []
    for key, value in settings.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        elif isinstance(value, bool):
            lines.append(f"{indent}{key}: {str(value).lower()}")
        elif value in ("no", "NO"):
            lines.append(f"{indent}{key}: '{value}'")  # YAML 1.1 reads a bare no as false
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines


def trainer_code(question: Question, strategy: str, checkpointing: bool) -> str:
    """Return ``TrainingArguments``; ``fsdp_config`` is that of Transformers 5 (FSDP2)."""
    training = question.training
    imports = ["from transformers import TrainingArguments"]
    arguments = ['output_dir="out"', f"per_device_train_batch_size={training.micro_batch}"]
    if training.accumulation > 1:
        arguments.append(f"gradient_accumulation_steps={training.accumulation}")
    if (precision := _mixed_precision(question)) != "no":
        arguments.append(f"{precision}=True")
    if training.compiled:
        arguments.append("torch_compile=True")
    arguments += _TRAINER_OPTIMIZERS[training.optimizer]
    fsdp = STRATEGIES[strategy].family == "fsdp"
    if fsdp:
        config: Plain = {
            "version": 2,
            "reshard_after_forward": strategy != "shard-grad-op",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "activation_checkpointing": checkpointing,
        }
        if training.offload == "all":
            config["cpu_offload"] = True
        if classes := question.model.wrap_classes:
            config["transformer_layer_cls_to_wrap"] = list(classes)
        items = "".join(f"\n        {json.dumps(k)}: {_python(v)}," for k, v in config.items())
        arguments += ["fsdp=True", f"fsdp_config={{{items}\n    }}"]
        if STRATEGIES[strategy].hybrid:
            imports.insert(0, "from accelerate import ParallelismConfig")
            part = shards(STRATEGIES[strategy], question.gpus, question.nodes)
            arguments.append(
                f"parallelism_config=ParallelismConfig(\n        dp_replicate_size={question.gpus // part},"
                f" dp_shard_size={part}\n    )"
            )
    else:
        if checkpointing:
            arguments += ["gradient_checkpointing=True"]
            arguments += ['gradient_checkpointing_kwargs={"use_reentrant": False}']
        if strategy.startswith("zero-"):
            arguments.append('deepspeed="ds_config.json"')
        elif question.gpus > 1:
            arguments.append("ddp_find_unused_parameters=False")
    body = "".join(f"    {argument},\n" for argument in arguments)
    before = adapters(question, False)
    after = [f"arguments = TrainingArguments(\n{body})"]
    if training.optimizer == "sgd-momentum":
        imports.insert(0, "import torch")
        after.append('momentum = (torch.optim.SGD, {"lr": arguments.learning_rate, "momentum": 0.9})')
        after.append("# Trainer(..., args=arguments, optimizer_cls_and_kwargs=momentum)")
    return module([*imports, *before, *after])


_TRAINER_OPTIMIZERS = {
    "adamw": ['optim="adamw_torch_fused"'],
    "adam": ['optim="adamw_torch_fused"', "weight_decay=0.0"],
    "sgd": ['optim="sgd"'],
    "sgd-momentum": [],
    "adafactor": ['optim="adafactor"'],
    "adamw-8bit": ['optim="adamw_torch_8bit"'],
    "paged-adamw": ['optim="paged_adamw_32bit"'],
    "paged-adamw-8bit": ['optim="paged_adamw_8bit"'],
}
"""The Trainer's names; it has none for momentum, which is given to it as a class."""


def _python(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | list) else repr(value)


def deepspeed_settings(question: Question, strategy: str, *, auto: bool) -> Plain:
    """Return a DeepSpeed configuration.

    With ``auto`` it leaves to Accelerate and the Trainer what their own arguments say, and makes no
    optimizer: two values that differ are an error there. Without, nothing in it is "auto", so plain
    DeepSpeed reads it.
    """
    training = question.training
    settings: Plain = {
        "train_micro_batch_size_per_gpu": "auto" if auto else training.micro_batch,
        "gradient_accumulation_steps": "auto" if auto else training.accumulation,
        "gradient_clipping": "auto" if auto else 1.0,
    }
    if training.precision.startswith("fp16"):
        settings["fp16"] = {"enabled": True}
    elif training.precision != "fp32":
        settings["bf16"] = {"enabled": True}
    settings["zero_optimization"] = _zero(question, int(strategy[-1]) if strategy != "ddp" else 0)
    if training.optimizer not in ("adamw", "adam", "sgd", "sgd-momentum"):
        settings["zero_allow_untested_optimizer"] = True
    if training.offload != "none" and not auto:
        # Named here, DeepSpeed takes its own Adam for CPUs.
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    return settings


def _zero(question: Question, stage: int) -> Plain:
    zero: Plain = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        }
    if stage in (1, 2):
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    if stage == 3:
        model = question.model
        # One block ahead; two blocks and what is in none stay gathered.
        zero |= {
            "stage3_prefetch_bucket_size": model.block_parameters,
            "stage3_max_live_parameters": model.outside_parameters + 2 * model.block_parameters,
            "stage3_max_reuse_distance": 2 * model.block_parameters,
            "stage3_param_persistence_threshold": 10 * model.hidden,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    offload = question.training.offload
    if offload != "none" and stage:
        nvme = {"device": "nvme", "nvme_path": "/local_nvme"}
        place = (nvme if offload == "nvme" else {"device": "cpu"}) | {"pin_memory": True}
        zero["offload_optimizer"] = place
        if offload != "optimizer" and stage == 3:
            zero["offload_param"] = dict(place)
    return zero
