"""Put HolisticTraceAnalysis' numbers beside ours, each difference with the definitions that explain it.

Both tools split the time from the first to the last GPU event. Where they define something differently, the
numbers differ; each stage here takes one definition over from HTA (0.5), so that the change from stage to
stage is what that definition is worth in this file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.errors import InputError, TracedocError, how_to_install
from tracedoc.spans import Spans
from tracedoc.timeline.activity import COMMUNICATION, COMPUTE, busiest_device, classify_gpu_events
from tracedoc.timeline.launches import link_launches
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.compact import NO_ID
from tracedoc.trace.distinct import is_among
from tracedoc.trace.kineto import read_trace

OTHER = 3
"""Busy, and neither compute nor communication: copies, and for HTA memsets and records of waiting."""

# HTA 0.5, hta/utils/utils.py: which names are communication, and which are no computation.
_COMMUNICATION = re.compile(r"^nccl.*Kernel")
_NO_COMPUTATION = re.compile(r"(^nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")


class CaptureSplit(msgspec.Struct, frozen=True):
    """One way to split a capture, in ms: compute + non_compute + idle = span."""

    span_ms: float
    compute_ms: float
    non_compute_ms: float
    idle_ms: float
    overlap_frac: float | None


class Stage(msgspec.Struct, frozen=True):
    """The split once one more definition is HTA's; ``reason`` says which, with the events it concerns."""

    reason: str
    split: CaptureSplit


def stages(trace: Trace) -> Iterator[Stage]:
    """Yield tracedoc's split, with an empty reason, and then a stage for each definition that matters here.

    Nothing is yielded for a trace without GPU events.
    """
    events = classify_gpu_events(trace, link_launches(trace))
    if not events.rows.size:
        return
    rows = events.rows
    classes = np.where(np.isin(events.classes, (COMPUTE, COMMUNICATION)), events.classes, OTHER)
    one = trace.device[rows] == busiest_device(events)
    yield Stage("", _split(trace, rows[one], classes[one]))
    if not one.all():
        reason = f"HTA counts all GPUs of a file as one: {int((~one).sum())} events more"
        yield Stage(reason, _split(trace, rows, classes))
    memsets = trace.kind[rows] == int(Kind.MEMSET)
    if memsets.any():
        classes = np.where(memsets, OTHER, classes)
        reason = f"memsets ({int(memsets.sum())}) are compute for tracedoc and memory for HTA"
        yield Stage(reason, _split(trace, rows, classes))
    theirs = _their_classes(trace)[trace.name[rows]]
    if (other := theirs != classes).any():
        classes = theirs
        name = trace.row_name(int(rows[np.flatnonzero(other)[0]]))
        reason = f"HTA classes {int(other.sum())} events differently, by names such as {name[:60]}"
        yield Stage(reason, _split(trace, rows, classes))
    waits = np.flatnonzero((trace.kind == int(Kind.SYNC)) & (trace.stream != NO_ID))
    if waits.size:
        rows = np.concatenate((rows, waits))
        classes = np.concatenate((classes, _their_classes(trace)[trace.name[waits]]))
        reason = f"HTA counts {waits.size} records of waiting (cuda_sync) as work"
        yield Stage(reason, _split(trace, rows, classes))
    kept = _launched_in_steps(trace, rows)
    if kept is not None and not kept.all():
        reason = (
            f"HTA leaves out {int((~kept).sum())} of {kept.size} GPU events: no call up to the end of the"
            " last profiler step launched them"
        )
        yield Stage(reason, _split(trace, rows[kept], classes[kept]))


def _their_classes(trace: Trace) -> npt.NDArray[np.int8]:
    """Return the class that HTA gives to each name."""
    classes = np.full(max(len(trace.names), 1), COMPUTE, dtype=np.int8)
    for index, name in enumerate(trace.names):
        if _COMMUNICATION.match(name):
            classes[index] = COMMUNICATION
        elif _NO_COMPUTATION.match(name):
            classes[index] = OTHER
    return classes


def _launched_in_steps(trace: Trace, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_] | None:
    """A mask of the GPU events that HTA keeps; ``None`` where it keeps all: the file names one step, or none.

    It keeps those whose correlation id is that of a host event that starts before the last step ends.
    """
    named = trace.named(lambda name: "ProfilerStep" in name)
    if int(named.sum()) < 2:
        return None
    host = trace.stream == NO_ID
    steps = host & named[trace.name]
    if not steps.any():
        return None
    end_ns = int(trace.end_ns[steps].max())
    ids = trace.correlation[host & (trace.ts_ns <= end_ns)]
    return np.asarray(is_among(trace.correlation[rows], np.unique(ids)))


def _split(trace: Trace, rows: npt.NDArray[np.intp], classes: npt.NDArray[np.generic]) -> CaptureSplit:
    if not rows.size:
        return CaptureSplit(0.0, 0.0, 0.0, 0.0, None)
    starts, ends = trace.ts_ns[rows], trace.end_ns[rows]
    compute, comm = (Spans.of(starts[classes == c], ends[classes == c]) for c in (COMPUTE, COMMUNICATION))
    span = int(ends.max() - starts.min())
    busy = Spans.of(starts, ends).total_ns
    hidden = comm.total_ns - (comm - compute).total_ns
    return CaptureSplit(
        span / 1e6,
        compute.total_ns / 1e6,
        (busy - compute.total_ns) / 1e6,
        (span - busy) / 1e6,
        hidden / comm.total_ns if comm.total_ns else None,
    )


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
