"""Find where a script reads values of tensors, in one step that was recorded with Python stacks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.trace.columns import Kind, Trace

_CALL = re.compile(
    r"^<built-in (?:method|function) "
    r"(item|tolist|cpu|numpy|nonzero|is_nonzero|_cuda_synchronize|synchronize|_local_scalar_dense)\b"
)
_PLACE = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")

_LIBRARIES = frozenset({"torch", "importlib", *sys.stdlib_module_names})
"""Frames of these packages lie between the script's frame and the call."""

_NEVER = re.compile(r"^torch/(?:optim|profiler|utils/data|autograd)/")
"""Code that reads values on the host by design: an optimizer counts its steps there."""


_DEEPEST = 1000
"""Python's own limit of frames on a stack."""


class SourceLine(msgspec.Struct, frozen=True):
    """A function of the script that reads values of tensors, and how often a step.

    ``line`` is where the function begins: stacks do not hold the line of the call. ``call`` is what it calls,
    as ``item``.
    """

    file: str
    line: int
    function: str
    call: str
    calls: int


def asking_lines(trace: Trace) -> tuple[SourceLine, ...]:
    """Return the functions that read values of tensors or synchronise, most calls first.

    The trace must have been read with ``python_functions=True``. Whether the tensor was on a device is not in
    it: on a CPU, or for a tensor there, such a call waits for nothing.
    """
    rows = np.flatnonzero(trace.kind == int(Kind.PYTHON))
    calls = {i: match[1] for i, name in enumerate(trace.names) if (match := _CALL.match(name))}
    counted: Counter[tuple[str, int, str, str]] = Counter()
    for name, around in _calls_with_stacks(trace, rows, calls):
        place = _caller(trace.names[frame] for frame in around)
        if place is not None:
            file, line, function = place
            counted[file, line, function, calls[name]] += 1
    return tuple(
        SourceLine(file, line, function, call, count)
        for (file, line, function, call), count in sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    )


def _calls_with_stacks(
    trace: Trace, rows: npt.NDArray[np.intp], calls: Container[int]
) -> Iterator[tuple[int, Iterator[int]]]:
    """Yield the name of each call, and those of the frames around it from the innermost outwards."""
    starts, ends, threads = trace.ts_ns[rows], trace.end_ns[rows], trace.thread[rows]
    # Of frames that began together the longer lies outside.
    order = np.lexsort((-ends, starts, threads))
    frames: list[tuple[int, int]] = []
    thread_now = -1
    columns = (trace.name[rows[order]], ends[order], threads[order])
    for name, end, thread in zip(*(column.tolist() for column in columns), strict=True):
        if thread != thread_now:
            frames.clear()
            thread_now = thread
        while frames and frames[-1][1] < end:
            frames.pop()
        if name in calls:
            yield name, (frame for frame, _ in islice(reversed(frames), _DEEPEST))
        frames.append((name, end))


def _caller(frames: Iterable[str]) -> tuple[str, int, str] | None:
    """Return the innermost frame of the script's own code; frames run from the innermost outwards."""
    for frame in frames:
        if _NEVER.match(frame):
            return None
        match = _PLACE.match(frame)
        if match and re.split(r"[/.]", match["file"], maxsplit=1)[0] not in _LIBRARIES:
            return match["file"], int(match["line"]), match["function"]
    return None
