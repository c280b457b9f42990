"""Find the functions of the script whose operators training does not need, in a step with Python frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.lags import CPU_IDLE_NS
from tracedoc.timeline.script_code import COLLECTOR, FRAME, CodePlace, owners_of
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace

MOST = 0.5
"""Of functions that call each other the innermost is named that has so much of the outermost one's operators.
"""

_MODULE, _FORWARD, _BACKWARD, _OPTIMIZER = "nn.Module: ", "forward", "backward", "Optimizer."
_NODE = "autograd::engine::evaluate_function"
_AGAIN = "torch/utils/checkpoint.py"
_MESSAGES = ("c10d::", "_c10d_functional::", "gloo:")


class BesideTraining(msgspec.Struct, frozen=True):
    """A function in which operators run beside training, and its shares of their time in a step.

    ``forward_frac`` and ``backward_frac`` are of the time in which the thread is at operators, outside and
    inside backward passes, without the optimizer and the data loader.
    """

    place: CodePlace
    forward_frac: float
    backward_frac: float


LOOP, DOOR, MODEL, NODE, APART = range(5)
"""Where code runs: in the training loop, called by a module itself, in the model, called by a backward node,
or in the optimizer, the data loader or the collector."""


class _Running:
    """A frame, range or operator that runs: ``place`` is the function of the script that it is.

    It ``trains`` if it calls the model or its backward pass, or sends messages. ``hooks`` are operators that
    a module calls before it is known to have a ``forward``, which is not ``started`` then.
    """

    __slots__ = ("end", "hooks", "is_module", "is_operator", "place", "start", "started", "trains", "where")

    def __init__(self, start: int, end: int, where: int) -> None:
        self.start, self.end, self.where = start, end, where
        self.place: CodePlace | None = None
        self.is_operator = self.is_module = self.trains = self.started = False
        self.hooks: list[_Called] = []

    @property
    def called(self) -> list[_Called]:
        """Its hooks; what a module without a ``forward`` calls is its ``forward``."""
        return self.hooks if self.started else []


_Called = tuple[Sequence[_Running], int]
"""The functions of the script around an operator, the outermost first, and the ns it takes."""


def beside_training(trace: Trace, step: int) -> tuple[BesideTraining, ...]:
    """The functions that the loop and hooks call, or the innermost ones that take most of these.

    A function belongs to training if it calls the model, its backward pass or an optimizer, or if the
    ``forward`` or ``backward`` of the model calls it. What hooks of modules and gradients call is beside it.
    One that lets ranks meet is neither: its time goes with its messages.
    """
    rows = trace.rows(Kind.PYTHON, Kind.ANNOTATION, Kind.CPU_OP)
    calls = trace.named(lambda name: name.startswith("<"))  # of C code, which tell nothing here
    rows = rows[(trace.thread[rows] == trace.thread[step]) & ~calls[trace.name[rows]]]
    rows = rows[trace.end_ns[rows] > trace.ts_ns[step]]
    rows = rows[np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows]))]
    owners = owners_of(trace, rows[trace.kind[rows] != int(Kind.CPU_OP)])
    found: list[_Called] = []
    stack = [_Running(0, np.iinfo(np.int64).max, LOOP)]
    columns = (trace.name, trace.kind, trace.ts_ns, trace.end_ns)
    for name, kind, start, end in zip(*(one[rows].tolist() for one in columns), strict=True):
        while stack[-1].end <= start:
            found += stack.pop().called
        around = stack[-1]
        running = _Running(start, min(end, around.end), around.where)
        if kind == int(Kind.CPU_OP):
            running.is_operator = True
            if trace.names[name].startswith(_MESSAGES):
                _mark(stack)
            elif trace.names[name].startswith(_NODE):
                _mark(stack)
                running.where = NODE
            elif not around.is_operator:
                _note(stack, end - start, found)
        else:
            _enter(running, stack, trace.names[name], owners[name], is_range=kind == int(Kind.ANNOTATION))
        stack.append(running)
    for running in stack:
        found += running.called
    return tuple(_named(trace, rows, found))


def _enter(
    running: _Running, stack: Sequence[_Running], name: str, owner: CodePlace | str, *, is_range: bool
) -> None:
    """Say where a frame or range runs inside others, and which function of the script it is."""
    match = FRAME.match(name)
    file, function = (match["file"], match["function"]) if match else ("", "")
    if name.startswith(_MODULE):
        _mark(stack)
        running.where, running.is_module = DOOR, True
    elif is_range and name.startswith(_OPTIMIZER):
        _mark(stack)
        running.where = APART
    elif COLLECTOR in file or (is_range and vocabulary.data_loader(name) is not None):
        running.where = APART
    elif running.where == DOOR and function == _FORWARD:
        next(one for one in reversed(stack) if one.is_module).started = True
        running.where = MODEL
    elif running.where == NODE and (function == _BACKWARD or file.endswith(_AGAIN)):
        running.where = MODEL
    elif isinstance(owner, CodePlace) and running.where in (LOOP, DOOR, NODE):
        running.place = owner


def _mark(stack: Sequence[_Running]) -> None:
    """Note that what runs trains, out to the model or the operator that calls it."""
    for one in reversed(stack):
        if one.where == MODEL or one.is_operator:
            return
        one.trains = True


def _note(stack: Sequence[_Running], ns: int, found: list[_Called]) -> None:
    """Note an operator with the functions of the script that call it, if any do."""
    if stack[-1].where not in (LOOP, DOOR, NODE):
        return
    outside = next((one for one in reversed(stack) if one.is_module or one.is_operator), stack[0])
    chain = [one for one in stack[stack.index(outside) :] if one.place is not None]
    if chain:
        (outside.hooks if outside.is_module else found).append((chain, ns))


def _named(trace: Trace, rows: np.ndarray, found: Sequence[_Called]) -> Iterator[BesideTraining]:
    """The functions by the operators that they call, and their shares of the time at operators."""
    chains: dict[CodePlace, list[_Called]] = defaultdict(list)
    for around, ns in found:
        inner = max((place for place, one in enumerate(around) if one.trains), default=-1)
        chain = around[inner + 1 :]
        if chain and (place := chain[0].place) is not None:
            chains[place].append((chain, ns))
    backward, others = _at_operators(trace, rows) if chains else (Spans.empty(), Spans.empty())
    for place, called in chains.items():
        least = MOST * sum(ns for _, ns in called)
        mine, deeper, depth = called, called, 0
        while sum(ns for _, ns in deeper) >= least:
            mine, depth = deeper, depth + 1
            by_place: dict[CodePlace, list[_Called]] = defaultdict(list)
            for chain, ns in mine:
                if len(chain) > depth and (one := chain[depth].place) is not None:
                    by_place[one].append((chain, ns))
            deeper = max(by_place.values(), key=lambda some: sum(ns for _, ns in some), default=[])
        inside = Spans.from_pairs({(one.start, one.end) for one in (chain[depth - 1] for chain, _ in mine)})
        shares = [(inside & spans).total_ns / max(spans.total_ns, 1) for spans in (others, backward)]
        place = mine[0][0][depth - 1].place or place
        yield BesideTraining(msgspec.structs.replace(place, time_ns=inside.total_ns), *shares)


def _at_operators(trace: Trace, rows: np.ndarray) -> tuple[Spans, Spans]:
    """When the thread is at operators, inside and outside backward passes; short times between them count."""
    operators = rows[trace.kind[rows] == int(Kind.CPU_OP)]
    busy = Spans.of(trace.ts_ns[operators], trace.end_ns[operators])
    gaps = busy.complement(int(busy.starts[0]), int(busy.ends[-1]))
    busy = busy | (gaps - gaps.at_least(CPU_IDLE_NS))
    nodes = operators[trace.named(lambda name: name.startswith(_NODE))[trace.name[operators]]]
    backward = Spans.of(trace.ts_ns[nodes], trace.end_ns[nodes])
    apart = trace.named(lambda name: name.startswith(_OPTIMIZER) or vocabulary.data_loader(name) is not None)
    ranges = rows[apart[trace.name[rows]] & (trace.kind[rows] == int(Kind.ANNOTATION))]
    busy = busy - Spans.of(trace.ts_ns[ranges], trace.end_ns[ranges])
    return busy & backward, busy - backward
