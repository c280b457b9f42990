"""A logger of Lightning writes all rows into its file in each step, those from before it was resumed too."""

import csv
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from small import timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(Logger):
    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = [{"step": step, **{f"mean_{place}": 0.5 for place in range(24)}} for step in range(2_000)]

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append(
            {"step": step, **{name: metrics.get(name) for name in self.rows[0] if name != "step"}}
        )
        with open(os.path.join(os.environ["SCRATCH"], "metrics.csv"), "w") as file:
            writer = csv.DictWriter(file, self.rows[0].keys())
            writer.writeheader()
            writer.writerows(self.rows)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def on_fit_start(self):
        timed()

    def training_step(self, batch, number):
        output = self.layers(batch[0])
        self.log_dict({f"mean_{place}": output[:, place].mean() for place in range(24)})
        return output.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


torch.set_num_threads(1)
pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=80,
    logger=Rows(),
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Module(), DataLoader(TensorDataset(torch.randn(40_000, 256)), 32))
