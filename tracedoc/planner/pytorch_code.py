"""Write the code that sets up training in plain PyTorch: DDP, FSDP2, adapters, optimizers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tracedoc.planner.layouts import STRATEGIES, data_parallel
from tracedoc.planner.setup import PRECISIONS, Question


def ddp_code(question: Question, strategy: str) -> str:
    """Return the set-up of DDP, or of one GPU; ``strategy`` may ask for ZeroRedundancyOptimizer."""
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
    lines += _model(question)
    if question.training.base_bits != 4:  # 4-bit weights stay where they were loaded
        lines += [f"model.to({place})"]
    if question.training.optimizer == "muon":
        lines += _optimizer(question)  # while the blocks can be distinguished
    if several:
        lines += ["model = DistributedDataParallel("]
        lines += ["    model, device_ids=[local_rank], gradient_as_bucket_view=True", ")"]
    if strategy == "zero-redundancy":
        lines += ["optimizer = ZeroRedundancyOptimizer("]
        lines += [
            f"    model.parameters(), optimizer_class=torch.optim.{_SHARED[question.training.optimizer]}"
        ]
        lines += [")"]
    elif question.training.optimizer != "muon":
        lines += _optimizer(question)
    precision = PRECISIONS[question.training.precision]
    if precision.master:
        dtype = _dtype(question)
        if dtype == "float16":
            lines += _scaler()
        lines += [f'with torch.autocast("cuda", torch.{dtype}):', "    loss = model(**batch).loss"]
    return module(lines)


def fsdp2_code(question: Question, strategy: str) -> str:
    """Return the set-up of FSDP2 (``fully_shard``), one unit for each block."""
    training, model = question.training, question.model
    precision = PRECISIONS[training.precision]
    offload = training.offload == "all"
    names = ["MixedPrecisionPolicy", "fully_shard"] if precision.compute == 2 else ["fully_shard"]
    if offload:
        names.insert(0, "CPUOffloadPolicy")
    shape, dimensions = f"({question.gpus},)", '("shard",)'
    if STRATEGIES[strategy].hybrid:
        part = data_parallel(question, strategy).shards
        shape = f"({question.gpus // part}, {part})"
        dimensions = '("replicate", "shard")'
    reshard: int | bool = strategy != "shard-grad-op"
    if STRATEGIES[strategy].kept_in_node:
        reshard = question.gpus_per_node
    settings = ["mesh=mesh"]
    lines = ["import os", "import torch", "from torch.distributed.device_mesh import init_device_mesh"]
    lines += [f"from torch.distributed.fsdp import {', '.join(names)}"]
    lines += ['torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))']
    lines += [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={dimensions})']
    lines += _model(question)
    if precision.compute == 2:
        dtype = _dtype(question)
        reduce = ", reduce_dtype=torch.float32" if precision.reduce else ""
        lines.append(f"precision = MixedPrecisionPolicy(param_dtype=torch.{dtype}{reduce})")
        settings.append("mp_policy=precision")
    if offload:
        settings.append("offload_policy=CPUOffloadPolicy()")
    # Left to itself, FSDP2 keeps the root's own parameters gathered until backward, which needs them first.
    root = ", ".join(settings)
    given = f"{root}, reshard_after_forward={reshard}"
    blocks = _blocks(question)
    comment = "" if model.wrap_classes else "  # your list of blocks"
    lines += [f"for block in {blocks}:{comment}", f"    fully_shard(block, {given})"]
    lines += [f"fully_shard(model, {root})", *_optimizer(question)]
    if precision.name.startswith("fp16"):
        lines += _scaler()
    return module(lines)


def module(lines: Sequence[str]) -> str:
    """Return the lines with their imports first, as isort would order them."""
    imports = {line for line in lines if line.startswith(("import ", "from "))}
    standard = sorted(line for line in imports if line in ("import functools", "import os"))
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


def adapters(question: Question, checkpointing: bool) -> list[str]:
    """Return the lines that make the adapters of PEFT, and checkpoint the blocks."""
    training = question.training
    lines = []
    if training.lora_rank:
        lines += ["from peft import LoraConfig, get_peft_model"]
        targets = _targets(question)
        rank = training.lora_rank
        lines += [f"lora = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets})"]
        lines += ["model = get_peft_model(model, lora)"]
    if checkpointing:
        lines += checkpoint_blocks(question)
        if training.lora_rank:
            lines += ["model.enable_input_require_grads()"]
    return lines


def checkpoint_blocks(question: Question) -> list[str]:
    """Return the lines that checkpoint the blocks: by Transformers, or by torch for a model of one's own."""
    if question.model.step is None:
        return ['model.gradient_checkpointing_enable({"use_reentrant": False})']
    wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    return [
        f"from {wrapper} import apply_activation_checkpointing",
        f"blocks = list({question.model.layers_path})",
        "apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)",
    ]


def _model(question: Question) -> list[str]:
    """Return the lines that prepare the model before it is wrapped."""
    training = question.training
    lines = []
    dtype = _dtype(question)
    if training.base_bits != 4 and (training.precision == "bf16" or (training.lora_rank and dtype)):
        lines += [f"model = model.to(torch.{dtype})"]
    if training.fp8:
        # Products in 8 bits want sizes that divide by 16, which heads often have not.
        lines += ["from torchao.float8 import convert_to_float8_training"]
        lines += ["convert_to_float8_training(", "    model, module_filter_fn=lambda layer, name:"]
        lines += ["    layer.in_features % 16 == layer.out_features % 16 == 0", ")"]
    lines += adapters(question, training.checkpointing == "on")
    blocks = _blocks(question)
    if training.checkpointing == "selective":
        lines += _selective(blocks)
    if training.compiled:
        lines += [f"for block in {blocks}:", "    block.compile()"]
    return lines


def _blocks(question: Question) -> str:
    path = question.model.layers_path
    return _inside_peft(path) if question.training.lora_rank else path


def _dtype(question: Question) -> str:
    """Return the 16-bit dtype of arithmetic, empty in fp32."""
    if PRECISIONS[question.training.precision].compute != 2:
        return ""
    return "float16" if question.training.precision.startswith("fp16") else "bfloat16"


_SELECTIVE = """\
import functools
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
def selective():
    seen = {True: 0, False: 0}
    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
        keep = op in ATTENTION or (op == torch.ops.aten.mm.default and seen[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)
"""


def _selective(blocks: str) -> list[str]:
    """Return lines that keep attention and every second matrix product of each block."""
    return [
        *_SELECTIVE.splitlines(),
        # A cache of keys grows again where blocks are computed again.
        "model.config.use_cache = False",
        f"for block in {blocks}:",
        "    block.forward = functools.partial(",
        "        checkpoint, block.forward, use_reentrant=False, context_fn=selective",
        "    )",
    ]


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
    "paged-adamw": "PagedAdamW32bit(model.parameters(), lr=lr)",
    "paged-adamw-8bit": "PagedAdamW8bit(model.parameters(), lr=lr)",
}
_SHARED = {
    "adamw": "AdamW, lr=lr",
    "adam": "Adam, lr=lr",
    "sgd": "SGD, lr=lr",
    "sgd-momentum": "SGD, lr=lr, momentum=0.9",
}
_FROM = {
    "adamw-8bit": "from torchao.optim import AdamW8bit",
    "paged-adamw": "from bitsandbytes.optim import PagedAdamW32bit",
    "paged-adamw-8bit": "from bitsandbytes.optim import PagedAdamW8bit",
}


def _optimizer(question: Question) -> list[str]:
    training = question.training
    name = training.optimizer
    lines = [_FROM[name]] if name in _FROM else []
    parameters = "model.parameters()"
    if training.lora_rank:
        lines.append("trained = [p for p in model.parameters() if p.requires_grad]")
        parameters = "trained"
    if name == "muon":
        return [*lines, *_muon(question, parameters)]
    call = _OPTIMIZERS[name]
    if training.optimizer_in_backward:
        one = call.replace("model.parameters()", "[p]")
        return [
            *lines,
            "def update(p):",
            "    optimizers[p].step()",
            "    optimizers[p].zero_grad()",
            f"optimizers = {{p: {one} for p in {parameters}}}",
            "for p in optimizers:",
            "    p.register_post_accumulate_grad_hook(update)",
        ]
    return [*lines, f"optimizer = {call.replace('model.parameters()', parameters)}"]


def _muon(question: Question, parameters: str) -> list[str]:
    """Return the two optimizers: Muon for the matrices of blocks, AdamW for all that is left."""
    if question.training.lora_rank:
        return [
            "muon = torch.optim.Muon(trained, lr=lr)",
            "optimizers = [muon]",
        ]
    return [
        f"blocks = [p for block in {_blocks(question)} for p in block.parameters()]",
        "matrices = [p for p in blocks if p.ndim == 2]",
        "inside = {id(p) for p in matrices}",
        f"rest = [p for p in {parameters} if id(p) not in inside]",
        "optimizers = [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr, fused=True)]",
    ]
