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

from tests.warm_torch import REPOSITORY, start_rank, warm_torch

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


def run_alone(jobs: dict[str, tuple[list[str], int]], folder: Path, **environ: str) -> dict[str, list[Rank]]:
    """Run jobs without the collector to their ends: scripts with their arguments and a number of ranks."""
    return {name: _run_ranks(name, argv, ranks, folder, environ) for name, (argv, ranks) in jobs.items()}


def _run_ranks(name: str, argv: list[str], ranks: int, folder: Path, environ: dict[str, str]) -> list[Rank]:
    outputs = [folder / f"{name}-{rank}.out" for rank in range(ranks)]
    started = []
    for rank, output in enumerate(outputs):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONPATH": str(REPOSITORY), **environ}
        with output.open("wb") as file, open(os.devnull, "rb") as nothing:
            files = nothing.fileno(), file.fileno(), file.fileno()
            started.append(start_rank(warm_torch(), argv, {**environment(), **own}, files))
    return [Rank(rank.wait(), path.read_text()) for rank, path in zip(started, outputs, strict=True)]


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


def job(name: str, *arguments: str, ranks: int = 1, warm: bool = True) -> list[str]:
    """Return the command of a job in tests/collector/jobs."""
    return command_of(JOBS / f"{name}.py", *arguments, ranks=ranks, warm=warm)


def command_of(script: Path, *arguments: str, ranks: int = 1, warm: bool = True) -> list[str]:
    """Return the command of a job; one that is not warm imports torch itself."""
    if ranks == 1 and not warm:
        return [sys.executable, str(script), *arguments]
    address = ["--warm", warm_torch()] if warm else []
    return [sys.executable, str(JOBS / "ranks.py"), *address, str(ranks), str(script), *arguments]
