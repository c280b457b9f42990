"""A training on two gloo ranks that calls the six points of the collector itself and writes what they say.

Run as ``evidence_job.py KIND FOLDER STEPS`` with RANK and WORLD_SIZE in the environment.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from tracedoc.collector.evidence import Evidence

BLOCKS = 4


class Block(nn.Module):
    """A residual block of 64 * 256 + 256 + 256 * 64 + 64 = 33,088 parameters."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Four blocks and a head of 650: 133,002 parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(kind, net):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=1, gradient_as_bucket_view=True, find_unused_parameters=True
        )
    if kind == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in net.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        return net
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            device_id=torch.device("cpu"),
        )
    return net


def main(kind, folder, steps):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    model = wrapped(kind, Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps, 64), torch.randint(0, 10, (8 * steps,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=0, pin_memory=False)
    config = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "folder": str(folder),
        "stem": f"rank-{rank}",
    }
    facts = {}
    for step, (x, y) in enumerate(loader):
        nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            evidence = Evidence(config)
            facts |= evidence.on_start()
            facts |= evidence.on_first_step(optimizer)
        if step == 3:
            facts |= evidence.on_window_start()
        if step == 6:
            facts |= evidence.on_window_end()
        evidence.step(time.perf_counter_ns())
        if kind == "killed" and step == steps - 2:
            os.kill(os.getpid(), 9)
    facts |= evidence.on_exit()
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    if world_size > 1:
        torch.distributed.barrier()
        os._exit(0)  # nothing is asked of the teardown, in which threads of gloo may abort the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
