"""Put HolisticTraceAnalysis' numbers beside ours, each difference with the definitions that explain it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tracedoc.crosscheck.definitions import CaptureSplit, stages
from tracedoc.errors import InputError, TracedocError, how_to_install
from tracedoc.trace.kineto import read_trace

NUMBERS = ("span_ms", "compute_ms", "non_compute_ms", "idle_ms", "overlap_frac")

_ROUNDED_MS, _ROUNDED_SHARE, _ROUNDED_OVERLAP = 0.002, 1e-5, 1e-4
"""HTA keeps times as float64 microseconds since 1970 in some files, and rounds its percentages."""


class Reason(msgspec.Struct, frozen=True):
    """A definition that differs, and how much it adds to each number to arrive at HTA's."""

    text: str
    changes: dict[str, float]


class RankCheck(msgspec.Struct, frozen=True):
    """One rank: our split of the capture, HTA's, and the reasons for the difference.

    ``unexplained`` holds what the reasons leave over, by number; it is empty where they explain everything.
    ``error`` says why there is no comparison.
    """

    rank: int
    source: str
    ours: CaptureSplit | None
    hta: Breakdown | None
    reasons: tuple[Reason, ...] = ()
    unexplained: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""


class CrossCheck(msgspec.Struct, frozen=True):
    """All ranks beside HTA; ``hta_version`` is the version that answered."""

    hta_version: str
    ranks: tuple[RankCheck, ...]


def cross_check(sources: Sequence[tuple[int, str]]) -> CrossCheck:
    """Compare the captures of ranks, each a pair of rank and file.

    Raises :class:`InputError` for what is no local file: HTA opens files itself.
    """
    for _, source in sources:
        if not os.path.isfile(source):
            raise InputError(
                "HolisticTraceAnalysis reads local files only", "copy the traces to this machine"
            )
    version, answers = ask_hta([os.path.abspath(source) for _, source in sources])
    checks = (_check(rank, source, answer) for (rank, source), answer in zip(sources, answers, strict=True))
    return CrossCheck(version, tuple(checks))


def _check(rank: int, source: str, hta: Breakdown) -> RankCheck:
    name = os.path.basename(source)
    found = list(stages(read_trace(source)))
    if not found:
        return RankCheck(rank, name, None, None, error="no GPU activity is in this file")
    ours = found[0].split
    if hta.error:
        return RankCheck(rank, name, ours, None, error=f"HTA does not read this file: {hta.error}")
    reasons = tuple(
        Reason(after.reason, changes)
        for before, after in pairwise(found)
        if (changes := _changes(before.split, after.split))
    )
    return RankCheck(rank, name, ours, hta, reasons, _changes(found[-1].split, hta))


def _changes(before: CaptureSplit | Breakdown, after: CaptureSplit | Breakdown) -> dict[str, float]:
    """The change of each number, without those that stay the same."""
    changes = {}
    for part in NUMBERS:
        old, new = getattr(before, part), getattr(after, part)
        if old is None or new is None:
            continue
        least = _ROUNDED_OVERLAP if part == "overlap_frac" else _ROUNDED_MS + _ROUNDED_SHARE * abs(old)
        if abs(new - old) > least:
            changes[part] = new - old
    return changes


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
