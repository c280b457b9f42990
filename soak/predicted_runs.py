"""Predict fixes of real jobs from their captures, apply them, and measure what they give.

    python soak/predicted_runs.py [--repetitions 3] [--into build/predicted]

Each repetition captures every job and runs it twice more without the collector: as it is, and with the first
fix of its finding applied. What the two steps differ by is the gain. Captures and times stay in the folder:
what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import tracedoc
from tracedoc.diagnosis import Finding, Fix
from tracedoc.pipeline import Options

HERE = Path(__file__).resolve().parent
ACTIVE_STEPS = 20
STEPS_TO_SETTLE = 10
STEPS_AT_ONCE = 5
"""A step is the median of means of so many: loader workers hand over several batches at once."""

CLOSE = 0.3
"""A predicted gain, as a share of the captured step, is close within this share of the real one."""


@dataclass(frozen=True)
class Mended:
    """A kind of job, the rule that finds its fault, the title of its first fix, and the kind it becomes."""

    kind: str
    rule: str
    title: str
    becomes: str


MENDED = (
    Mended("loader-0", "input-stall", "Load batches in worker processes", "advised-loader"),
    Mended("small-buckets", "small-gradient-buckets", "Remove bucket_cap_mb from DDP", "advised-buckets"),
    Mended("straggler", "cpu-straggler", "Take that code out of the step, or run it less often", "healthy"),
    Mended("sync", "reduction-every-micro-batch", "Reduce with the last micro-batch only", "no-sync"),
)


@dataclass(frozen=True)
class Gain:
    """What a fix was predicted to give, low to high (none: no prediction), and gave; of steps in ms.

    A profiler makes steps longer, and so the gain: they are held against each other as shares of their steps.
    """

    predicted_ms: tuple[float, float, float] | None
    captured_ms: float
    before_ms: float
    after_ms: float

    @property
    def real_ms(self) -> float:
        """Return what the fix gave."""
        return self.before_ms - self.after_ms

    @property
    def shares(self) -> tuple[float, float]:
        """Return the predicted and the real gain as shares of the captured and of the real step."""
        predicted = self.predicted_ms[1] if self.predicted_ms else 0.0
        return predicted / self.captured_ms, self.real_ms / self.before_ms

    @property
    def right(self) -> bool:
        """Return whether the step was predicted to change in the direction in which it did."""
        return self.predicted_ms is not None and (self.predicted_ms[1] > 0) == (self.real_ms > 0)

    @property
    def close(self) -> bool:
        """Return whether the likely gain is close to the real one."""
        predicted, real = self.shares
        return self.right and abs(predicted - real) <= CLOSE * abs(real)


def run(command: Sequence[str]) -> None:
    """Run a command quietly; raises RuntimeError with what it said if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def job(kind: str, *options: str) -> list[str]:
    """Return the command that trains a kind of job in two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(HERE / "compared_job.py"), kind, *options]


def captured(kind: str, number: int, folder: Path) -> Path:
    """Return a capture of a job, made if it is not there."""
    kept = folder / f"{kind}-{number}"
    if not kept.exists():
        fresh = folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        options = ["-o", str(fresh), "--active", str(ACTIVE_STEPS)]
        run([sys.executable, "-m", "tracedoc", "collect", *options, "--", *job(kind)])
        fresh.rename(kept)
    return kept


def step_ms(kind: str, number: int, folder: Path, *options: str) -> float:
    """Return the step of a job without a profiler, measured if it is not there."""
    kept = folder / f"{kind}-{number}.times.json"
    if not kept.exists():
        run(job(kind, "--times", str(kept), *options))
    ended = json.loads(kept.read_text())[STEPS_TO_SETTLE:]
    steps = [(after - before) / 1e6 for before, after in pairwise(ended)]
    whole = len(steps) - len(steps) % STEPS_AT_ONCE
    return median(mean(steps[at : at + STEPS_AT_ONCE]) for at in range(0, whole, STEPS_AT_ONCE))


def first_fix(findings: Sequence[Finding], rule: str) -> Fix | None:
    """Return the first fix of a rule's finding, ``None`` where there is no finding."""
    return next((one.fixes[0] for one in findings if one.rule_id == rule and one.fixes), None)


def tried(mended: Mended, number: int, folder: Path) -> Gain:
    """Return what one repetition predicted and measured; raises RuntimeError if another fix comes first."""
    before = step_ms(mended.kind, number, folder)
    diagnosis = tracedoc.diagnose([captured(mended.kind, number, folder)], Options(jobs=1))
    fix = first_fix(diagnosis.findings, mended.rule)
    if fix is None or not fix.title.startswith(mended.title):
        raise RuntimeError(f"the first fix is {fix.title!r}" if fix else f"no finding of {mended.rule}")
    workers = re.search(r"num_workers=(\d+)", fix.change)
    options = ("--workers", workers[1]) if workers else ()
    after = step_ms(mended.becomes, number, folder, *options)
    predicted = fix.predicted.gain_ms if fix.predicted else None
    return Gain(predicted, diagnosis.replay.step_ms or 0.0, before, after)


def rows(mended: Mended, repetitions: int, folder: Path) -> Iterator[tuple[str, Gain | None]]:
    """Yield a row of the table for each repetition, and what it holds."""
    for number in range(repetitions):
        try:
            gain = tried(mended, number, folder)
        except RuntimeError as error:
            yield f"| {mended.kind} | {number + 1} | {error} | | | | | |", None
            continue
        low, likely, high = gain.predicted_ms or (0.0, 0.0, 0.0)
        predicted = f"{likely:.0f} ms ({low:.0f} to {high:.0f}) of {gain.captured_ms:.0f}"
        real = f"{gain.real_ms:.0f} ms | {gain.before_ms:.0f} -> {gain.after_ms:.0f} ms"
        shares = " | ".join(f"{share:.0%}" for share in gain.shares)
        word = "close" if gain.close else "direction right" if gain.right else "wrong"
        told = f"{predicted if gain.predicted_ms else 'none'} | {real} | {shares} | {word}"
        yield f"| {mended.kind} | {number + 1} | {told} |", gain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, predict and measure; return how many directions are wrong, and one more if few gains are close."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "predicted")
    asked = parser.parse_args(arguments)
    asked.into.mkdir(parents=True, exist_ok=True)
    print("| job | | predicted gain | real gain | steps without a profiler | predicted | real | |")
    print("|---|---|---|---|---|---|---|---|")
    gains = []
    for mended in MENDED:
        for row, gain in rows(mended, asked.repetitions, asked.into):
            print(row, flush=True)
            gains.append(gain)
    right, close = (sum(getattr(one, name) for one in gains if one) for name in ("right", "close"))
    print(f"{len(gains)} predictions: {right} in the right direction, {close} within {CLOSE:.0%} of the gain")
    return len(gains) - right + (2 * close <= len(gains))


if __name__ == "__main__":
    sys.exit(main())
