"""Small jobs of twelve kinds, each with a fault that a setting mends: ``kinds.py KIND [STEPS]``.

Started by torchrun on two processes of one machine, on CPUs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from small import timed
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BLOCKS, BATCH = 192, 6, 16


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while to read, the same in every run."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._wait_s)
        return torch.full((WIDTH,), (index * 37 % 101) / 101)


class Blocks(nn.Module):
    """Blocks one after the other; ``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def begun() -> Blocks:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
        timed()
    return Blocks()


def batches(steps: int, micro_batches: int = 1) -> Iterator[list[torch.Tensor]]:
    for _ in range(steps):
        yield [torch.randn(BATCH, WIDTH) for _ in range(micro_batches)]


def train(model: nn.Module, steps: int, micro_batches: int = 1, optimizer: object = None) -> None:
    chosen = optimizer or torch.optim.SGD(model.parameters(), 1e-3)
    for inputs in batches(steps, micro_batches):
        for x in inputs:
            model(x).square().mean().backward()
        chosen.step()  # type: ignore[attr-defined]
        chosen.zero_grad()  # type: ignore[attr-defined]


def ddp(steps: int) -> None:
    train(nn.parallel.DistributedDataParallel(begun(), bucket_cap_mb=0.02), steps)


def accumulation(steps: int) -> None:
    train(nn.parallel.DistributedDataParallel(begun()), steps, micro_batches=6)


def unused(steps: int) -> None:
    train(nn.parallel.DistributedDataParallel(begun(), find_unused_parameters=True, bucket_cap_mb=0.1), steps)


def fsdp(steps: int) -> None:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Sequential})
    model = begun()
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        device_id=torch.device("cpu"),
    )
    train(sharded, steps)


def fsdp2(steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = begun()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    train(model, steps)


def accelerate(steps: int) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    begun()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=0.02)])
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    wrapped, stepped = accelerator.prepare(model, optimizer)
    for (x,) in batches(steps):
        accelerator.backward(wrapped(x).square().mean())
        stepped.step()
        stepped.zero_grad()


def trainer(steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Blocks()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.blocks(x).square().mean()}

    class Samples(Slow):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"x": super().__getitem__(index)}

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            ddp_bucket_cap_mb=1,
        )
        torch.manual_seed(0)
        Trainer(model=Model(), args=arguments, train_dataset=Samples(0.001)).train()


def lightning(steps: int) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Blocks()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.blocks(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(bucket_cap_mb=0.02, process_group_backend="gloo"),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Slow(), BATCH))


def zero(steps: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds
    import deepspeed.comm.torch

    # Its operator for shared memory takes minutes to compile, and is not what is looked at.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ds.init_distributed("gloo")
    model = Blocks()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    for (x,) in batches(steps):
        engine.backward(engine(x).square().mean())
        engine.step()


def loader(steps: int) -> None:
    model = nn.parallel.DistributedDataParallel(begun())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step, x in enumerate(DataLoader(Slow(0.003), BATCH)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps:
            break


def collections(steps: int) -> None:
    model = nn.parallel.DistributedDataParallel(begun())
    lines = deque[list[list[int]]](maxlen=3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for (x,) in batches(steps):
        lines.append([[number] for number in range(40_000)])
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def threads(steps: int) -> None:
    model = begun()
    torch.set_num_threads(8)
    train(nn.parallel.DistributedDataParallel(model), steps)


KINDS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        *(ddp, accumulation, unused, fsdp, fsdp2, accelerate),
        *(trainer, lightning, zero, loader, collections, threads),
    )
}


if __name__ == "__main__":
    KINDS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 50)
    if distributed.is_initialized():
        distributed.destroy_process_group()
