"""Fixtures that ask tracedoc and the tools it is compared with about the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[[str, Path], dict[str, Any]]
SECONDS = 300


def _peer(repository: Path, name: str) -> Ask:
    environment = repository / f".venv-{name}"
    if not (environment / "ready").exists():
        pytest.skip(f"{name} is not installed in {environment.name} (make peers)")

    def ask(question: str, path: Path) -> dict[str, Any]:
        script = Path(__file__).with_name("ask_peer.py")
        done = subprocess.run(
            [str(environment / "bin" / "python"), str(script), question, str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return ask


@pytest.fixture(scope="session")
def hta(repository: Path) -> Ask:
    """Ask HolisticTraceAnalysis 0.5.0."""
    return _peer(repository, "hta")


@pytest.fixture(scope="session", params=["hta", "traceinsight"])
def either_peer(repository: Path, request: pytest.FixtureRequest) -> Ask:
    """Ask HolisticTraceAnalysis 0.5.0, then its successor traceinsight 0.6.1."""
    return _peer(repository, request.param)


@pytest.fixture(scope="session")
def diagnosis_of(repository: Path) -> Callable[[Path], dict[str, Any]]:
    """Return the diagnosis of a path as parsed JSON, from the command line like a user's."""

    def diagnose(path: Path) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tracedoc", "diagnose", str(path), "-f", "json"],
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr
        diagnosis: dict[str, Any] = json.loads(done.stdout)
        return diagnosis

    return diagnose
