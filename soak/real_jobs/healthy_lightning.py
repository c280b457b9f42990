"""Lightning's DDP strategy, with nothing wrong."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))
        )

    def training_step(self, batch, number):
        (x,) = batch
        loss = self.layers(x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


torch.set_num_threads(1)
lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    use_distributed_sampler=True,
    default_root_dir=os.environ["SCRATCH"],
).fit(Regressor(), DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=32, num_workers=0))
