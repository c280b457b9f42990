"""Capture pairs of real jobs whose difference is known, and hold what ``tracedoc compare`` says of them.

    python soak/compared_runs.py [--repetitions 10] [--into build/compared]

Each repetition captures every kind of job once. Each pair must change in the right direction, with the right
part of the step first; two captures of one kind must never be "improved" or "regressed". Diagnoses stay in
the folder: what is there is not captured again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tracedoc.comparison.compare import RunComparison, compare
from tracedoc.diagnosis import Diagnosis
from tracedoc.diagnosis_json import from_json

HERE = Path(__file__).resolve().parent
ACTIVE_STEPS = 20
KINDS = (
    *("alone", "healthy", "straggler", "small-buckets", "default-buckets"),
    *("loader-0", "loader-2", "sync", "no-sync"),
)
LEAST_SHARE_RIGHT = 0.9


@dataclass(frozen=True)
class Pair:
    """BASE, HEAD, whether the step gets longer, and the parts that may be the reason."""

    base: str
    head: str
    longer: bool
    parts: tuple[str, ...]


COMMUNICATION = ("transfer", "wait", "unsplit")
PAIRS = (
    Pair("alone", "healthy", True, COMMUNICATION),
    Pair("healthy", "straggler", True, ("wait",)),
    Pair("small-buckets", "default-buckets", False, COMMUNICATION),
    Pair("loader-0", "loader-2", False, ("input",)),
    Pair("sync", "no-sync", False, COMMUNICATION),
)


def capture(kind: str, number: int, folder: Path) -> None:
    """Capture one job and keep its diagnosis, unless that is there."""
    kept = folder / f"{kind}-{number}.json"
    if kept.exists():
        return
    run = folder / f"run-{kind}-{number}"
    shutil.rmtree(run, ignore_errors=True)
    processes = "1" if kind == "alone" else "2"
    ours = [sys.executable, "-m", "tracedoc"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    options = ["-o", str(run), "--active", str(ACTIVE_STEPS)]
    for command in (
        [*ours, "collect", *options, "--", *torchrun, str(HERE / "compared_job.py"), kind],
        [*ours, "diagnose", str(run), "-q", "--no-cache", "-o", str(kept)],
    ):
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            print(f"{kind} {number}: exit code {done.returncode}: {done.stderr[-2000:]}", flush=True)
            return
    shutil.rmtree(run)


def kept(kind: str, folder: Path) -> Iterator[Diagnosis]:
    """Yield the diagnoses of a kind, in the order of their numbers."""
    for path in sorted(folder.glob(f"{kind}-*.json"), key=lambda one: int(one.stem.rpartition("-")[2])):
        yield from_json(path.read_bytes())


def first_part(found: RunComparison, *, longer: bool) -> str:
    """Return the key of the part that changed most in a direction."""
    return max(found.waterfall.parts, key=lambda part: part.change_ms if longer else -part.change_ms).key


def judge(pair: Pair, folder: Path) -> bool:
    """Print how a pair was judged; return whether it was right often enough."""
    words: Counter[str] = Counter()
    firsts: Counter[str] = Counter()
    right = tried = 0
    for base, head in zip(kept(pair.base, folder), kept(pair.head, folder), strict=False):
        found = compare(base, head, scaling="weak" if pair.base == "alone" else None)
        longer = found.waterfall.measured_ms > found.waterfall.ideal_ms
        part = first_part(found, longer=pair.longer)
        right += longer == pair.longer and part in pair.parts
        words[found.verdict.word if found.verdict else "weak scaling"] += 1
        firsts[part] += 1
        tried += 1
    told = ", ".join(f"{word} {count}" for word, count in words.most_common())
    first = ", ".join(f"{part} {count}" for part, count in firsts.most_common())
    print(f"{pair.base} -> {pair.head}: {right} of {tried} right; {told}; first part: {first}", flush=True)
    wrong = "improved" if pair.longer else "regressed"
    return right >= LEAST_SHARE_RIGHT * tried and not words[wrong]


def judge_alike(folder: Path) -> bool:
    """Print how captures of one kind compare with the next one; return whether none was told apart."""
    words: Counter[str] = Counter()
    for kind in KINDS:
        captures = list(kept(kind, folder))
        for base, head in pairwise(captures):
            verdict = compare(base, head).verdict
            word = verdict.word if verdict else ""
            words[word] += 1
            if word in ("improved", "regressed"):
                print(f"  {kind}: {word}", flush=True)
    told = ", ".join(f"{word} {count}" for word, count in words.most_common())
    print(f"two captures of one job: {told}", flush=True)
    return not words["improved"] + words["regressed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture, compare, and return how many pairs were judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--into", type=Path, default=HERE.parent / "build" / "compared")
    asked = parser.parse_args(arguments)
    asked.into.mkdir(parents=True, exist_ok=True)
    for number in range(asked.repetitions):
        for kind in KINDS:
            capture(kind, number, asked.into)
    failed = sum(not judge(pair, asked.into) for pair in PAIRS)
    return failed + (not judge_alike(asked.into))


if __name__ == "__main__":
    sys.exit(main())
