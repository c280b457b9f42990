"""Write the configuration of a strategy for each framework: code, YAML or JSON to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tracedoc.planner.activations import BUCKET_ELEMENTS
from tracedoc.planner.setup import PRECISIONS, Question

Plain = dict[str, Any]


class Configuration(msgspec.Struct, frozen=True):
    """A text to paste: ``framework`` as on the command line, ``language`` for highlighting."""

    framework: str
    title: str
    language: str
    text: str


def configurations(question: Question, strategy: str, *, checkpointing: bool) -> tuple[Configuration, ...]:
    """Return the configurations for a strategy by its id, those of plain PyTorch first where it has it."""
    fsdp = strategy in ("shard-grad-op", "full-shard", "hsdp")
    deepspeed = strategy.startswith("zero-") and strategy != "zero-redundancy"
    found = []
    if not deepspeed:
        code = _fsdp2(question, strategy, checkpointing) if fsdp else _ddp(question, strategy, checkpointing)
        title = "PyTorch FSDP2" if fsdp else ("PyTorch DDP" if question.gpus > 1 else "PyTorch")
        found.append(Configuration("pytorch", title, "python", code))
    if strategy != "zero-redundancy":
        found.append(
            Configuration("accelerate", "Accelerate", "yaml", _accelerate(question, strategy, checkpointing))
        )
        found.append(
            Configuration(
                "trainer", "Transformers Trainer", "python", _trainer(question, strategy, checkpointing)
            )
        )
    if deepspeed or strategy == "ddp":
        text = json.dumps(_deepspeed(question, strategy), indent=2)
        found.append(Configuration("deepspeed", "DeepSpeed (ds_config.json)", "json", text))
    return tuple(found)


def wrap_classes(question: Question) -> str:
    """Return the block classes for a wrap policy, or a place for the user's own."""
    return ",".join(question.model.wrap_classes) or "YourTransformerBlock"


def _ddp(question: Question, strategy: str, checkpointing: bool) -> str:
    several = question.gpus > 1
    place = "local_rank" if several else '"cuda"'
    lines = ["import torch"]
    if several:
        lines += ["import os", "import torch.distributed as dist"]
        lines += ["from torch.nn.parallel import DistributedDataParallel"]
        lines += ['dist.init_process_group("nccl")', 'local_rank = int(os.environ["LOCAL_RANK"])']
        lines += ["torch.cuda.set_device(local_rank)"]
    if strategy == "zero-redundancy":
        lines += ["from torch.distributed.optim import ZeroRedundancyOptimizer"]
    lines += _model(question, checkpointing)
    if question.training.base_bits != 4:  # 4-bit weights stay where they were loaded
        lines += [f"model.to({place})"]
    if several:
        lines += ["model = DistributedDataParallel("]
        lines += ["    model, device_ids=[local_rank], gradient_as_bucket_view=True", ")"]
    if strategy == "zero-redundancy":
        lines += ["optimizer = ZeroRedundancyOptimizer("]
        lines += ["    model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr", ")"]
    else:
        lines += _optimizer(question)
    precision = PRECISIONS[question.training.precision]
    if precision.master:
        dtype = "float16" if precision.name.startswith("fp16") else "bfloat16"
        if dtype == "float16":
            lines += _scaler()
        lines += [f'with torch.autocast("cuda", torch.{dtype}):', "    loss = model(**batch).loss"]
    return _module(lines)


def _fsdp2(question: Question, strategy: str, checkpointing: bool) -> str:
    training, model = question.training, question.model
    precision = PRECISIONS[training.precision]
    offload = training.offload == "all"
    names = ["MixedPrecisionPolicy", "fully_shard"] if precision.compute == 2 else ["fully_shard"]
    if offload:
        names.insert(0, "CPUOffloadPolicy")
    shape, dimensions = f"({question.gpus},)", '("shard",)'
    if strategy == "hsdp":
        shape = f"({question.nodes}, {question.gpus_per_node})"
        dimensions = '("replicate", "shard")'
    keep = strategy == "shard-grad-op"
    settings = ["mesh=mesh"]
    lines = ["import os", "import torch", "from torch.distributed.device_mesh import init_device_mesh"]
    lines += [f"from torch.distributed.fsdp import {', '.join(names)}"]
    lines += ['torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))']
    lines += [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={dimensions})']
    lines += _model(question, checkpointing)
    if precision.compute == 2:
        dtype = "float16" if precision.name.startswith("fp16") else "bfloat16"
        reduce = ", reduce_dtype=torch.float32" if precision.reduce else ""
        lines.append(f"precision = MixedPrecisionPolicy(param_dtype=torch.{dtype}{reduce})")
        settings.append("mp_policy=precision")
    if offload:
        settings.append("offload_policy=CPUOffloadPolicy()")
    # Left to itself, FSDP2 keeps the root's own parameters gathered until backward, which needs them first.
    root = ", ".join(settings)
    given = f"{root}, reshard_after_forward={not keep}"
    blocks = model.layers_path if not training.lora_rank else _inside_peft(model.layers_path)
    comment = "" if model.wrap_classes else "  # your list of blocks"
    lines += [f"for block in {blocks}:{comment}", f"    fully_shard(block, {given})"]
    lines += [f"fully_shard(model, {root})", *_optimizer(question)]
    if precision.name.startswith("fp16"):
        lines += _scaler()
    return _module(lines)


def _module(lines: Sequence[str]) -> str:
    """Return the lines with their imports first, as isort would order them."""
    imports = {line for line in lines if line.startswith(("import ", "from "))}
    standard = [line for line in imports if line == "import os"]
    others = sorted(imports - set(standard), key=lambda line: (line.startswith("from"), line))
    body = [line for line in lines if line and line not in imports]
    return "\n".join([*standard, *([""] if standard else []), *others, "", *body])


def _scaler() -> list[str]:
    return [
        'scaler = torch.amp.GradScaler("cuda")',
        "# then scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
    ]


def _inside_peft(path: str) -> str:
    # get_peft_model wraps the model in two more.
    return path.replace("model.", "model.base_model.model.", 1) if path.startswith("model.") else path


def _model(question: Question, checkpointing: bool) -> list[str]:
    """Return the lines that prepare the model before it is wrapped."""
    training = question.training
    lines = []
    if training.base_bits == 4:
        lines += ['# loaded with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",']
        lines += ["#     bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16,"]
        lines += ["#     bnb_4bit_quant_storage=torch.bfloat16), on the GPU of its own process"]
    elif training.precision == "bf16" or (training.lora_rank and training.precision.startswith("bf16-mixed")):
        lines += ["model = model.to(torch.bfloat16)"]
    elif training.lora_rank and training.precision == "fp16-mixed":
        lines += ["model = model.to(torch.float16)"]
    if training.lora_rank:
        lines += ["from peft import LoraConfig, get_peft_model"]
        targets = _targets(question)
        rank = training.lora_rank
        lines += [f"lora = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets})"]
        lines += ["model = get_peft_model(model, lora)"]
    if checkpointing:
        lines += ['model.gradient_checkpointing_enable({"use_reentrant": False})']
        if training.lora_rank:
            lines += ["model.enable_input_require_grads()"]
    return lines


def _targets(question: Question) -> str:
    targets: Sequence[str] = question.training.lora_targets or question.model.lora_targets
    return '"all-linear"' if tuple(targets) == ("all-linear",) else json.dumps(list(targets))


_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
    "adam": "torch.optim.Adam(model.parameters(), lr=lr, fused=True)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=lr, fused=True)",
    "sgd-momentum": "torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)",
    "adafactor": "torch.optim.Adafactor(model.parameters(), lr=lr)",
    "adamw-8bit": "AdamW8bit(model.parameters(), lr=lr)",
}


def _optimizer(question: Question) -> list[str]:
    name = question.training.optimizer
    call = _OPTIMIZERS[name]
    if question.training.lora_rank:
        call = call.replace("model.parameters()", "trained")
    lines = ["from torchao.optim import AdamW8bit"] if name == "adamw-8bit" else []
    if question.training.lora_rank:
        lines.append("trained = [p for p in model.parameters() if p.requires_grad]")
    return [*lines, f"optimizer = {call}"]


def _mixed_precision(question: Question) -> str:
    return {"bf16-mixed": "bf16", "bf16-mixed-reduce": "bf16", "fp16-mixed": "fp16"}.get(
        question.training.precision, "no"
    )


def _accelerate(question: Question, strategy: str, checkpointing: bool) -> str:
    """Return a YAML file for ``accelerate launch --config_file``, with the keys of accelerate 1.10."""
    kind = "FSDP" if strategy in ("shard-grad-op", "full-shard", "hsdp") else "MULTI_GPU"
    kind = "DEEPSPEED" if strategy.startswith("zero-") else kind
    settings: Plain = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind if question.gpus > 1 else "NO",
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
            "fsdp_transformer_layer_cls_to_wrap": wrap_classes(question),
            "fsdp_activation_checkpointing": checkpointing,
            "fsdp_offload_params": question.training.offload == "all",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if strategy == "hsdp":
            settings["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": question.nodes,
                "parallelism_config_dp_shard_size": question.gpus_per_node,
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


def _trainer(question: Question, strategy: str, checkpointing: bool) -> str:
    """Return ``TrainingArguments``; ``fsdp_config`` is that of Transformers 5 (FSDP2)."""
    training = question.training
    imports = ["from transformers import TrainingArguments"]
    arguments = ['output_dir="out"', f"per_device_train_batch_size={training.micro_batch}"]
    if (precision := _mixed_precision(question)) != "no":
        arguments.append(f"{precision}=True")
    optimizer = {
        "adamw": "adamw_torch_fused",
        "adam": "adamw_torch_fused",
        "sgd": "sgd",
        "sgd-momentum": "sgd",
        "adafactor": "adafactor",
        "adamw-8bit": "adamw_torch_8bit",
    }[training.optimizer]
    arguments.append(f'optim="{optimizer}"')
    fsdp = strategy in ("shard-grad-op", "full-shard", "hsdp")
    if fsdp:
        config: Plain = {
            "version": 2,
            "reshard_after_forward": strategy != "shard-grad-op",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": wrap_classes(question).split(","),
            "activation_checkpointing": checkpointing,
        }
        if training.offload == "all":
            config["cpu_offload"] = True
        items = "".join(f"\n        {json.dumps(k)}: {_python(v)}," for k, v in config.items())
        arguments += ["fsdp=True", f"fsdp_config={{{items}\n    }}"]
        if strategy == "hsdp":
            imports.insert(0, "from accelerate import ParallelismConfig")
            arguments.append(
                f"parallelism_config=ParallelismConfig(\n        dp_replicate_size={question.nodes},"
                f" dp_shard_size={question.gpus_per_node}\n    )"
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
    return "\n".join([*imports, "", f"arguments = TrainingArguments(\n{body})"])


def _python(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | list) else repr(value)


def _deepspeed(question: Question, strategy: str) -> Plain:
    """Return a DeepSpeed configuration; nothing in it is "auto", so plain DeepSpeed reads it as well."""
    training = question.training
    settings: Plain = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    if training.precision.startswith("fp16"):
        settings["fp16"] = {"enabled": True}
    elif training.precision != "fp32":
        settings["bf16"] = {"enabled": True}
    stage = int(strategy[-1]) if strategy != "ddp" else 0
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
    device = "nvme" if training.offload == "nvme" else "cpu"
    if training.offload != "none" and stage:
        place = {"device": device} | ({"nvme_path": "/local_nvme"} if device == "nvme" else {})
        zero["offload_optimizer"] = place | {"pin_memory": True}
        if training.offload != "optimizer" and stage == 3:
            zero["offload_param"] = place | {"pin_memory": True}
    settings["zero_optimization"] = zero
    if training.optimizer not in ("adamw", "adam", "sgd", "sgd-momentum"):
        settings["zero_allow_untested_optimizer"] = True
    if training.offload != "none":
        # Named here, DeepSpeed takes its own Adam for CPUs. Set your learning rate.
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    return settings
