"""Write the configurations of a strategy for each framework: code, YAML or JSON to paste.

Keys are those of Accelerate 1.10, Transformers 5 and DeepSpeed; a layout's names are those of torchtitan's
``config/job_config.py`` (0.2) and Megatron-LM's ``training/arguments.py``.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tracedoc.planner.candidates import Candidate
from tracedoc.planner.layouts import STRATEGIES, Layout, data_parallel
from tracedoc.planner.memory import BUCKET_ELEMENTS
from tracedoc.planner.pytorch_code import adapters, ddp_code, fsdp2_code, module
from tracedoc.planner.setup import PRECISIONS, Question
from tracedoc.planner.traffic import overlaps_experts

WHOLE_BLOCKS = ("accelerate", "trainer", "deepspeed")
"""Frameworks whose settings checkpoint whole blocks alone."""


class Configuration(msgspec.Struct, frozen=True):
    """A text to paste: ``framework`` as on the command line, ``language`` for highlighting.

    ``note`` says in words what the text cannot: how the model is loaded, what goes into the training loop.
    """

    framework: str
    title: str
    language: str
    text: str
    note: str = ""


def configurations(question: Question, strategy: str) -> tuple[Configuration, ...]:
    """Return the configurations for a strategy by its id, those of plain PyTorch first where it has it."""
    family = STRATEGIES[strategy].family
    # On one GPU the same settings serve, with one shard.
    name = {"single-fsdp": "full-shard"}.get(strategy, strategy.removeprefix("single-"))
    found = [] if family == "deepspeed" else [_pytorch(question, name)]
    trainer_has = strategy != "zero-redundancy" and not STRATEGIES[strategy].kept_in_node
    trainer_has = trainer_has and question.training.optimizer != "muon"
    if trainer_has:
        found += _accelerate(question, name)
        found += _trainer(question, name)
    if family == "deepspeed" or strategy == "ddp":
        found.append(_deepspeed(question, name))
    whole = question.training.checkpointing != "selective"
    return tuple(one for one in found if whole or one.framework not in WHOLE_BLOCKS)


def configurations_of(question: Question, chosen: Candidate) -> tuple[Configuration, ...]:
    """Return the configurations for what was chosen: for a layout those of its framework."""
    layout = chosen.layout
    kept = "selective" if chosen.selective else "on" if chosen.checkpointing else "off"
    question = question.changed(checkpointing=kept)
    if layout.strategy in STRATEGIES:
        return configurations(question, chosen.strategy)
    if layout.family == "torchtitan":
        text = torchtitan_toml(question, layout)
        title = f"torchtitan 0.2 ({TOML_NAME}), beside your [model], [optimizer] and data"
        return (Configuration(layout.family, title, "toml", text, _in_torchtitan(question, layout)),)
    text = megatron_arguments(question, layout)
    title = f"Megatron-LM ({ARGUMENTS_NAME}), beside your model, data and learning rate"
    note = "Source it in the shell that starts pretrain_gpt.py."
    return (Configuration(layout.family, title, "bash", text, note),)


def _in_torchtitan(question: Question, layout: Layout) -> str:
    training = question.training
    notes = []
    if training.compiled or (layout.tensor > 1 and "tensor" in layout.overlapped):
        notes.append(
            "Compile as your version says it: [compile] enable = true, earlier [training] compile = true"
        )
    if training.fp8:
        notes.append('In [model]: converters = ["float8"]')
    return _sentences(notes)


def _pytorch(question: Question, strategy: str) -> Configuration:
    write = fsdp2_code if STRATEGIES[strategy].family == "fsdp" else ddp_code
    title = "PyTorch FSDP2" if write is fsdp2_code else ("PyTorch DDP" if question.gpus > 1 else "PyTorch")
    notes = [_loading(question), _rounds(question, "model.no_sync()" if strategy == "ddp" else "")]
    return Configuration("pytorch", title, "python", write(question, strategy), _sentences(notes))


def _accelerate(question: Question, strategy: str) -> list[Configuration]:
    text = accelerate_yaml(question, strategy)
    fsdp = STRATEGIES[strategy].family == "fsdp"
    notes = [_loading(question), _units(question, strategy)]
    in_code = question.training.recomputes and not fsdp
    if in_code:
        notes.append(_enable_checkpointing(question))
    rounds = question.training.accumulation
    if rounds > 1:
        accumulate = f"Accelerator(gradient_accumulation_steps={rounds}), and accelerator.accumulate(model)"
        notes.append(f"In the code: {accumulate}")
    found = [Configuration("accelerate", "Accelerate (accelerate.yaml)", "yaml", text, _sentences(notes))]
    if question.training.lora_rank:
        code = module(adapters(question, in_code))
        found.append(Configuration("accelerate", "Adapters, before prepare()", "python", code))
    return found + _settings_for(question, strategy, "accelerate")


def _trainer(question: Question, strategy: str) -> list[Configuration]:
    text = trainer_code(question, strategy)
    notes = _sentences([_loading(question), _units(question, strategy)])
    found = [Configuration("trainer", "Transformers Trainer", "python", text, notes)]
    return found + _settings_for(question, strategy, "trainer")


def _settings_for(question: Question, strategy: str, framework: str) -> list[Configuration]:
    """Return the DeepSpeed file that Accelerate and the Trainer fill in themselves, where they need one."""
    if not strategy.startswith("zero-"):
        return []
    text = json.dumps(deepspeed_settings(question, strategy, auto=True), indent=2)
    return [Configuration(framework, "DeepSpeed (ds_config.json)", "json", text)]


def _deepspeed(question: Question, strategy: str) -> Configuration:
    text = json.dumps(deepspeed_settings(question, strategy, auto=False), indent=2)
    notes = [_enable_checkpointing(question)] if question.training.recomputes else []
    if question.training.offload != "none":
        notes.append("Set your learning rate in it; deepspeed.initialize makes the optimizer")
    else:
        notes.append("Your optimizer goes to deepspeed.initialize(model=model, optimizer=optimizer, ...)")
    return Configuration("deepspeed", "DeepSpeed (ds_config.json)", "json", text, _sentences(notes))


def _loading(question: Question) -> str:
    """The way to load the model, in words; Transformers 5 keeps the dtype of the checkpoint."""
    training = question.training
    if training.base_bits == 4:
        dtype = "float16" if training.precision.startswith("fp16") else "bfloat16"
        return (
            "Load the model on the GPU of its process with BitsAndBytesConfig(load_in_4bit=True,"
            ' bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,'
            f" bnb_4bit_compute_dtype=torch.{dtype}, bnb_4bit_quant_storage=torch.{dtype})"
        )
    if question.model.step is not None:
        return ""
    if training.lora_rank and PRECISIONS[training.precision].compute == 2:
        dtype = "float16" if training.precision.startswith("fp16") else "bfloat16"
        return f"Load the model with from_pretrained(..., dtype=torch.{dtype}); its adapters are kept in fp32"
    if training.lora_rank or "mixed" not in training.precision:
        return ""
    return (
        "Load the model with from_pretrained(..., dtype=torch.float32): Transformers 5 otherwise keeps the"
        " checkpoint's 16 bits, and mixed precision silently becomes pure 16-bit training"
    )


def _units(question: Question, strategy: str) -> str:
    """The blocks that become units, in words, where the file does not say it."""
    if STRATEGIES[strategy].family != "fsdp" or question.model.wrap_classes:
        return ""
    return (
        "Units are the blocks that a model of Transformers names itself; name those of your own as"
        " transformer_layer_cls_to_wrap"
    )


def _rounds(question: Question, context: str) -> str:
    rounds = question.training.accumulation
    if rounds == 1:
        return ""
    inside = f", inside {context} for all but the last" if context else ""
    return f"Call backward() on {rounds} micro-batches, their losses divided by {rounds}{inside}, then step()"


def _enable_checkpointing(question: Question) -> str:
    inputs = ", then model.enable_input_require_grads()" if question.training.lora_rank else ""
    if question.model.step is not None:
        blocks = question.model.layers_path
        return f"In the code: apply_activation_checkpointing (of torch) to each of {blocks}"
    return f'In the code: model.gradient_checkpointing_enable({{"use_reentrant": False}}){inputs}'


def _sentences(notes: list[str]) -> str:
    return " ".join(f"{note}." for note in notes if note)


Plain = dict[str, Any]
TOML_NAME, ARGUMENTS_NAME = "layout.toml", "layout.sh"


def _mixed_precision(question: Question) -> str:
    return {"bf16-mixed": "bf16", "bf16-mixed-reduce": "bf16", "fp16-mixed": "fp16"}.get(
        question.training.precision, "no"
    )


def accelerate_yaml(question: Question, strategy: str) -> str:
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
            "fsdp_activation_checkpointing": question.training.recomputes,
            "fsdp_offload_params": question.training.offload == "all",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if classes := question.model.wrap_classes:  # else those that a model of Transformers names itself
            settings["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
        if STRATEGIES[strategy].hybrid:
            part = data_parallel(question, strategy).shards
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
    return msgspec.yaml.encode(settings).decode().rstrip("\n")


def trainer_code(question: Question, strategy: str) -> str:
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
            "activation_checkpointing": training.recomputes,
        }
        if training.offload == "all":
            config["cpu_offload"] = True
        if classes := question.model.wrap_classes:
            config["transformer_layer_cls_to_wrap"] = list(classes)
        items = "".join(f"\n        {json.dumps(k)}: {_python(v)}," for k, v in config.items())
        arguments += ["fsdp=True", f"fsdp_config={{{items}\n    }}"]
        if STRATEGIES[strategy].hybrid:
            imports.insert(0, "from accelerate import ParallelismConfig")
            part = data_parallel(question, strategy).shards
            arguments.append(
                f"parallelism_config=ParallelismConfig(\n        dp_replicate_size={question.gpus // part},"
                f" dp_shard_size={part}\n    )"
            )
    else:
        if training.recomputes:
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


def torchtitan_toml(question: Question, layout: Layout) -> str:
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
    if layout.context > 1:  # its "alltoall" passes keys and values round
        method = "allgather" if layout.shares_context == "gather" else "alltoall"
        parallelism.append(("context_parallel_rotate_method", method))
    if layout.tensor > 1 and "tensor" in layout.overlapped:
        parallelism.append(("enable_async_tensor_parallel", True))
    if layout.expert > 1:
        parallelism.append(("expert_tensor_parallel_degree", layout.cut_experts))
    if layout.pipeline > 1:
        parallelism += [
            ("pipeline_parallel_schedule", "Interleaved1F1B" if layout.chunks > 1 else "1F1B"),
            ("pipeline_parallel_microbatch_size", layout.micro_batch),
        ]
    mode = {"on": "full", "selective": "selective"}.get(training.checkpointing, "none")
    recompute: list[tuple[str, object]] = [("mode", mode)]
    if mode == "selective":
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
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in keys)]) for name, keys in sections
    ]
    return "\n\n".join(blocks)


def megatron_arguments(question: Question, layout: Layout) -> str:
    """Return the arguments of Megatron-LM's ``pretrain_gpt.py`` that a layout decides, not the model's."""
    training, model = question.training, question.model
    words = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
    ]
    if layout.context > 1:
        kind = {"ring": "p2p", "all-to-all": "a2a", "gather": "all_gather"}[layout.shares_context]
        words.append(f"--cp-comm-type {kind}")
    if layout.tensor > 1 and layout.sequence_parallel:
        words.append("--sequence-parallel")
    if layout.tensor > 1 and "tensor" in layout.overlapped:
        words.append("--tp-comm-overlap")
    stages = layout.pipeline * layout.chunks
    if stages > 1 and model.blocks % stages and not model.assumed:
        words.append(f"--pipeline-model-parallel-layout '{_stage_by_stage(model.blocks, stages)}'")
    elif layout.chunks > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
    if model.experts_met:
        words.append(f"--expert-model-parallel-size {layout.expert}")
        words.append(f"--moe-token-dispatcher-type {'flex' if layout.flex else 'alltoall'}")
        if training.capacity:
            words.append(f"--moe-expert-capacity-factor {training.capacity:g}")
            words.append("--moe-pad-expert-input-to-capacity")
        if layout.tensor > 1:
            words.append(f"--expert-tensor-parallel-size {layout.cut_experts}")
    if overlaps_experts(question, layout):
        words.append("--overlap-moe-expert-parallel-comm")
    words.append("--use-distributed-optimizer")
    if "data" in layout.overlapped:
        words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    words += [
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.data * layout.micro_batch * layout.rounds}",
        f"--seq-length {training.sequence}",
        f"--max-position-embeddings {training.sequence}",
    ]
    words += _PRECISION[training.precision]
    if training.fp8:
        words += ["--fp8-format hybrid", "--transformer-impl transformer_engine"]
    if training.checkpointing == "on":
        words += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif training.checkpointing == "selective":
        words.append("--recompute-granularity selective")
        if training.recomputed:
            words.append(f"--recompute-modules {' '.join(training.recomputed)}")
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
