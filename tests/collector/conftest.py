"""Run small real jobs under ``tracedoc collect``, as a person would."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).resolve().parent / "jobs"


@dataclass(frozen=True)
class Collected:
    """A job that ended under the collector."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "manifest.json").read_text()))

    def rank(self, rank: int) -> dict[str, Any]:
        return dict(self.manifest()["ranks"][str(rank)])

    def steps(self, rank: int) -> list[int]:
        """Return the numbers of the ProfilerStep ranges in a rank's trace."""
        with gzip.open(self.folder / self.rank(rank)["file"]) as file:
            events = json.load(file)["traceEvents"]
        names = [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")]
        return sorted({int(name.partition("#")[2]) for name in names})


class Collect(Protocol):
    def __call__(self, *command: str, options: str = "", folder: Path | None = None) -> Collected: ...


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start(
    options: list[str], command: list[str], environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command under the collector, from a folder where only the launcher finds tracedoc."""
    return subprocess.Popen(
        [sys.executable, "-m", "tracedoc", "collect", *options, "--", *command],
        cwd=REPOSITORY,
        env={**environment(), **(environ or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Rank:
    """A rank of a job that ended: its exit code and what it printed."""

    code: int
    output: str


def run_forked(jobs: dict[str, tuple[list[str], int]], folder: Path, **environ: str) -> dict[str, list[Rank]]:
    """Run jobs to their ends: scripts with their arguments and a number of ranks. Torch is imported once."""

    def output(name: str, rank: int) -> Path:
        return folder / f"{name}-{rank}.out"

    asked = [
        [
            {
                "argv": argv,
                "environ": {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                "output": str(output(name, rank)),
            }
            for rank in range(ranks)
        ]
        for name, (argv, ranks) in jobs.items()
    ]
    done = subprocess.run(
        [sys.executable, str(JOBS.parent / "forks.py"), json.dumps(asked)],
        env={**environment(), "PYTHONPATH": str(REPOSITORY), **environ},
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=180,
    )  # fmt: skip
    return {
        name: [Rank(code, output(name, rank).read_text()) for rank, code in enumerate(codes)]
        for name, codes in zip(jobs, json.loads(done.stdout), strict=True)
    }


@pytest.fixture
def collect(tmp_path: Path) -> Collect:
    """Return a function that runs a command under the collector to its end."""

    def run(*command: str, options: str = "", folder: Path | None = None) -> Collected:
        folder = folder or tmp_path / "run"
        process = start(["-o", str(folder), *options.split()], list(command))
        try:
            stdout, stderr = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Collected(process.returncode, stdout, stderr, folder)

    return run


def job(name: str, *arguments: str, ranks: int = 1) -> list[str]:
    """Return the command of a job in tests/collector/jobs."""
    script = [str(JOBS / f"{name}.py"), *arguments]
    return (
        [sys.executable, *script]
        if ranks == 1
        else [sys.executable, str(JOBS / "ranks.py"), str(ranks), *script]
    )
