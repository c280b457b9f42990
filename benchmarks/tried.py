"""Capture jobs of twelve kinds, try their fixes, and hold what was predicted against what came of it.

    python benchmarks/tried.py [--budget 5m] [--same 3] [--into build/tried] [KIND...]

Prints a row for each fix, how many gains lay where they were predicted, and how often a change that changes
nothing (``--same`` times on the first job) was taken for a difference. Captures stay in the folder; outcomes
are added to ``outcomes.jsonl`` there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tracedoc.predicted import KEPT, SLOWER, UNDECIDED, Tried

REPOSITORY = Path(__file__).resolve().parents[1]
JOB = REPOSITORY / "soak" / "real_jobs" / "kinds.py"
KINDS = (
    *("ddp", "accumulation", "unused", "fsdp", "fsdp2", "accelerate"),
    *("trainer", "lightning", "zero", "loader", "collections", "threads"),
)
NOTHING = "TRIED_NOTHING=1"
STEPS = "200"


def tracedoc(*words: str) -> str:
    """What a command of tracedoc prints; raises RuntimeError with its error."""
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TRACEDOC_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-m", "tracedoc", *words],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    return done.stdout


def captured(kind: str, folder: Path) -> Path:
    """The capture of a kind, which is made if it is not there."""
    run = folder / kind
    if not run.exists():
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = [sys.executable, *launcher, str(JOB), kind, STEPS]
        tracedoc("collect", "-q", "-o", str(run), "--", *job)
    return run


def tried(run: Path, budget: str, *fixes: str) -> list[Tried]:
    """What came of the fixes of a run, of all that can be tried where none is named."""
    asked = fixes or ("--all",)
    record = ["--record", str(run.parent / "outcomes.jsonl")]
    found = json.loads(tracedoc("try", "-q", str(run), *asked, "--budget", budget, "-f", "json", *record))
    return msgspec.convert(found["tried"], list[Tried])


def rows(kinds: Sequence[str], folder: Path, budget: str) -> Iterator[tuple[str, Tried]]:
    """Each fix that was tried with its job; a job of which nothing comes is told."""
    for kind in kinds:
        try:
            for one in tried(captured(kind, folder), budget):
                yield kind, one
        except RuntimeError as error:
            print(f"| {kind} | {' '.join(str(error).split())} | | | | |", flush=True)


def row(kind: str, one: Tried) -> str:
    """A line of the table."""
    predicted = "{:.1f} to {:.1f}".format(*one.predicted_ms) if one.predicted_ms else ""
    gain = "{1:.1f} ({0:.1f} to {2:.1f})".format(*one.gain_ms) if one.gain_ms else ""
    steps = f"{one.before_ms:.1f} -> {one.after_ms:.1f}" if one.gain_ms else one.why
    return f"| {kind} | {one.title} | {predicted} | {gain} | {steps} | {one.verdict}; {one.training} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try and count; return 1 where less than 80 % held, or a change of nothing made a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--same", type=int, default=0)
    parser.add_argument("--into", type=Path, default=REPOSITORY / "build" / "tried")
    asked = parser.parse_args(arguments)
    asked.into.mkdir(parents=True, exist_ok=True)
    print("| job | fix | predicted, ms | realised, ms | step, ms | verdict |\n|---|---|---|---|---|---|")
    found = []
    for kind, one in rows(asked.kinds, asked.into, asked.budget):
        print(row(kind, one), flush=True)
        found.append(one)
    promised = [one for one in found if one.side and one.verdict != UNDECIDED]
    kept = sum(one.side == KEPT for one in promised)
    wrong = sum(one.verdict == SLOWER for one in found)
    print(f"{len(promised)} gains decided: {kept} as predicted, {wrong} fixes make steps longer")
    run = captured(asked.kinds[0], asked.into)
    same = [tried(run, asked.budget, NOTHING)[0].verdict for _ in range(asked.same)]
    different = [verdict for verdict in same if verdict not in ("no effect", "not decided")]
    if same:
        print(f"{len(same)} times nothing: {len(different)} taken for a difference")
    return int(kept < 0.8 * len(promised) or len(different) * 20 > len(same))


if __name__ == "__main__":
    sys.exit(main())
