"""The step that was recorded with all Python frames: what it shows of the script's functions."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans
from tracedoc.timeline.lags import CPU_IDLE_NS
from tracedoc.timeline.script_code import (
    COLLECTOR,
    COMPREHENSION,
    FRAME,
    OPAQUE,
    THROUGH,
    TOP_LEVEL,
    CodePlace,
    owners_of,
    places_in,
    when_innermost,
)
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct
from tracedoc.trace.flows import differentiated
from tracedoc.trace.kineto import read_trace

MOST = 0.5
"""Of functions that call each other the innermost is named that has so much of the outermost one's operators.
"""

_MODULE, _FORWARD, _BACKWARD, _OPTIMIZER = "nn.Module: ", "forward", "backward", "Optimizer."
_NODE = "autograd::engine::evaluate_function"
_AGAIN, _MODES = "torch/utils/checkpoint.py", "torch/nn/modules/module.py"
_MESSAGES = ("c10d::", "_c10d_functional::", "gloo:")


class BesideTraining(msgspec.Struct, frozen=True):
    """A function in which operators run beside training, and its shares of their time in a step.

    ``forward_frac`` and ``backward_frac`` are of the time in which the thread is at operators, outside and
    inside backward passes, without the optimizer and the data loader. ``operators`` are those that it calls
    itself or through others of the script; it is ``needed`` if a backward pass goes back to some.
    """

    place: CodePlace
    forward_frac: float
    backward_frac: float
    operators: int
    needed: bool


LOOP, DOOR, MODEL, NODE, APART, UNTRAINED = range(6)
"""Where code runs: in the training loop, called by a module itself, in the model, called by a backward node,
in the optimizer, the data loader or the collector, or in a model to which no backward pass goes back."""


class _Running:
    """A frame, range or operator that runs: ``place`` is the function of the script that it is.

    It ``trains`` if it calls the model or its backward pass, or sends messages, and ``passes`` if it calls a
    model to which no backward pass goes back. It ``evaluates`` if it calls ``eval`` of a module first and
    ``train`` afterwards (``modes``). ``hooks`` are operators that a module calls before it is known to have a
    ``forward``, which is not ``started`` then.
    """

    __slots__ = (
        "end",
        "hooks",
        "is_module",
        "is_operator",
        "modes",
        "passes",
        "place",
        "start",
        "started",
        "trains",
        "where",
    )

    def __init__(self, start: int, end: int, where: int) -> None:
        self.start, self.end, self.where = start, end, where
        self.place: CodePlace | None = None
        self.is_operator = self.is_module = self.trains = self.passes = self.started = False
        self.modes: list[str] = []
        self.hooks: list[_Called] = []

    @property
    def evaluates(self) -> bool:
        return "eval" in self.modes and "train" in self.modes[self.modes.index("eval") :]

    @property
    def called(self) -> list[_Called]:
        """Its hooks; what a module without a ``forward`` calls is its ``forward``."""
        return self.hooks if self.started else []


_Called = tuple[Sequence[_Running], int, bool]
"""The functions of the script around an operator, the outermost first, the ns it takes, and whether a
backward pass goes back to it."""


def beside_training(trace: Trace, step: int, needed: npt.NDArray[np.int64]) -> tuple[BesideTraining, ...]:
    """The functions that the loop and hooks call, or the innermost ones that take most of these.

    A function belongs to training if it calls the model, its backward pass or an optimizer, or if the
    ``forward`` or ``backward`` of the model calls it. What hooks of modules and gradients call is beside it,
    and so is one that evaluates: it puts a model into that mode and back, and no backward pass goes to it.
    One that lets ranks meet is neither: its time goes with its messages. ``needed`` are the starts of
    operators that a backward pass goes back to, as those of a loss of the script's own.
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
                _note(stack, (end - start, _any_in(needed, start, end)), found)
        elif trace.names[name].startswith(_MODULE):
            untrained = needed.size > 0 and not _any_in(needed, start, end)
            _enter_module(running, stack, untrained=untrained)
        else:
            _enter(running, stack, trace.names[name], owners[name], is_range=kind == int(Kind.ANNOTATION))
        stack.append(running)
    for running in stack:
        found += running.called
    return tuple(_named(trace, rows, found))


def _any_in(times: npt.NDArray[np.int64], start: int, end: int) -> bool:
    first, last = np.searchsorted(times, (start, end))
    return bool(last > first)


def _enter_module(running: _Running, stack: Sequence[_Running], *, untrained: bool) -> None:
    """Say where a module runs inside others; ``untrained`` is one to which no backward pass goes back."""
    if running.where == UNTRAINED or (untrained and running.where == LOOP):
        running.where = UNTRAINED
        for one in stack:
            one.passes = True
        return
    _mark(stack)
    running.where, running.is_module = DOOR, True


def _enter(
    running: _Running, stack: Sequence[_Running], name: str, owner: CodePlace | str, *, is_range: bool
) -> None:
    """Say where a frame or range runs inside others, and which function of the script it is."""
    match = FRAME.match(name)
    file, function = (match["file"], match["function"]) if match else ("", "")
    if is_range and name.startswith(_OPTIMIZER):
        _mark(stack)
        running.where = APART
    elif COLLECTOR in file or (is_range and vocabulary.data_loader(name) is not None):
        running.where = APART
    elif running.where == DOOR and function == _FORWARD:
        next(one for one in reversed(stack) if one.is_module).started = True
        running.where = MODEL
    elif running.where == NODE and (function == _BACKWARD or file.endswith(_AGAIN)):
        running.where = MODEL
    elif file == _MODES and function in ("eval", "train"):
        if (caller := next((one for one in reversed(stack) if one.place is not None), None)) is not None:
            caller.modes.append(function)
    elif isinstance(owner, CodePlace) and running.where in (LOOP, DOOR, NODE):
        running.place = owner


def _mark(stack: Sequence[_Running]) -> None:
    """Note that what runs trains, out to the model or the operator that calls it."""
    for one in reversed(stack):
        if one.where == MODEL or one.is_operator:
            return
        one.trains = True


def _note(stack: Sequence[_Running], took: tuple[int, bool], found: list[_Called]) -> None:
    """Note an operator with the functions of the script that call it, if any do."""
    if stack[-1].where not in (LOOP, DOOR, NODE, UNTRAINED):
        return
    outside = next((one for one in reversed(stack) if one.is_module or one.is_operator), stack[0])
    chain = [one for one in stack[stack.index(outside) :] if one.place is not None]
    if chain:
        (outside.hooks if outside.is_module else found).append((chain, *took))


def _named(trace: Trace, rows: np.ndarray, found: Sequence[_Called]) -> Iterator[BesideTraining]:
    """The functions by the operators that they call, and their shares of the time at operators."""
    chains: dict[CodePlace, list[_Called]] = defaultdict(list)
    for around, ns, back in found:
        evaluates = any(one.evaluates for one in around)
        trains = (one.trains or (one.passes and not evaluates) for one in around)
        inner = max((place for place, one in enumerate(trains) if one), default=-1)
        chain = around[inner + 1 :]
        if chain and (place := chain[0].place) is not None:
            chains[place].append((chain, ns, back))
    backward, others = _at_operators(trace, rows) if chains else (Spans.empty(), Spans.empty())
    for place, called in chains.items():
        least = MOST * sum(ns for _, ns, _ in called)
        mine, deeper, depth = called, called, 0
        while sum(ns for _, ns, _ in deeper) >= least:
            mine, depth = deeper, depth + 1
            by_place: dict[CodePlace, list[_Called]] = defaultdict(list)
            for chain, ns, back in mine:
                if len(chain) > depth and (one := chain[depth].place) is not None:
                    by_place[one].append((chain, ns, back))
            deeper = max(by_place.values(), key=lambda some: sum(ns for _, ns, _ in some), default=[])
        inside = Spans.from_pairs({(one.start, one.end) for one in (chain[depth - 1] for chain, *_ in mine)})
        shares = [(inside & spans).total_ns / max(spans.total_ns, 1) for spans in (others, backward)]
        place = mine[0][0][depth - 1].place or place
        place = msgspec.structs.replace(place, time_ns=inside.total_ns)
        yield BesideTraining(place, shares[0], shares[1], len(mine), any(back for *_, back in called))


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


def places_of_source_step(trace: Trace) -> tuple[CodePlace, ...]:
    """The functions that the host is in outside operators, in a step recorded with all Python frames.

    Time in torch's own functions is left out, but for what they call of the script's, such as a data set.
    """
    step = _longest_step(trace)
    if step is None:
        return ()
    loads = trace.rows_named(lambda name: vocabulary.data_loader(name) is not None, Kind.ANNOTATION)
    loading = Spans.of(trace.ts_ns[loads], trace.end_ns[loads])
    return places_in(trace, np.array([trace.thread[step]]), _outside_operators(trace, step), loading)


class Started(msgspec.Struct, frozen=True):
    """How many operators a function of the script, or a named range, starts in a step."""

    place: CodePlace
    operators: int


def work_of_source_step(trace: Trace) -> tuple[Started, ...]:
    """How many operators each function starts in a step that was recorded with all Python frames.

    What libraries start, torch among them, counts for the function that calls them; what the collector calls,
    such as all optimizers, for none.
    """
    step = _longest_step(trace)
    if step is None:
        return ()
    operators = trace.rows(Kind.CPU_OP)
    begun = trace.ts_ns[operators[trace.thread[operators] == trace.thread[step]]]
    window = Spans.from_pairs([(int(trace.ts_ns[step]), int(trace.end_ns[step]))])
    begun = begun[(begun >= window.starts[0]) & (begun < window.ends[0])]
    frames = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    owners = {
        index: THROUGH if owner == OPAQUE and COLLECTOR not in trace.names[index] else owner
        for index, owner in owners_of(trace, frames).items()
    }
    found = [
        Started(place, int(spans.covered_ns(begun, begun + 1).sum()))
        for place, spans in when_innermost(trace, frames, np.array([trace.thread[step]]), window, owners)
    ]
    return tuple(one for one in found if one.operators)


def background_places(trace: Trace) -> tuple[CodePlace, ...]:
    """The functions of the script that other threads run in the longest step while its own is in no operator.

    Calls of C code, which waits or works without the interpreter, are left out: what is left holds it, or
    waits for it.
    """
    step = _longest_step(trace)
    if step is None:
        return ()
    rows = trace.rows(Kind.PYTHON)
    threads = distinct(trace.thread[rows])
    quiet = _outside_operators(trace, step)
    return places_in(trace, threads[threads != trace.thread[step]], quiet, Spans.empty(), through_calls=False)


def _longest_step(trace: Trace) -> int | None:
    steps = trace.rows_named(lambda name: vocabulary.step_number(name) is not None, Kind.ANNOTATION)
    return int(steps[trace.dur_ns[steps].argmax()]) if steps.size else None


def _outside_operators(trace: Trace, step: int) -> Spans:
    operators = trace.rows(Kind.CPU_OP)
    busy = Spans.of(trace.ts_ns[operators], trace.end_ns[operators])
    return Spans.from_pairs([(int(trace.ts_ns[step]), int(trace.end_ns[step]))]) - busy


_CALL = re.compile(
    r"^<built-in (?:method|function) "
    r"(?P<asks>item|tolist|cpu|numpy|nonzero|is_nonzero|_cuda_synchronize|synchronize|_local_scalar_dense)\b"
    r"|^torch/distributed/(?:distributed_c10d|tensor/_api)\.py\(\d+\): "
    r"(?P<meets>barrier|monitored_barrier|all_reduce|reduce|full_tensor|"
    r"(?:all_gather|broadcast|gather|scatter)_object(?:_list)?)$"
)
"""What reads values of tensors, and where a script lets ranks meet."""

_BELOW_THE_CALL = frozenset({"torch", "importlib", *sys.stdlib_module_names})
"""Frames of these packages lie between the script's frame and the call."""

_NEVER = re.compile(
    r"^torch/(?:optim|profiler|utils/data|autograd|nn/parallel|"
    r"distributed/(?:fsdp|algorithms|optim|pipelining|_composable))/"
)
"""Code that reads values on the host, or lets ranks meet, by design: an optimizer counts its steps there."""


_FRAMES_LISTED = 1000
"""Python's own limit of frames on a stack."""


class SourceLine(msgspec.Struct, frozen=True):
    """A function of the script that reads values of tensors or lets ranks meet, and how often a step.

    ``line`` is where the function begins: stacks do not hold the line of the call. ``call`` is what it calls,
    as ``item``; ``meets`` marks barriers and pickled objects.
    """

    file: str
    line: int
    function: str
    call: str
    calls: int
    meets: bool = False

    @property
    def place(self) -> CodePlace:
        """The function as a place without time of its own."""
        call = self.call if self.function == TOP_LEVEL else ""
        line = 0 if call else self.line
        return CodePlace(self.file, line, self.function, loading=False, time_ns=0, call=call)


def asking_lines(trace: Trace) -> tuple[SourceLine, ...]:
    """Return the functions that read values of tensors, synchronise or let ranks meet, most calls first.

    The trace must have been read with ``python_functions=True``. Whether the tensor was on a device is not in
    it: on a CPU, or for a tensor there, such a call waits for nothing.
    """
    rows = np.flatnonzero(trace.kind == int(Kind.PYTHON))
    calls = {i: match for i, name in enumerate(trace.names) if (match := _CALL.match(name))}
    counted: Counter[SourceLine] = Counter()
    for name, around in _calls_with_stacks(trace, rows, calls):
        place = _caller(trace.names[frame] for frame in around)
        if place is not None:
            asks, meets = calls[name].group("asks", "meets")
            counted[SourceLine(*place, asks or meets, 0, meets=meets is not None)] += 1
    found = (msgspec.structs.replace(line, calls=count) for line, count in counted.items())
    return tuple(sorted(found, key=lambda one: (-one.calls, one.file, one.line, one.call)))


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
            yield name, (frame for frame, _ in islice(reversed(frames), _FRAMES_LISTED))
        frames.append((name, end))


def _caller(frames: Iterable[str]) -> tuple[str, int, str] | None:
    """Return the innermost frame of the script's own code; frames run from the innermost outwards."""
    for frame in frames:
        if _NEVER.match(frame):
            return None
        match = FRAME.match(frame)
        if match is None or COMPREHENSION.fullmatch(match["function"]):
            continue
        if re.split(r"[/.]", match["file"], maxsplit=1)[0] not in _BELOW_THE_CALL:
            return match["file"], int(match["line"]), match["function"]
    return None


class SourceStep(msgspec.Struct, frozen=True):
    """What the step with stacks of one rank shows.

    ``asking`` are the functions of the script that read values of tensors or let ranks meet, most calls
    first; ``code`` is where the host spends time outside operators, most time first; ``background`` is what
    other threads run meanwhile; ``work`` is which functions start how many operators, ``beside`` those
    that call operators beside training.
    """

    asking: tuple[SourceLine, ...] = ()
    code: tuple[CodePlace, ...] = ()
    background: tuple[CodePlace, ...] = ()
    work: tuple[Started, ...] = ()
    beside: tuple[BesideTraining, ...] = ()


def read_source_step(path: str) -> SourceStep:
    """The places in the file of a step with stacks; raises :class:`InputError` where it is no trace."""
    trace = read_trace(path, python_functions=True)
    step = _longest_step(trace)
    return SourceStep(
        asking_lines(trace),
        places_of_source_step(trace),
        background_places(trace),
        work_of_source_step(trace),
        () if step is None else beside_training(trace, step, differentiated(path)),
    )
