"""Trainings that capture themselves: ``inprocess_job.py KIND FOLDER`` with RANK and WORLD_SIZE set."""

import os
import sys

import torch
from torch import nn

import tracedoc

STEPS = 40
LONG = 200
"""Steps enough for the trace to be written meanwhile, and one more with stacks to be recorded."""
OPTIONS = {"wait": 3, "warmup": 1, "active": 3}


class Dataset(torch.utils.data.Dataset):
    def __init__(self, steps=STEPS):
        self.steps = steps

    def __len__(self):
        return 4 * self.steps

    def __getitem__(self, index):
        return {"x": torch.full((16,), float(index)), "labels": torch.tensor(index % 4)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x, labels):
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def loop(folder, *, steps=STEPS, fails=False, profiles=False, twice=False):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Net()
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world_size
        )
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Dataset(steps), batch_size=4)
    for _ in range(2 if twice else 1):
        with tracedoc.collect(folder, **OPTIONS) as capture:
            for step, batch in enumerate(loader):
                loss = model(**batch)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
                capture.step(optimizer)
                if fails and step == 6:
                    raise RuntimeError("the user's own")
                if profiles and step == 5:
                    with torch.profiler.profile() as own:
                        torch.ones(2) + 1
                    own.export_chrome_trace(f"{folder}/own.trace")
    sys.stdout.write(f"trained {step + 1}\n")
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def trainer(folder):
    import transformers

    from tracedoc.collector.inprocess import transformers_callback

    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    transformers.Trainer(
        Net(), arguments, train_dataset=Dataset(), callbacks=[transformers_callback(folder, **OPTIONS)]
    ).train()


def lightning(folder):
    import lightning.pytorch as pl

    from tracedoc.collector.inprocess import lightning_callback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning_callback(folder, **OPTIONS)],
    ).fit(Module(), torch.utils.data.DataLoader(Dataset(), batch_size=2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, target = sys.argv[1:]
    if kind in ("trainer", "lightning"):
        globals()[kind](target)
    else:
        loop(target, **({"steps": LONG} if kind == "loop" else {kind: True}))
