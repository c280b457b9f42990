"""Make a change in this process and print what the job then has: ``applied.py FOLDER KIND CHANGE``."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn

from tracedoc.collector.options import Options
from tracedoc.collector.trial.rank import Changes

folder, kind, text = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(exist_ok=True)
changes = Changes(Options(folder=str(folder), trial=True, changes=(text,)))


def alone():
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)


def ddp():
    import torch.nn.parallel.distributed as home

    changes.imported(home)
    alone()
    model = home.DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb=1)
    return {
        "cap": model.bucket_bytes_cap,
        "default": model.bucket_bytes_cap_default,
        "view": model.gradient_as_bucket_view,
        "hooks": [hook[0].__name__ for hook in model._comm_hooks],
    }


def no_sync():
    import torch.nn.parallel.distributed as home

    changes.imported(home)
    alone()
    model = home.DistributedDataParallel(nn.Linear(4, 4))
    reduced = []
    model.register_comm_hook(None, lambda state, bucket: reduced.append(1) or done(bucket))
    counts = []
    for step, micro_batches in enumerate((3, 3, 3, 2), 1):
        for _ in range(micro_batches):
            model(torch.ones(1, 4)).sum().backward()
        changes.step(step)
        counts.append(len(reduced))
    return counts


def done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def loader():
    import torch.utils.data.dataloader as home

    changes.imported(home)
    made = home.DataLoader(list(range(8)), 2)
    return [made.num_workers, made.prefetch_factor, made.batch_size]


def optimizer():
    changes.imported(torch.optim)
    return torch.optim.AdamW(nn.Linear(2, 2).parameters(), 0.5).param_groups[0]["fused"]


def fsdp2():
    import importlib

    home = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    changes.imported(home)
    alone()
    model = nn.Sequential(nn.Linear(4, 4))
    home.fully_shard(model)
    return str(home.fully_shard.state(model)._fsdp_param_groups[0].mp_policy.reduce_dtype)


def fsdp1():
    import torch.distributed.fsdp.fully_sharded_data_parallel as home

    changes.imported(home)
    alone()
    model = home.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return [model.sharding_strategy.name, model.forward_prefetch]


def compiled():
    model = nn.Linear(2, 2)
    changes.first_step()
    return model._compiled_call_impl is not None


def units():
    import importlib

    home = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    alone()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    home.fully_shard(model[1])
    home.fully_shard(model)
    changes.first_step()
    return [module._compiled_call_impl is not None for module in model.modules()]


def precision():
    changes.imported(torch)
    return torch.get_float32_matmul_precision()


def collections():
    import gc

    states = []
    for step in range(1, 5):
        changes.step(step)
        states.append(gc.isenabled())
    return states


def trainer():
    import transformers.training_args as home

    changes.imported(home)
    made = home.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    return [made.dataloader_num_workers, made.ddp_bucket_cap_mb]


def deepspeed():
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.config as home

    changes.imported(home)
    path = folder / "ds.json"
    path.write_text(
        json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 1, "overlap_comm": False}})
    )
    before = path.read_bytes()
    made = home.DeepSpeedConfig(str(path))
    return [made.zero_config.stage, made.zero_config.overlap_comm, path.read_bytes() == before]


def accelerate():
    import accelerate.commands.config.config_args as home

    changes.imported(home)
    path = folder / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nuse_cpu: true\n"
        "debug: false\nnum_processes: 1\nfsdp_config:\n  fsdp_version: 1\n"
    )
    return home.load_config_from_file(str(path)).fsdp_config


print(json.dumps({"found": globals()[kind](), "parts": sorted(path.name for path in folder.glob("*.part"))}))
if distributed.is_initialized():
    distributed.destroy_process_group()
