"""Hold that a diagnosis is made without the packages that take long to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "pandas", "matplotlib", "hta", "dask", "distributed", "mpi4py", "fsspec"}
DIAGNOSE = """
import json, sys
from tracedoc.cli import main
try:
    main(sys.argv[1:], standalone_mode=False)
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def modules_after(repository: Path, *arguments: str) -> set[str]:
    """Return the top-level packages that are imported once the command is done."""
    done = subprocess.run(
        [sys.executable, "-c", DIAGNOSE, *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_diagnose_imports_nothing_heavy(repository: Path, sample_traces: Path, tmp_path: Path) -> None:
    run = sample_traces / "synthetic_ddp_tiny_batch"
    page = tmp_path / "report.html"
    imported = modules_after(repository, "diagnose", str(run), "-o", str(page))
    assert page.stat().st_size > 0
    assert imported & HEAVY == set()


def test_help_imports_neither_numpy_nor_anything_heavy(repository: Path) -> None:
    imported = modules_after(repository, "--help")
    assert imported & (HEAVY | {"numpy", "jinja2", "isal"}) == set()


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
    assert "tracedoc.timeline.build" in imported
    of_driver = (
        "tracedoc.ranks",
        "tracedoc.facts.per_run",
        "tracedoc.whatif",
        "tracedoc.rules",
        "tracedoc.report",
    )
    assert [name for name in imported if name.startswith(of_driver)] == []
