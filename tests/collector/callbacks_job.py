"""Trainings that log what their capture says: ``callbacks_job.py KIND FOLDER``, with trackers offline."""

import logging
import os
import sys
from pathlib import Path

import torch
from inprocess_job import Dataset, Net
from torch import nn

from tracedoc import callbacks

STEPS = 60
OPTIONS = {"wait": 3, "warmup": 1, "active": 3, "source_step": False}


def open_trackers(folder):
    import mlflow
    import wandb

    wandb.init(project="tests", dir=str(folder), mode="offline")
    mlflow.set_tracking_uri((folder / "mlflow").as_uri())
    mlflow.set_experiment("tests")
    mlflow.start_run()


def loop(folder, *, steps=STEPS):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    writers = []
    if rank == 0 and steps == STEPS:
        from torch.utils.tensorboard import SummaryWriter

        open_trackers(folder)
        writers = [SummaryWriter(str(folder / "tensorboard"))]
    with callbacks.capture(folder / "run", *writers, **OPTIONS) as capture:
        for _, batch in zip(
            range(steps), torch.utils.data.DataLoader(Dataset(STEPS), batch_size=4), strict=False
        ):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step(optimizer)


def short(folder):
    loop(folder, steps=2)


def trainer(folder):
    import transformers

    open_trackers(folder)
    trained = transformers.Trainer(
        Net(),
        transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            report_to=["wandb", "mlflow", "tensorboard"],
            max_steps=STEPS,
            per_device_train_batch_size=4,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=20,
        ),
        train_dataset=Dataset(STEPS),
        callbacks=[callbacks.transformers(folder / "run", **OPTIONS)],
    )
    trained.train()


def lightning(folder):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    loggers = [
        CSVLogger(folder / "csv"),
        TensorBoardLogger(folder / "tensorboard"),
        WandbLogger(project="tests", save_dir=str(folder), offline=True),
        MLFlowLogger("tests", tracking_uri=(folder / "mlflow").as_uri()),
    ]
    pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=loggers,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[callbacks.lightning(folder / "run", **OPTIONS)],
    ).fit(Module(), torch.utils.data.DataLoader(Dataset(STEPS), batch_size=4))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.environ.update(
        WANDB_SILENT="true",
        MLFLOW_ALLOW_FILE_STORE="true",
        GIT_PYTHON_REFRESH="quiet",
        WANDB__SERVICE_WAIT="300",
    )
    globals()[sys.argv[1]](Path(sys.argv[2]))
