"""Make the real CPU runs of this folder: ``python sample_traces/make_cpu_runs.py [NAME...]``.

Each is a training loop of two ranks under torchrun, on gloo, recorded with torch.profiler. Times differ
from run to run and machine to machine; counts, sizes and order do not. Needs torch (CPU build).
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUNS = ("cpu_ddp_healthy", "cpu_ddp_straggler", "cpu_ddp_slow_loader", "cpu_ddp_small_buckets", "cpu_fsdp2")
ACTIVE_STEPS = 5
BATCH = 64


def train(run: str, folder: Path) -> None:
    """Train for a few steps as one rank of ``run``, and write its trace into ``folder``."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    # Small buckets show where many small parameters are: more and narrower blocks.
    blocks, width = (8, 128) if run == "cpu_ddp_small_buckets" else (4, 256)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.widen = nn.Linear(width, 4 * width)
            self.narrow = nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            narrowed: torch.Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
            return x + narrowed

    class Samples(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if run == "cpu_ddp_slow_loader":
                time.sleep(0.001)  # one slow read a sample: 64 ms a batch
            return torch.randn(width)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(width, 10))
    if run == "cpu_fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in list(model)[:blocks]:  # type: ignore[call-overload]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        bucket_mb = 0.05 if run == "cpu_ddp_small_buckets" else 4
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batches = torch.utils.data.DataLoader(Samples(), batch_size=BATCH)
    plan = schedule(wait=2, warmup=2, active=ACTIVE_STEPS, repeat=1)

    def save(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"raw-{rank}.json"))

    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save, record_shapes=True
    ) as profiler:
        for index, batch in enumerate(batches):
            if index == 4 + ACTIVE_STEPS:
                break
            loss = model(batch).square().mean()
            if run == "cpu_ddp_straggler" and rank == 1:
                time.sleep(0.030)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()


def anonymised(document: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the trace without host, paths and ids; process and thread ids become small numbers."""
    document["traceName"] = f"rank-{rank}.json"
    document["host_name"] = "node0"
    document.pop("trace_id", None)
    events = document["traceEvents"]
    main = next(e["pid"] for e in events if e.get("name", "").startswith("ProfilerStep#"))
    numbers: dict[int, int] = {main: 1000 + 100 * rank, 0: 0}
    for event in events:
        for key in ("pid", "tid"):
            value = event.get(key)
            if isinstance(value, int):
                event[key] = numbers.setdefault(value, 1000 + 100 * rank + len(numbers) - 1)
        name = event.get("args", {}).get("name", "")
        if event.get("ph") == "M" and name.startswith("thread "):
            event["args"]["name"] = f"thread {event['tid']} ({name.partition('(')[2]}"
        elif event.get("name") == "process_name":
            event["args"]["name"] = "python3"
        elif event.get("name", "").endswith("_sort_index") and isinstance(event["pid"], int):
            event["args"]["sort_index"] = event["tid"] or event["pid"]
    return document


def make(run: str) -> None:
    """Run ``run`` under torchrun and keep its traces."""
    folder = HERE / run
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             __file__, "--train", run, scratch],
            check=True,
        )  # fmt: skip
        for rank in range(2):
            document = json.loads((Path(scratch) / f"raw-{rank}.json").read_text())
            text = json.dumps(anonymised(document, rank), separators=(",", ":"))
            packed = gzip.compress(text.encode(), 9, mtime=0)
            (folder / f"rank-{rank}.json.gz").write_bytes(packed)
            print(f"{run}/rank-{rank}.json.gz  {len(packed) / 1024:.0f} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; all unless given")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train[0], Path(arguments.train[1]))
    else:
        for each in arguments.names or RUNS:
            make(each)
