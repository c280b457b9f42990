"""Find where a script reads values of tensors, in one step that was recorded with Python stacks."""

from __future__ import annotations

import re
import sys
from collections import Counter

import msgspec
import numpy as np

from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import is_among

_CALL = re.compile(
    r"^<built-in (?:method|function) "
    r"(item|tolist|cpu|numpy|nonzero|is_nonzero|_cuda_synchronize|synchronize|_local_scalar_dense)\b"
)
_PLACE = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")

_LIBRARIES = frozenset({"torch", "importlib", *sys.stdlib_module_names})
"""Frames of these packages lie between the script's frame and the call."""

_NEVER = re.compile(r"^torch/(?:optim|profiler|utils/data|autograd)/")
"""Code that reads values on the host by design: an optimizer counts its steps there."""


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
    starts, ends, threads = trace.ts_ns[rows], trace.end_ns[rows], trace.thread[rows]
    for asked in np.flatnonzero(is_among(trace.name[rows], list(calls))).tolist():
        around = np.flatnonzero(
            (starts <= starts[asked]) & (ends >= ends[asked]) & (threads == threads[asked])
        )
        # The innermost began last; of frames that began together the shorter lies inside.
        order = around[np.lexsort((-ends[around], starts[around]))][::-1]
        place = _caller([trace.names[int(trace.name[rows[i]])] for i in order.tolist() if i != asked])
        if place is not None:
            file, line, function = place
            counted[file, line, function, calls[int(trace.name[rows[asked]])]] += 1
    return tuple(
        SourceLine(file, line, function, call, count)
        for (file, line, function, call), count in sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    )


def _caller(frames: list[str]) -> tuple[str, int, str] | None:
    """Return the innermost frame of the script's own code; frames run from the innermost outwards."""
    for frame in frames:
        if _NEVER.match(frame):
            return None
        match = _PLACE.match(frame)
        if match and re.split(r"[/.]", match["file"], maxsplit=1)[0] not in _LIBRARIES:
            return match["file"], int(match["line"]), match["function"]
    return None
