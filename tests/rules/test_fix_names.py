"""Every argument, key and flag that a fix prints is one that the installed library takes.

Sources are read, not imported: of libraries that are not installed nothing is held.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.test_answers import _filled, _fixes, _language
from tracedoc.diagnosis import Fix
from tracedoc.judge.rule import Rule

CALLS = {
    "TrainingArguments": ("transformers", "training_args.py"),
    "DDP": ("torch", "nn/parallel/distributed.py", "DistributedDataParallel"),
    "DistributedDataParallel": ("torch", "nn/parallel/distributed.py"),
    "FSDP": ("torch", "distributed/fsdp/fully_sharded_data_parallel.py", "FullyShardedDataParallel"),
    "fully_shard": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "MixedPrecisionPolicy": ("torch", "distributed/fsdp/_fully_shard/_fsdp_api.py"),
    "init_device_mesh": ("torch", "distributed/device_mesh.py"),
    "Embedding": ("torch", "nn/modules/sparse.py"),
    "DataLoader": ("torch", "utils/data/dataloader.py"),
    "DistributedSampler": ("torch", "utils/data/distributed.py"),
    "AdamW": ("torch", "optim/adamw.py"),
    "ZeroRedundancyOptimizer": ("torch", "distributed/optim/zero_redundancy_optimizer.py"),
    "Schedule1F1B": ("torch", "distributed/pipelining/schedules.py"),
    "ScheduleInterleaved1F1B": ("torch", "distributed/pipelining/schedules.py"),
    "new_group": ("torch", "distributed/distributed_c10d.py"),
    "async_save": ("torch", "distributed/checkpoint/state_dict_saver.py"),
    "clip_grad_norm_": ("torch", "nn/utils/clip_grad.py"),
    "compile": ("torch", "__init__.py"),
    "all_reduce": ("torch", "distributed/distributed_c10d.py"),
    "all_to_all_single": ("torch", "distributed/distributed_c10d.py"),
    "MixedPrecision": ("torch", "distributed/fsdp/api.py"),
    "checkpoint": ("torch", "utils/checkpoint.py"),
    "autocast": ("torch", "amp/autocast_mode.py"),
    "schedule": ("torch", "profiler/profiler.py"),
    "Accelerator": ("accelerate", "accelerator.py"),
    "DistributedDataParallelKwargs": ("accelerate", "utils/dataclasses.py"),
    "InitProcessGroupKwargs": ("accelerate", "utils/dataclasses.py"),
    "DataLoaderConfiguration": ("accelerate", "utils/dataclasses.py"),
    "DDPStrategy": ("lightning", "pytorch/strategies/ddp.py"),
    "Trainer": ("lightning", "pytorch/trainer/trainer.py"),
    "PipelineModule": ("deepspeed", "runtime/pipe/module.py"),
    "set_z3_leaf_modules": ("deepspeed", "utils/z3_leaf_module.py"),
}
"""What a call in a fix names: package, file, and the class or function where it is called otherwise."""

METHODS = {
    "set_modules_to_forward_prefetch": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "set_modules_to_backward_prefetch": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "set_separate_reduce_scatter_group": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "set_reduce_scatter_max_input_buffers": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "set_requires_gradient_sync": ("torch", "distributed/fsdp/_fully_shard/_fully_shard.py"),
    "register_comm_hook": ("torch", "nn/parallel/distributed.py"),
    "no_sync": ("torch", "nn/parallel/distributed.py"),
    "set_sync_debug_mode": ("torch", "cuda/__init__.py"),
    "mark_dynamic": ("torch", "_dynamo/decorators.py"),
    "bf16_compress_hook": ("torch", "distributed/algorithms/ddp_comm_hooks/default_hooks.py"),
}


def source(package: str, file: str) -> str | None:
    """Return the text of a file of an installed package, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / file
    return path.read_text(encoding="utf-8") if path.exists() else None


@cache
def tree(package: str, file: str) -> ast.Module | None:
    text = source(package, file)
    return None if text is None else ast.parse(text)


@cache
def takes(package: str, file: str, name: str) -> frozenset[str] | None:
    """Return the arguments of a class or function; ``None`` where the library is missing, or takes any."""
    module = tree(package, file)
    if module is None:
        return None
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found |= {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    found |= {arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)}
                    if one.args.kwarg is not None and name == "DDPStrategy":
                        found |= (
                            takes("torch", "nn/parallel/distributed.py", "DistributedDataParallel") or set()
                        )
                    if one.args.kwarg is not None and name == "ZeroRedundancyOptimizer":
                        found |= takes("torch", "optim/adamw.py", "AdamW") or set()
    return frozenset(found)


def calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of every call in some code, with its keywords."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, [one.arg for one in node.keywords if one.arg]


PRINTED = [(rule, fix, _language(fix, _filled(rule, fix.change)[0])) for rule, fix in _fixes()]


def of_language(language: str) -> list[tuple[Rule, Fix]]:
    return [(rule, fix) for rule, fix, written in PRINTED if written == language]


@pytest.mark.parametrize(("rule", "fix"), of_language("python"), ids=lambda one: getattr(one, "id", ""))
def test_calls_take_the_arguments_that_are_printed(rule: Rule, fix: Fix) -> None:
    (code,) = _filled(rule, fix.change)
    for name, keywords in calls(code):
        if name in METHODS:
            package, file = METHODS[name]
            text = source(package, file)
            assert text is None or f"def {name}(" in text, name
        if name not in CALLS or (name == "Trainer" and fix.framework != "lightning"):
            continue
        package, file, *called = CALLS[name]
        known = takes(package, file, called[0] if called else name)
        assert known is None or set(keywords) <= known, (name, set(keywords) - known)


def test_every_call_with_arguments_is_held() -> None:
    """A class that a new fix names must be added to the table, or its arguments go unchecked."""
    builtin = {
        "scaled_dot_product_attention",
        "log",
        "to",
        "from_pretrained",
        "resize_token_embeddings",
        "randn",
        "",
    }  # C++, or a framework's
    named = {
        name
        for rule, fix in of_language("python")
        for name, keywords in calls(_filled(rule, fix.change)[0])
        if keywords
    }
    assert named - CALLS.keys() - METHODS.keys() == builtin


@pytest.mark.parametrize(("rule", "fix"), of_language("json"), ids=lambda one: getattr(one, "id", ""))
def test_deepspeed_knows_the_keys_of_its_config(rule: Rule, fix: Fix) -> None:
    config = json.loads(_filled(rule, fix.change)[0])
    text = "".join(source("deepspeed", f"runtime/{file}.py") or "" for file in ("config", "constants"))
    zero = "".join(
        source("deepspeed", f"runtime/zero/{file}.py") or ""
        for file in ("config", "offload_config", "leaf_module_config")
    )
    if not text:
        pytest.skip("deepspeed is not installed")
    for key, value in config.items():
        assert re.search(rf'["\']{key}["\']', text) or key == "zero_optimization", key
        for inner in value if key == "zero_optimization" else ():
            assert re.search(rf'^    {inner}: |alias="{inner}"', zero, re.M), inner


@pytest.mark.parametrize(("rule", "fix"), of_language("yaml"), ids=lambda one: getattr(one, "id", ""))
def test_accelerate_knows_the_keys_of_its_config(rule: Rule, fix: Fix) -> None:
    text = source("accelerate", "commands/launch.py")
    if text is None:
        pytest.skip("accelerate is not installed")
    for section in yaml.safe_load(_filled(rule, fix.change)[0]).values():
        for key in section:
            assert f'"--{key}"' in text, key


@pytest.mark.parametrize(
    "key",
    [
        "version",
        "transformer_layer_cls_to_wrap",
        "activation_checkpointing",
        "forward_prefetch",
        "backward_prefetch",
    ],
)
def test_the_trainer_knows_the_keys_of_its_fsdp_config(key: str) -> None:
    text = source("transformers", "training_args.py")
    if text is None:
        pytest.skip("transformers is not installed")
    assert f'fsdp_config.get("{key}"' in text or f'fsdp_config["{key}"]' in text or f'"{key}" in' in text
    printed = {
        match
        for _, fix, _ in PRINTED
        if "fsdp_config=" in fix.change
        for match in re.findall(r'"(\w+)":', fix.change)
    }
    assert key in printed
