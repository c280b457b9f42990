"""Write the configurations of a strategy for each framework: code, YAML or JSON to paste."""

from __future__ import annotations

import json

import msgspec

from tracedoc.planner.candidates import Candidate
from tracedoc.planner.launch_files import (
    ARGUMENTS_NAME,
    TOML_NAME,
    accelerate_yaml,
    deepspeed_settings,
    megatron_arguments,
    torchtitan_toml,
    trainer_code,
)
from tracedoc.planner.layouts import STRATEGIES
from tracedoc.planner.pytorch_code import adapters, ddp_code, fsdp2_code, module
from tracedoc.planner.setup import PRECISIONS, Question


class Configuration(msgspec.Struct, frozen=True):
    """A text to paste: ``framework`` as on the command line, ``language`` for highlighting.

    ``note`` says in words what the text cannot: how the model is loaded, what goes into the training loop.
    """

    framework: str
    title: str
    language: str
    text: str
    note: str = ""


def configurations(question: Question, strategy: str, *, checkpointing: bool) -> tuple[Configuration, ...]:
    """Return the configurations for a strategy by its id, those of plain PyTorch first where it has it."""
    family = STRATEGIES[strategy].family
    # On one GPU the same settings serve, with one shard.
    name = {"single-fsdp": "full-shard"}.get(strategy, strategy.removeprefix("single-"))
    found = [] if family == "deepspeed" else [_pytorch(question, name, checkpointing)]
    trainer_has = strategy != "zero-redundancy" and not STRATEGIES[strategy].kept_in_node
    trainer_has = trainer_has and question.training.optimizer != "muon"
    if trainer_has:
        found += _accelerate(question, name, checkpointing)
        found += _trainer(question, name, checkpointing)
    if family == "deepspeed" or strategy == "ddp":
        found.append(_deepspeed(question, name, checkpointing))
    return tuple(found)


def configurations_of(question: Question, chosen: Candidate) -> tuple[Configuration, ...]:
    """Return the configurations for what was chosen: for a layout those of its framework."""
    layout = chosen.layout
    if layout.strategy in STRATEGIES:
        return configurations(question, chosen.strategy, checkpointing=chosen.checkpointing)
    if layout.family == "torchtitan":
        text = torchtitan_toml(question, layout, checkpointing=chosen.checkpointing)
        title = f"torchtitan ({TOML_NAME}), beside your [model], [optimizer] and data"
        return (Configuration(layout.family, title, "toml", text, _in_torchtitan(question)),)
    text = megatron_arguments(question, layout, checkpointing=chosen.checkpointing)
    title = f"Megatron-LM ({ARGUMENTS_NAME}), beside your model, data and learning rate"
    note = "Source it in the shell that starts pretrain_gpt.py."
    return (Configuration(layout.family, title, "bash", text, note),)


def _in_torchtitan(question: Question) -> str:
    training = question.training
    notes = []
    if training.compiled:
        notes.append(
            "Compile as your version says it: [compile] enable = true, earlier [training] compile = true"
        )
    if training.fp8:
        notes.append('In [model]: converters = ["float8"]')
    return _sentences(notes)


def _pytorch(question: Question, strategy: str, checkpointing: bool) -> Configuration:
    write = fsdp2_code if STRATEGIES[strategy].family == "fsdp" else ddp_code
    title = "PyTorch FSDP2" if write is fsdp2_code else ("PyTorch DDP" if question.gpus > 1 else "PyTorch")
    notes = [_loading(question), _rounds(question, "model.no_sync()" if strategy == "ddp" else "")]
    return Configuration(
        "pytorch", title, "python", write(question, strategy, checkpointing), _sentences(notes)
    )


def _accelerate(question: Question, strategy: str, checkpointing: bool) -> list[Configuration]:
    text = accelerate_yaml(question, strategy, checkpointing)
    fsdp = STRATEGIES[strategy].family == "fsdp"
    notes = [_loading(question), _units(question, strategy)]
    if checkpointing and not fsdp:
        notes.append(_enable_checkpointing(question))
    rounds = question.training.accumulation
    if rounds > 1:
        accumulate = f"Accelerator(gradient_accumulation_steps={rounds}), and accelerator.accumulate(model)"
        notes.append(f"In the code: {accumulate}")
    found = [Configuration("accelerate", "Accelerate (accelerate.yaml)", "yaml", text, _sentences(notes))]
    if question.training.lora_rank:
        code = module(adapters(question, checkpointing and not fsdp))
        found.append(Configuration("accelerate", "Adapters, before prepare()", "python", code))
    return found + _settings_for(question, strategy, "accelerate")


def _trainer(question: Question, strategy: str, checkpointing: bool) -> list[Configuration]:
    text = trainer_code(question, strategy, checkpointing)
    notes = _sentences([_loading(question), _units(question, strategy)])
    found = [Configuration("trainer", "Transformers Trainer", "python", text, notes)]
    return found + _settings_for(question, strategy, "trainer")


def _settings_for(question: Question, strategy: str, framework: str) -> list[Configuration]:
    """Return the DeepSpeed file that Accelerate and the Trainer fill in themselves, where they need one."""
    if not strategy.startswith("zero-"):
        return []
    text = json.dumps(deepspeed_settings(question, strategy, auto=True), indent=2)
    return [Configuration(framework, "DeepSpeed (ds_config.json)", "json", text)]


def _deepspeed(question: Question, strategy: str, checkpointing: bool) -> Configuration:
    text = json.dumps(deepspeed_settings(question, strategy, auto=False), indent=2)
    notes = [_enable_checkpointing(question)] if checkpointing else []
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
