"""Hold that a diagnosis is made without the packages that take long to import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "pandas", "matplotlib", "hta", "dask", "distributed", "mpi4py", "fsspec"}
DIAGNOSE = """
import json, sys
from tracedoc.cli import main
try:
    main(sys.argv[1:], standalone_mode=False)
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def after(repository: Path, *arguments: str) -> tuple[set[str], str]:
    """Return the top-level packages that are imported once the command is done, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSE, *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}, done.stdout


def test_diagnose_imports_nothing_heavy(repository: Path, sample_traces: Path, tmp_path: Path) -> None:
    run = sample_traces / "synthetic_ddp_tiny_batch"
    page = tmp_path / "report.html"
    imported, _ = after(repository, "diagnose", str(run), "-o", str(page))
    assert page.stat().st_size > 0
    assert imported & HEAVY == set()


COMMANDS = ["", "collect", "diagnose", "facts", "whatif", "try", "report", "plan", "explain", "rules list"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_imports_nothing_that_takes_time(repository: Path, command: str) -> None:
    imported, shown = after(repository, *command.split(), "--help")
    assert imported & (HEAVY | {"numpy", "msgspec", "yaml", "rich", "jinja2", "isal"}) == set()
    assert "Examples:" in shown


def test_a_worker_imports_nothing_of_the_run(repository: Path) -> None:
    """What is said of all ranks, and what judges it, is the driver's."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, tracedoc.worker; print(*sys.modules)"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(done.stdout.split())
    assert {"tracedoc.timeline.build", "tracedoc.topics.step.rank"} <= imported
    of_topics = [name for name in imported if re.fullmatch(r"tracedoc\.topics\.\w+\.\w+", name)]
    assert [name for name in of_topics if not name.rpartition(".")[2].startswith("rank")] == []
    of_driver = (
        "tracedoc.ranks",
        "tracedoc.whatif",
        "tracedoc.judge",
        "tracedoc.report",
    )
    assert [name for name in imported if name.startswith(of_driver)] == []
