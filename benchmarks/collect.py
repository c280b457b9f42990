"""Measure what ``tracedoc collect`` costs a job: outside the captured steps, and by the step with stacks.

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

from tracedoc.run.steplog import STEP, WINDOW, read_step_log

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
wall, processor = [], []
for number in range(warm + steps):
    began, used = time.perf_counter_ns(), time.thread_time_ns()
    if depth:
        optimizer.zero_grad()
        model(batch).sum().backward()
    optimizer.step()
    if number >= warm:
        wall.append(time.perf_counter_ns() - began)
        processor.append(time.thread_time_ns() - used)
print(sorted(wall)[steps // 4], sorted(processor)[steps // 4])
"""
"""A training that tells the lower quartile of the wall and processor times of its last steps, in nanoseconds.

The lower quartile, because what disturbs a step from outside only ever makes it longer.
"""

SIZES = {
    "`optimizer.step()` on one number": (1, 0, 300, 10000),
    "small model": (64, 4, 300, 3000),
    "larger model": (256, 8, 60, 400),
}
"""Width, depth, steps before the measured ones (the capture is among them), and measured steps."""

WAYS = {"no": None, "hook only": ["--ranks", "99"], "after its capture": []}


RANKS_JOB = """
import json, os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
width, depth, floats = map(int, sys.argv[1:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
batch = torch.randn(256, width)
for number in range(150):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    if floats and dist.get_rank() == 1:
        with open(os.devnull, "w") as file:
            json.dump([number / 3.0] * floats, file)
dist.destroy_process_group()
"""
"""A training on two ranks; the second one may write JSON in every step."""

RANKS_SIZES = {"larger model": (256, 8, 0), "the same, and rank 1 writes JSON": (256, 8, 25600)}
"""Width, depth, and numbers that rank 1 writes."""


def stacks_cost(size: tuple[int, ...]) -> tuple[float, float, float]:
    """Return the usual step and what the step with stacks costs, in ms, and the largest file in MB.

    It costs what it and the next steps together are longer than usual, on the rank where that is most.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder, "job.py"), Path(folder, "run")
        script.write_text(RANKS_JOB)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [sys.executable, "-m", "tracedoc", "collect", "-o", str(run), "--", *launch, str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, *map(str, size)], cwd=HERE.parent, env=environment, capture_output=True, check=True
        )
        usual, more = [], []
        files = sorted(run.glob("*.source.gz"))
        for path in files:
            log = read_step_log(run / path.name.replace(".source.gz", ".steps"))
            assert log is not None
            begins = [end for number, end, _ in log.of_kind(WINDOW) if number == 0]
            lengths = [length / 1e6 for _, end, length in log.of_kind(STEP) if end > begins[-1] + 1_000_000]
            usual.append(statistics.median(lengths[LATER_STEPS:]))
            more.append(sum(lengths[:LATER_STEPS]) - LATER_STEPS * usual[-1])
        return max(usual), max(more), max(path.stat().st_size for path in files) / 1e6


def stacks_table(rounds: int) -> str:
    """Return the table of what the step with stacks costs two ranks that record it, as medians."""
    lines = ["| two ranks | usual step | the step with stacks takes more (least to most) | largest file |"]
    lines.append("|---|---|---|---|")
    for name, size in RANKS_SIZES.items():
        usual, more, file_mb = zip(*(stacks_cost(size) for _ in range(rounds)), strict=True)
        spread = f"{statistics.median(more):.0f} ms ({min(more):.0f} to {max(more):.0f})"
        lines.append(f"| {name} | {statistics.median(usual):.1f} ms | {spread} | {max(file_mb):.2f} MB |")
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
    result = f"Medians of {rounds} rounds in turns.\n\n{table(rounds)}\n{stacks_table(rounds)}"
    print(result)
    if chosen.write:
        readme = HERE / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(RESULTS.sub(lambda match: match[1] + result + match[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
