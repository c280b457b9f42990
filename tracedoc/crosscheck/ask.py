"""Run HolisticTraceAnalysis in a process of its own, and read its answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracedoc.errors import TracedocError, how_to_install

PYTHON_VARIABLE = "TRACEDOC_HTA_PYTHON"
"""Names a Python that has HTA, where it cannot live beside tracedoc's own packages."""

SECONDS_PER_FILE = 900


class Breakdown(msgspec.Struct, frozen=True):
    """HTA's temporal breakdown of one file and its overlap ratio; ``error`` where it has none."""

    span_ms: float = 0.0
    compute_ms: float = 0.0
    non_compute_ms: float = 0.0
    idle_ms: float = 0.0
    overlap_frac: float | None = None
    error: str = ""


def ask_hta(paths: Sequence[str]) -> tuple[str, list[Breakdown]]:
    """Return HTA's version and its answer for each file.

    Raises :class:`TracedocError` where HTA is not installed or cannot be run.
    """
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    if shutil.which(python) is None:
        raise TracedocError(f"{PYTHON_VARIABLE} names no program: {python}", "name a Python that has HTA")
    script = Path(__file__).with_name("hta_side.py")
    try:
        done = subprocess.run(
            [python, str(script), *paths],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=SECONDS_PER_FILE * max(len(paths), 1),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TracedocError(f"HolisticTraceAnalysis cannot be run: {error}", "check a single file") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    head = json.loads(lines[0]) if lines else {"missing": done.stderr.strip().rpartition("\n")[2]}
    if len(lines) > 1 and "missing" in lines[1]:
        head = json.loads(lines[1])
    if "version" not in head:
        raise TracedocError(
            f"HolisticTraceAnalysis is not installed: {head.get('missing') or 'no answer'}",
            f"{how_to_install('hta')}, or name a Python that has it in {PYTHON_VARIABLE}",
        )
    answers = [msgspec.json.decode(line, type=Breakdown) for line in lines[1:]]
    missing = len(paths) - len(answers)
    ended = Breakdown(error=f"the process of HTA ended with exit code {done.returncode}")
    return str(head["version"]), [*answers, *[ended] * missing]
