"""Hold that the printed configurations are what the real loaders accept, and say what was planned."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tracedoc.planner.configurations import Configuration, configurations
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import shape_from_parameters

TRAININGS = {
    "full": Training(),
    "fp32": Training(precision="fp32"),
    "fp16": Training(precision="fp16-mixed"),
    "8-bit": Training(optimizer="adamw-8bit"),
    "lora": Training(lora_rank=16),
    "qlora": Training(lora_rank=16, base_bits=4),
    "offload": Training(offload="all"),
}
SHARDED = ("shard-grad-op", "full-shard", "hsdp")
STAGES = ("zero-1", "zero-2", "zero-3")


def printed(framework: str, strategy: str, training: str = "full", *, nodes: int = 1) -> Configuration:
    nodes = 2 if strategy == "hsdp" else nodes
    question = Question(shape_from_parameters(1_000_000_000), TRAININGS[training], 8, nodes, 80e9)
    found = configurations(question.changed(checkpointing="on"), strategy)
    return next(c for c in found if c.framework == framework)


def real(name: str) -> ModuleType:
    """Return a package that the tests do not need otherwise; skip where it is absent."""
    package = name.split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make loaders)")
    return importlib.import_module(name)


CODE = [(strategy, training) for strategy in ("ddp", *SHARDED) for training in TRAININGS]
# ZeroRedundancyOptimizer takes neither adapters nor what torch.optim has not.
CODE += [("zero-redundancy", training) for training in ("full", "fp32", "fp16")]


@pytest.mark.parametrize(("strategy", "training"), CODE)
def test_printed_code_is_python_and_imports_what_it_uses(strategy: str, training: str) -> None:
    tree = ast.parse(printed("pytorch", strategy, training).text)
    bound = {"model", "lr", "batch", "int"}
    imports = [alias for node in ast.walk(tree) for alias in getattr(node, "names", [])]
    bound |= {alias.asname or alias.name.split(".")[0] for alias in imports}
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    assert {n.id for n in names} <= bound


@pytest.mark.parametrize("training", ["full", "fp32", "fp16", "lora", "offload"])
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED, *STAGES])
def test_accelerate_loads_the_printed_file(strategy: str, training: str, tmp_path: Path) -> None:
    args = real("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    file.write_text(printed("accelerate", strategy, training).text)
    config = args.load_config_from_file(str(file))
    assert config.num_processes == 8
    kind = {"ddp": "MULTI_GPU"}.get(strategy, "FSDP" if strategy in SHARDED else "DEEPSPEED")
    assert config.distributed_type.value == kind


@pytest.mark.parametrize("strategy", SHARDED)
def test_accelerates_plugin_is_made_from_the_printed_file(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataclasses = real("accelerate.utils.dataclasses")
    pytest.importorskip("torch")
    settings: dict[str, Any] = yaml.safe_load(printed("accelerate", strategy).text)
    # The launcher hands the settings on as variables, in capitals and with one name changed.
    for key, value in settings["fsdp_config"].items():
        name = key.upper().replace("TRANSFORMER_LAYER_CLS_TO_WRAP", "TRANSFORMER_CLS_TO_WRAP")
        monkeypatch.setenv(name, str(value))
    plugin = dataclasses.FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (strategy != "shard-grad-op")
    assert plugin.activation_checkpointing is True
    # Without a name the blocks are those that the model itself says it must not split.
    assert plugin.transformer_cls_names_to_wrap is None
    utils, library = real("accelerate.utils.fsdp_utils"), real("transformers")
    config = library.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=64)
    model = library.LlamaForCausalLM(config)
    wraps = utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [type(m).__name__ for m in model.modules() if wraps(m)] == ["LlamaDecoderLayer"]


@pytest.mark.parametrize("training", ["full", "fp32", "fp16", "8-bit", "offload"])
@pytest.mark.parametrize("strategy", ["ddp", *STAGES])
def test_deepspeed_parses_the_printed_file(
    strategy: str, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = real("deepspeed.runtime.config")
    file = tmp_path / "ds_config.json"
    file.write_text(printed("deepspeed", strategy, training).text)
    parsed = config.DeepSpeedConfig(str(file))
    assert parsed.zero_optimization_stage == (0 if strategy == "ddp" else int(strategy[-1]))
    assert parsed.train_micro_batch_size_per_gpu == 1
    if training == "offload" and strategy == "zero-3":
        assert parsed.zero_config.offload_param.device == "cpu"
    if training == "offload" and strategy != "ddp":
        assert parsed.zero_config.offload_optimizer.device == "cpu"


@pytest.mark.parametrize("training", ["full", "fp32", "8-bit", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_transformers_takes_the_printed_arguments(strategy: str, training: str, tmp_path: Path) -> None:
    library = real("transformers")
    text = printed("trainer", strategy, training).text
    assert 'output_dir="out"' in text
    names: dict[str, Any] = {}
    if training == "lora":
        real("peft")
        config = library.LlamaConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=64
        )
        names["model"] = library.LlamaForCausalLM(config)
    exec(text.replace('output_dir="out"', f'output_dir="{tmp_path}", use_cpu=True'), names)
    arguments = names["arguments"]
    assert arguments.per_device_train_batch_size == 1
    assert bool(arguments.fsdp) is (strategy in SHARDED)
    if strategy in SHARDED:
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2
        assert arguments.fsdp_plugin_args["activation_checkpointing"] is True


def test_zero_3_keeps_two_blocks_gathered() -> None:
    zero = json.loads(printed("deepspeed", "zero-3").text)["zero_optimization"]
    shape = shape_from_parameters(1_000_000_000)
    assert zero["stage3_prefetch_bucket_size"] == shape.block_parameters
    assert zero["stage3_max_live_parameters"] == shape.outside_parameters + 2 * shape.block_parameters


def test_hybrid_sharding_replicates_over_nodes() -> None:
    assert '(2, 4), mesh_dim_names=("replicate", "shard")' in printed("pytorch", "hsdp").text
    settings = yaml.safe_load(printed("accelerate", "hsdp").text)["parallelism_config"]
    assert settings == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("fp16-mixed", "float16")])
def test_the_frozen_weights_of_lora_are_in_16_bits(precision: str, dtype: str) -> None:
    shape = shape_from_parameters(1_000_000_000)
    training = Training(precision=precision, lora_rank=16, checkpointing="on")
    found = configurations(Question(shape, training, 8, 1, 80e9), "ddp")
    text = next(c.text for c in found if c.framework == "pytorch")
    assert f"model = model.to(torch.{dtype})" in text
    # Checkpointed blocks need an input with a gradient, which frozen embeddings do not give.
    assert "model.enable_input_require_grads()" in text


@pytest.mark.parametrize("training", ["full", "offload"])
def test_offload_is_asked_for_where_it_was_planned(training: str) -> None:
    offload = training == "offload"
    settings = yaml.safe_load(printed("accelerate", "full-shard", training).text)["fsdp_config"]
    assert settings["fsdp_offload_params"] is offload
    assert settings["fsdp_cpu_ram_efficient_loading"] is True
    assert ('"cpu_offload": True' in printed("trainer", "full-shard", training).text) is offload
