"""Make the large traces that the benchmark reads: grown from a real one, or synthetic without it."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = "ddp_resnet_a100_2rank_r0/nccl_data.json.gz"
STACKS_SOURCE = "ddp_resnet_mi300_8rank_r0/resnet_act_checkpoint.json.gz"
"""A trace with Python stacks: most of its events are frames."""

STEPS = 12
"""ProfilerStep annotations in a file; HTA's time grows with events times steps, so many would be unfair."""

KERNELS_PER_STEP = 400

GROWN_RANKS = 8
"""So many ranks of a job are grown each for itself; further ones are copies that say another rank."""


def make_input(folder: Path, megabytes: int, shared: Path | None, *, stacks: bool = False) -> Path:
    """Return a trace of about ``megabytes`` (1e6 bytes) of JSON; synthetic without ``shared``.

    ``shared`` holds ``bench/make_bench_traces.py`` and ``traces``. Files that are there already are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = "stacks" if stacks else "ddp"
    path = folder / (f"synthetic_{kind}_{megabytes}.json" if shared is None else f"{kind}_{megabytes}.json")
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        if shared is None:
            write_synthetic(unfinished, megabytes, stacks=stacks)
        else:
            grow(shared, STACKS_SOURCE if stacks else SOURCE, unfinished, megabytes)
        unfinished.rename(path)
    return path


def compress(path: Path) -> Path:
    """Return the gzip twin of a file, made where it is missing."""
    packed = path.with_name(path.name + ".gz")
    if not packed.exists():
        unfinished = packed.with_suffix(".unfinished")
        with path.open("rb") as source, gzip.open(unfinished, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        unfinished.rename(packed)
    return packed


def make_ranks(folder: Path, ranks: int, megabytes: int, shared: Path | None = None) -> Path:
    """Return a folder with one trace of ``megabytes`` a rank, of one job; synthetic without ``shared``."""
    run = folder / f"{'synthetic' if shared is None else 'ddp'}_{ranks}x{megabytes}"
    run.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        path = run / f"rank-{rank}.json"
        if path.exists():
            continue
        unfinished = path.with_suffix(".unfinished")
        if shared is None:
            write_synthetic(unfinished, megabytes, rank=rank, world_size=ranks)
        elif rank >= GROWN_RANKS:
            copy_as_rank(run / f"rank-{rank % GROWN_RANKS}.json", unfinished, rank)
        else:
            grow(shared, SOURCE, unfinished, megabytes, "--rank", str(rank), "--world", str(ranks))
        unfinished.rename(path)
    return run


def copy_as_rank(source: Path, path: Path, rank: int) -> None:
    """Copy a trace; the copy says that it is of another rank."""
    with source.open("rb") as file, path.open("wb") as target:
        head = file.read(1 << 20)
        target.write(re.sub(rb'("rank": )\d+', rb"\g<1>%d" % rank, head, count=1))
        shutil.copyfileobj(file, target, 1 << 20)


def grow(shared: Path, source: str, path: Path, megabytes: int, *arguments: str) -> None:
    """Write a trace that repeats a real one until it has ``megabytes``."""
    script, real = shared / "bench" / "make_bench_traces.py", shared / "traces" / source
    options = ["--mb", str(megabytes), "--steps", str(STEPS), *arguments]
    subprocess.run(
        [sys.executable, str(script), str(real), str(path), *options], check=True, capture_output=True
    )


def write_synthetic(
    path: Path, megabytes: int, *, rank: int = 0, world_size: int = 2, stacks: bool = False
) -> None:
    """Write steps of launches and kernels, in the layout of one event a line, until the size is reached."""
    per_step = sum(len(_line(event)) for event in _step_events(0, KERNELS_PER_STEP, stacks=stacks))
    kernels = max(1, round(KERNELS_PER_STEP * megabytes * 1e6 / STEPS / per_step))
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
    }
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for step in range(STEPS):
            file.writelines(
                _line(event) for event in _step_events(step, kernels, late_us=rank % 8, stacks=stacks)
            )
        file.write(json.dumps({"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "ts": 0}) + "\n]}\n")


def _line(event: dict[str, object]) -> str:
    return json.dumps(event) + ",\n"


def _step_events(
    step: int, kernels: int, *, late_us: int = 0, stacks: bool = False
) -> list[dict[str, object]]:
    begin = step * kernels * 30.0
    events = [
        _event("user_annotation", f"ProfilerStep#{step}", (4242, 4242), begin, kernels * 30.0 - 1, {}),
        _event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", (4242, 4242), begin, 20.0, {}),
    ]
    for index in range(kernels):
        ids = {"correlation": step * kernels + index + 1, "External id": step * kernels + index + 1}
        start = begin + 30.0 * index
        comm = index % 40 == 0
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if comm else f"ampere_sgemm_{32 * (index % 9)}x64_tn"
        gpu = (0, 20 if comm else 7)
        late = late_us if comm else 0
        args = ids | {"device": 0, "stream": gpu[1], "grid": [128, 1, 1], "block": [256, 1, 1]}
        for depth in range(5 if stacks else 0):
            frame, where = f"model.py({40 + depth}): forward", {"Python id": index * 5 + depth + 1}
            events.append(_event("python_function", frame, (4242, 4242), start, 12.5, where))
        events.append(_event("cpu_op", "aten::mm", (4242, 4242), start, 12.125, ids))
        events.append(_event("cuda_runtime", "cudaLaunchKernel", (4242, 4242), start + 2, 6.25, ids))
        if comm:
            args |= {"Collective name": "allreduce", "In msg nelems": 262144, "dtype": "Float"}
        events.append(_event("kernel", name, gpu, start + 11.5 + late, 16.375 - late, args))
    return events


def _event(
    category: str, name: str, row: tuple[int, int], start: float, length: float, args: dict[str, object]
) -> dict[str, object]:
    place = {"ph": "X", "cat": category, "name": name, "pid": row[0], "tid": row[1]}
    return place | {"ts": start, "dur": length, "args": args}
