"""One step that a rank recorded with Python stacks: where its host is, and who asks for values."""

from __future__ import annotations

import msgspec

from tracedoc.timeline.own_code import CodePlace, places_of_source_step
from tracedoc.timeline.source_lines import SourceLine, asking_lines
from tracedoc.trace.kineto import read_trace


class SourceStep(msgspec.Struct, frozen=True):
    """What the step with stacks of one rank shows.

    ``asking`` are the functions of the script that read values of tensors, most calls first; ``code`` is
    where the host spends time outside operators, most time first.
    """

    asking: tuple[SourceLine, ...] = ()
    code: tuple[CodePlace, ...] = ()


def read_source_step(path: str) -> SourceStep:
    """Return what the file of a step with stacks shows; raises :class:`InputError` where it is no trace."""
    trace = read_trace(path, python_functions=True)
    return SourceStep(asking_lines(trace), places_of_source_step(trace))
