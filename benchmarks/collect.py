"""Measure what ``tracedoc collect`` costs a job: outside the captured steps, by shapes, and by stacks.

    python benchmarks/collect.py [--rounds 7] [--write]

Needs torch in the Python that runs it. ``--write`` puts the table into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tracedoc.run.steplog import BEGINS, STEP, WINDOW, StepLog, read_step_log

HERE = Path(__file__).resolve().parent
RESULTS = re.compile(r"(<!-- collect -->\n).*?(<!-- end of collect -->)", re.S)
LATER_STEPS = 12
"""So many steps from the one with stacks on are looked at: ranks may record another, and write the file."""

JOB = """
import sys, time
import torch

torch.set_num_threads(1)
width, depth, warm, steps = map(int, sys.argv[1:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])
optimizer = torch.optim.SGD(model.parameters() if depth else [torch.zeros(1, requires_grad=True)], 1e-3)
batch = torch.randn(16, width)


def train(steps):
    for _ in range(steps):
        if depth:
            optimizer.zero_grad()
            model(batch).sum().backward()
        optimizer.step()


train(warm)
wall, processor = [], []
for block in range(40):
    began, used = time.perf_counter_ns(), time.thread_time_ns()
    train(steps)
    wall.append((time.perf_counter_ns() - began) / steps)
    processor.append((time.thread_time_ns() - used) / steps)
print(sorted(wall)[10], sorted(processor)[10])
"""
"""A training that tells the lower quartile of what a step of its last 40 blocks took, in nanoseconds.

The lower quartile, because what disturbs steps from outside only ever makes them longer; of blocks of 30 ms,
because the step log is written every 10 ms.
"""

SIZES = {
    "`optimizer.step()` on one number": (1, 0, 300, 1500),
    "small model": (64, 4, 300, 75),
    "larger model": (256, 8, 60, 20),
}
"""Width, depth, steps before the measured ones (the capture is among them), and steps of a block."""

WAYS = {"no": None, "hook only": ["--ranks", "99"], "after its capture": []}


RANKS_JOB = """
import json, os, sys, threading, time
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
kind, width, depth, floats, steps = sys.argv[1], *map(int, sys.argv[2:])
layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)


class Texts(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        real = 64 + sum(number * index % 7 for number in range(4000)) % 64
        ids = torch.ones(128, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": (torch.arange(128) < real).long()}


def batches():
    if kind == "loader":
        texts = Texts()
        for batch in DataLoader(texts, 16, sampler=DistributedSampler(texts), num_workers=1):
            yield batch["attention_mask"].float().mean() * torch.ones(16, width)
    while True:
        yield torch.randn(floats and 256 or 16, width)


over = threading.Event()


def log():
    while not over.wait(0.01):
        json.dumps([number / 3.0 for number in range(2000)])


def step():
    began, used = time.perf_counter_ns(), time.process_time_ns()
    batch = next(source)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if floats and dist.get_rank() == 1:
        with open(os.devnull, "w") as file:
            json.dump([1 / 3] * floats, file)
    return time.perf_counter_ns() - began, time.process_time_ns() - used


def in_turns():
    found = {None: [], False: [], True: []}
    for _ in range(steps // 15):
        for shapes in found:
            with profile(record_shapes=shapes) if shapes is not None else nullcontext() as session:
                found[shapes] += [step() for _ in range(5)][1:]
            if shapes is not None:
                session.export_chrome_trace(f"{sys.argv[0]}.{dist.get_rank()}.json.gz")
                sizes[shapes] = os.path.getsize(f"{sys.argv[0]}.{dist.get_rank()}.json.gz") / 5
    return [sorted(one)[len(one) // 4] for times in found.values() for one in zip(*times[4:])]


if kind == "thread":
    threading.Thread(target=log, daemon=True).start()
source, sizes = batches(), {}
if kind == "shapes":
    measured = [*in_turns(), *sizes.values()]
else:
    times = [step() for _ in range(steps)][steps // 2 :]
    measured = [sorted(one)[len(one) // 4] for one in zip(*times)]
over.set()
if dist.get_rank() == 0:
    print("MEASURED", *measured, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
"""A training on two ranks that tells the lower quartiles of the second half of its steps, on rank 0, in ns.

With ``shapes`` those of steps that it profiles itself, as the hook does, in turns: plain,
captured, captured with shapes, and the bytes of a step's trace of the last two.
The second rank may write JSON in every step; a worker may make batches with masks, or a thread run beside.
"""

RANKS_KINDS = {
    "small operators": "plain",
    "a loader with a worker, and masks": "loader",
    "a thread in Python": "thread",
}
RANKS_SIZE = (128, 24, 0, 300)
"""Width, depth, no JSON, and steps."""

SHAPES_SIZES = {"small operators": (64, 24, 0, 150), "larger ones": (1024, 12, 0, 60)}

STACKS_SIZES = {"larger model": (256, 8, 1, 150), "the same, and rank 1 writes JSON": (256, 8, 25600, 150)}
"""Width, depth, numbers that rank 1 writes, and steps."""


def ranks_job(
    kind: str, size: tuple[int, ...], folder: Path, *options: str, collected: bool = True
) -> list[float]:
    """Run the job, below ``folder / "run"`` where it is collected; return what it measured, in us."""
    script, run = folder / "job.py", folder / "run"
    script.write_text(RANKS_JOB)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    collect = [sys.executable, "-m", "tracedoc", "collect", "-o", str(run), *options, "--"]
    done = subprocess.run(
        [*(collect if collected else ()), *launch, str(script), kind, *map(str, size)],
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("MEASURED"))
    return [float(number) / 1e3 for number in told.split()[1:]]


def lengths_ms(log: StepLog, what: int) -> list[float]:
    """The lengths of the steps of a log that ended after the last time that something began or ended."""
    since = [end for number, end, _ in log.of_kind(WINDOW) if number == what]
    return [length / 1e6 for _, end, length in log.of_kind(STEP) if end > since[-1] + 1_000_000]


def jobs_table(rounds: int) -> str:
    """Return the table of what a whole collection costs the steps after the capture, on two ranks."""
    lines = [
        "| two ranks | wall | collected | ratio (least to most) | processor | collected | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in RANKS_KINDS.items():
        found: list[list[float]] = []
        for _ in range(rounds):
            pair = []
            for collected in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    pair += ranks_job(kind, RANKS_SIZE, Path(folder), collected=collected)
            found.append(pair)
        columns = list(zip(*found, strict=True))
        cells = [name]
        for plain, collected_us in ((columns[0], columns[2]), (columns[1], columns[3])):
            ratios = sorted(more / bare for bare, more in zip(plain, collected_us, strict=True))
            cells += [f"{statistics.median(one) / 1e3:.2f} ms" for one in (plain, collected_us)]
            cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shapes_table(rounds: int) -> str:
    """Return the table of what captured steps take without shapes and with them, in turns, on rank 0."""
    lines = [
        "| a step of | plain | captured | with shapes | shapes cost (least to most) | trace of a step |",
        "|---|---|---|---|---|---|",
    ]
    for name, size in SHAPES_SIZES.items():
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(ranks_job("shapes", size, Path(folder), collected=False))
        columns = list(zip(*found, strict=True))
        for place, what in enumerate(("wall", "processor")):
            plain, captured, shapes = (columns[place + 2 * way] for way in range(3))
            more = sorted((b - a) / 1e3 for a, b in zip(captured, shapes, strict=True))
            times = " | ".join(f"{statistics.median(one) / 1e3:.2f} ms" for one in (plain, captured, shapes))
            cost = f"{statistics.median(more):.2f} ms ({more[0]:.2f} to {more[-1]:.2f})"
            files = " and ".join(f"{statistics.median(one):.1f}" for one in columns[6:])
            lines.append(f"| {name}, {what} | {times} | {cost} | {files} kB |")
    return "\n".join(lines) + "\n"


def stacks_table(rounds: int) -> str:
    """Return the table of what the step with Python stacks costs two ranks that record it, as medians.

    It costs what it and the next steps together are longer than usual, on the rank where that is most.
    """
    lines = ["| two ranks | usual step | the step with stacks takes more (least to most) | largest file |"]
    lines.append("|---|---|---|---|")
    for name, size in STACKS_SIZES.items():
        usual, more, files = [], [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                ranks_job("plain", size, Path(folder))
                ranks = []
                for path in sorted(Path(folder, "run").glob("*.source.gz")):
                    log = read_step_log(path.with_name(path.name.replace(".source.gz", ".steps")))
                    assert log is not None
                    lengths = lengths_ms(log, BEGINS)
                    step = statistics.median(lengths[LATER_STEPS:])
                    ranks.append((sum(lengths[:LATER_STEPS]) - LATER_STEPS * step, step))
                    files.append(path.stat().st_size / 1e6)
                usual.append(max(step for _, step in ranks))
                more.append(max(ranks)[0])
        spread = f"{statistics.median(more):.0f} ms ({min(more):.0f} to {max(more):.0f})"
        lines.append(f"| {name} | {statistics.median(usual):.1f} ms | {spread} | {max(files):.2f} MB |")
    return "\n".join(lines) + "\n"


def step_us(way: list[str] | None, size: tuple[int, ...]) -> tuple[float, float]:
    """Return wall and processor microseconds of one run's step."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(JOB)
        command = [sys.executable, str(script), *map(str, size)]
        if way is not None:
            run = ["-o", str(Path(folder, "run"))]
            command = [sys.executable, "-m", "tracedoc", "collect", *run, *way, "--", *command]
        done = subprocess.run(
            command,
            cwd=HERE.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        wall, processor = done.stdout.split()
        return float(wall) / 1e3, float(processor) / 1e3


def table(rounds: int) -> str:
    """Return the table of medians, with the ratio to the bare job and its spread over the rounds."""
    lines = [
        "| what a step is | collected | wall | processor | more | ratio of processor time (least to most) |",
        "|---|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, options in WAYS.items():
                runs[way].append(step_us(options, size))
        alone = [processor for _, processor in runs["no"]]
        for way, pairs in runs.items():
            wall = statistics.median(pair[0] for pair in pairs)
            processor = statistics.median(pair[1] for pair in pairs)
            # Each run against the bare one of its own round: the machine's mood changes slowly.
            ratios = [pair[1] / bare for pair, bare in zip(pairs, alone, strict=True)]
            more = processor - statistics.median(alone)
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            shown = "" if way == "no" else f"{more:+.1f} us | {spread}"
            lines.append(f"| {name} | {way} | {wall:.1f} us | {processor:.1f} us | {shown or ' | '} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, and keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    rounds = chosen.rounds
    tables = "\n".join(one(rounds) for one in (table, jobs_table, shapes_table, stacks_table))
    result = f"Medians of {rounds} rounds in turns.\n\n{tables}"
    print(result)
    if chosen.write:
        readme = HERE / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(RESULTS.sub(lambda match: match[1] + result + match[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
