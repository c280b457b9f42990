"""Train with the configurations that are printed, as they are: on CPUs, with two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.planner.ranks_of_a_job import run_as_ranks
from tracedoc.planner.configurations import Configuration, configurations
from tracedoc.planner.families import read_model_config
from tracedoc.planner.setup import Question, Training
from tracedoc.planner.shape import ModelShape

for _needed in ("torch", "transformers", "accelerate"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"{_needed} is not installed (make loaders)", allow_module_level=True)

pytestmark = pytest.mark.soak

WORLD = 2
HAS_PEFT = importlib.util.find_spec("peft") is not None
HALF = Training(precision="bf16")
CASES: dict[str, tuple[str, Training]] = {
    "ddp": ("ddp", Training(checkpointing="on")),
    "ddp in bf16": ("ddp", HALF),
    "ddp, selective": ("ddp", Training(checkpointing="selective")),
    "ddp, momentum": ("ddp", Training(precision="fp32", optimizer="sgd-momentum")),
    "ddp, Muon": ("ddp", Training(precision="fp32", optimizer="muon")),
    "ddp, Adafactor": ("ddp", Training(precision="fp32", optimizer="adafactor")),
    "ZeRO-1 optimizer": ("zero-redundancy", Training(precision="fp32")),
    "ZeRO-1 optimizer, momentum": ("zero-redundancy", Training(optimizer="sgd-momentum")),
    "FSDP2": ("full-shard", Training(checkpointing="on")),
    "FSDP2, selective": ("full-shard", Training(checkpointing="selective")),
    "FSDP2, kept gathered": ("shard-grad-op", Training()),
    "FSDP2, offloaded": ("full-shard", Training(offload="all")),
    "FSDP2 in bf16": ("full-shard", HALF),
    "FSDP2, optimizer in backward": ("full-shard", Training(optimizer_in_backward=True)),
}
ADAPTERS: dict[str, tuple[str, Training]] = {
    "LoRA": ("ddp", Training(lora_rank=4, checkpointing="on")),
    "LoRA on all": ("ddp", Training(lora_rank=4, lora_targets=("all-linear",))),
    "LoRA sharded": ("full-shard", Training(lora_rank=4, checkpointing="on")),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """The shape of the small Llama that ``run_printed.py`` trains."""
    keys = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    }  # fmt: skip
    file = tmp_path_factory.mktemp("llama") / "config.json"
    file.write_text(json.dumps(keys))
    return read_model_config(file)


def printed(model: ModelShape, strategy: str, training: Training) -> tuple[Configuration, ...]:
    return configurations(Question(model, training, WORLD, 1, 80e9), strategy)


@pytest.fixture(scope="module")
def trained(llama: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each case; all in one run, as importing takes longest."""
    cases = CASES | (ADAPTERS if HAS_PEFT else {})
    asked = {}
    for name, (strategy, training) in cases.items():
        code = next(c for c in printed(llama, strategy, training) if c.framework == "pytorch")
        asked[name] = [code.text, "bfloat16" if training.precision == "bf16" else "float32"]
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    script = Path(__file__).with_name("run_printed.py")
    outputs = run_as_ranks([sys.executable, str(script), str(meeting)], json.dumps(asked), world_size=WORLD)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [*CASES, *ADAPTERS])
def test_printed_code_trains_every_parameter_that_is_to_be_trained(
    name: str, trained: dict[str, Any], llama: ModelShape
) -> None:
    if name in ADAPTERS and not HAS_PEFT:
        pytest.skip("peft is not installed (make loaders)")
    found = trained[name]
    assert "error" not in found, found["error"]
    assert found["changed"] == found["tensors"]
    _, training = (CASES | ADAPTERS)[name]
    assert found["parameters"] == Question(llama, training, WORLD, 1, 80e9).trainable


TRAIN = """
import sys
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128))
{adapters}
model = accelerator.prepare(model)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = accelerator.prepare(torch.optim.AdamW(trained, lr=0.01))
ids = torch.randint(0, 128, (2, 16))
with accelerator.autocast():
    loss = model(input_ids=ids, labels=ids).loss
accelerator.backward(loss)
optimizer.step()
sys.stdout.write(f"trained {{accelerator.num_processes}}\\n")
"""


def test_accelerate_launches_with_the_printed_file(llama: ModelShape, tmp_path: Path) -> None:
    """On CPUs Accelerate has DDP only; that its plugin reads the files of FSDP is another test."""
    training = Training(lora_rank=4 if HAS_PEFT else 0, checkpointing="on")
    texts = [c for c in printed(llama, "ddp", training) if c.framework == "accelerate"]
    settings = yaml.safe_load(texts[0].text) | {"use_cpu": True, "main_process_port": 0}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "train.py").write_text(TRAIN.format(adapters="\n".join(c.text for c in texts[1:])))
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"trained {WORLD}") == WORLD


DEEPSPEED = """
import json, os, sys
import torch, deepspeed
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
# It compiles an extension for collectives in shared memory, and waits for ever if one was killed at that.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
meeting = f"file://{os.getcwd()}/meeting"
torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
for name, (auto, plain) in json.load(sys.stdin).items():
    with open("ds_config.json", "w") as file:
        json.dump(auto, file)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=3, learning_rate=3e-4, bf16=True, use_cpu=True
    )
    config = HfTrainerDeepSpeedConfig("ds_config.json")
    config.trainer_config_process(arguments)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(torch.bfloat16)
    model.config = type("Config", (), {"hidden_size": 8})()
    config.trainer_config_finalize(arguments, model, 10)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=plain, dist_init_required=False
    )
    loss = engine(torch.ones(3, 8, dtype=torch.bfloat16)).sum()
    engine.backward(loss)
    engine.step()
    sys.stdout.write(f"stepped {name}\\n")
"""


def test_deepspeed_steps_and_the_trainer_fills_in_the_printed_file(llama: ModelShape, tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (make loaders)")
    asked = {}
    for strategy in ("zero-1", "zero-2", "zero-3"):
        texts = {c.framework: c.text for c in printed(llama, strategy, Training(micro_batch=3))}
        asked[strategy] = [json.loads(texts["trainer"]), json.loads(texts["deepspeed"])]
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED],
        input=json.dumps(asked),
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        | {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("stepped")] == [
        "stepped zero-1",
        "stepped zero-2",
        "stepped zero-3",
    ]


def test_with_offload_the_trainers_own_learning_rate_counts(llama: ModelShape) -> None:
    """Two that differ are an error of the Trainer; plain DeepSpeed takes the one in the file."""
    texts = {c.framework: c.text for c in printed(llama, "zero-3", Training(offload="all"))}
    assert "lr" not in texts["trainer"]
    assert json.loads(texts["deepspeed"])["optimizer"]["params"] == {"lr": 1e-4}
