"""Hold what the first step of a script is under fake tensors, and that it has no effect on anything."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tracedoc.errors import InputError
from tracedoc.firststep.estimate import FirstStep, RefusedError, _refuse, first_step

pytest.importorskip("torch")

MODEL = """\
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x))


def model():
    return torch.nn.Sequential(*[Block() for _ in range(3)])
"""

DDP = """\
import os, pathlib, random
import torch
import torch.distributed as dist
from model import model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
os.makedirs("made/deep", exist_ok=True)
with open("made/deep/log.txt", "w") as log:
    log.write("begun")
pathlib.Path("metrics.json").write_text("{}")
torch.save({}, "checkpoint.pt")
for forbidden in (lambda: os.remove("kept.txt"), lambda: os.system("touch started.txt")):
    try:
        forbidden()
    except PermissionError:
        pass
    else:
        raise SystemExit(3)
network = DistributedDataParallel(model().cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(network.parameters(), fused=True)
batches = DataLoader(TensorDataset(torch.randn(64, 128)), batch_size=4, shuffle=True, num_workers=2)
for (x,) in batches:
    loss = network(x.to("cuda:0", non_blocking=True)).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
    pathlib.Path("after.txt").touch()
"""

FSDP = """\
import torch
import torch.distributed as dist
from model import model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
network = model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in network:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(network, mesh=mesh, mp_policy=policy)
network.forward = lambda x, blocks=list(network): [
    x := checkpoint(block, x, use_reentrant=False) for block in blocks
][-1]
network = torch.compile(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    network(torch.randn(4, 128, device="cuda")).sum().backward()
optimizer.step()
"""

TRAINER = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.randint(0, 512, (64,))
        return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2
)
settings = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, report_to=[])
Trainer(LlamaForCausalLM(config), settings, train_dataset=Data()).train()
"""


def followed(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> FirstStep:
    monkeypatch.chdir(folder)
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(text)
    (folder / "kept.txt").write_text("kept")
    return first_step("python train.py")


def test_a_step_is_counted_and_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 x 128 weights on 4 x 128 numbers of fp32, 2048 bytes: gelu keeps its input, and
    its result is the next block's input. 2 x 4 x 128 x 128 FLOPs a product: 3 forward, 3 for weights, 2 for
    inputs.
    """
    step = followed(tmp_path, DDP, monkeypatch)
    assert sorted(os.listdir(tmp_path)) == ["kept.txt", "model.py", "train.py"]
    assert (step.parameters, step.trained, step.blocks, step.block) == (3 * 128**2, 3 * 128**2, 3, "Block")
    assert (step.batch, step.whole_numbers, step.rounds) == ((4, 128), False, 1)
    assert (step.block_bytes, step.input_bytes, step.output_bytes) == (3 * 4096, 3 * 2048, 3 * 2048)
    assert (step.matmul_flops, step.attention_flops) == (8 * 2 * 4 * 128 * 128, 0)
    assert (step.optimizer, step.states, step.dtype) == ("AdamW", 2.0, "float32")
    assert step.peak_bytes == pytest.approx(peak_by_torch(tmp_path), rel=0.02)


def peak_by_torch(folder: Path) -> int:
    """Return the peak of the same step up to its update by PyTorch's own tracker of fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    spec = importlib.util.spec_from_file_location("small_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with FakeTensorMode():
        network = module.model()
        x = torch.randn(4, 128)
        tracker = MemTracker()
        tracker.track_external(network, x)
        with tracker:
            network(x).sum().backward()
    return int(next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"])


def test_what_is_checkpointed_sharded_and_compiled_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 a block gets and gives 1024 bytes, and with checkpointing keeps nothing else."""
    step = followed(tmp_path, FSDP, monkeypatch)
    assert (step.sharded, step.compiled, step.rounds, step.states) == ("bf16", True, 2, 1.0)
    assert (step.block_bytes, step.input_bytes, step.output_bytes) == (3 * 1024, 3 * 1024, 3 * 1024)


def test_the_trainer_of_transformers_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention 4 x 128^2, MLP 3 x 128 x 256, two norms; embeddings, head and a last norm."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    step = followed(tmp_path, TRAINER, monkeypatch)
    block = 4 * 128**2 + 3 * 128 * 256 + 2 * 128
    assert step.parameters == 3 * block + 2 * 512 * 128 + 128
    assert (step.block, step.block_parameters, step.path) == ("LlamaDecoderLayer", block, "model.layers")
    assert (step.batch, step.whole_numbers, step.autocast) == ((2, 64), True, "bf16")
    assert not (tmp_path / "out").exists()


def test_a_step_that_depends_on_values_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\nx = torch.randn(8)\nprint(x[x > 0])\n"
    with pytest.raises(InputError, match=r"depends on values.*\(line 3: print") as error:
        followed(tmp_path, text, monkeypatch)
    assert "--params" in error.value.hint


@pytest.mark.parametrize(
    ("event", "given"),
    [
        ("open", ("x", "w", os.O_WRONLY | os.O_CREAT)),
        ("open", ("x", None, os.O_RDWR)),
        ("os.mkdir", ("no-such-folder", 0o777, -1)),
        ("os.rename", ("a", "b", -1, -1)),
        ("subprocess.Popen", ("ls", ["ls"], None, None)),
        ("socket.connect", (None, ("10.0.0.1", 80))),
    ],
)
def test_what_has_an_effect_is_refused(event: str, given: tuple[object, ...]) -> None:
    with pytest.raises(RefusedError):
        _refuse(event, given)


@pytest.mark.parametrize(
    ("event", "given"),
    [("open", ("x", "r", os.O_RDONLY)), ("open", (os.devnull, "w", os.O_WRONLY)), ("import", ("x",))],
)
def test_what_only_reads_is_let_through(event: str, given: tuple[object, ...]) -> None:
    _refuse(event, given)


@pytest.mark.parametrize("command", ["", "train", "torchrun train.py", "no_such_script.py", "'train.py"])
def test_what_is_no_script_is_an_error_with_a_hint(command: str) -> None:
    with pytest.raises(InputError) as error:
        first_step(command)
    assert error.value.hint
