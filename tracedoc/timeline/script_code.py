"""The functions of a script in which the host spends time outside operators, or reads values of tensors."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among
from tracedoc.trace.kineto import read_trace

KEPT_FUNCTIONS = 8
"""So many functions are kept, those with most time."""

TOP_LEVEL = "<module>"
"""The function that a script's own lines are in."""

_FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")

_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "sklearn", "PIL"),
        *("transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "deepspeed", "cv2"),
        *(
            "pytorch_lightning",
            "lightning_fabric",
            "lightning_utilities",
            "torchmetrics",
            "lightning",
            "wandb",
            "tensorboard",
            "tensorboardX",
            "mlflow",
        ),
        *(
            "tqdm",
            "fsspec",
            "pyarrow",
            "h5py",
            "webdataset",
            "av",
            "decord",
            "albumentations",
            "tracedoc",
            "runpy",
        ),
        *("importlib", *sys.stdlib_module_names),
    }
)
"""A function of the script that calls one of these is named, not the library's own function."""

_INSTALLED = re.compile(r"-packages/|/lib/python3\.|tracedoc/collector/|^<")

OF_A_FRAMEWORK = re.compile(
    r"ProfilerStep#|Optimizer\.|enumerate\(|DistributedDataParallel\.|FSDP|FullyShardedDataParallel|nccl:|gloo:|"
    r"##|\[pl\]|\[Strategy\]|\[Lightning|Torch-Compiled|CompiledFxGraph|TorchDynamo|dynamo|inductor|PyTorch "
)
"""Ranges that frameworks write."""


LOADER = "the data loader"
"""Where a thread is that waits for the workers of its loader."""


class CodePlace(msgspec.Struct, frozen=True):
    """A function of the script, or a named range, with the host's time in it that no operator covers.

    ``line`` is where the function begins; file and line are "" and 0 for a range that ``record_function``
    names. ``loading`` marks time in the data loader. ``call`` is what the function calls in that time,
    as ``sleep``: only of a function that runs the whole step, whose name alone would say nothing.
    """

    file: str
    line: int
    function: str
    loading: bool
    time_ns: int
    call: str = ""

    def __str__(self) -> str:
        if not self.file and self.function == LOADER:
            return LOADER
        if not self.file:
            return f"the range `{self.function}`"
        if self.function == TOP_LEVEL:
            place = f"(`{self.file}:{self.line}`)" if self.line else f"of `{self.file}`"
            return f"{f'`{self.call}`' if self.call else 'code'} at the top level {place}"
        function = f"`{self.function}` (`{self.file}:{self.line}`)"
        return f"`{self.call}` in {function}" if self.call else function


def places_of_timeline(timeline: RankTimeline) -> tuple[CodePlace, ...]:
    """The functions that the host of a rank is in while it keeps the device idle in the analysed step."""
    window, idle = timeline.judged, timeline.idle
    if window is None or idle is None:
        return ()
    mine = Spans.empty()
    for cause in ("input", "launch", "gc", "unknown"):
        mine = mine | idle.spans[cause]
    mine = mine.clip(window.start_ns, window.end_ns)
    if len(mine) == 0:
        return ()
    trace = timeline.trace
    threads = trace.thread.distinct(trace.is_kind(Kind.CPU_OP))
    places = _places(trace, threads, mine, timeline.host_delays.input)
    return tuple(one for one in places if not _is_a_pass(timeline, one))


PASS_SHARE = 0.5
"""A named range that holds this share of what a CPU computes, or of all operators, is a pass of the
model, or the step itself."""


def _is_a_pass(timeline: RankTimeline, place: CodePlace) -> bool:
    """Whether a range holds the work of the model: it is nothing to take out of the step."""
    window, activity, trace = timeline.judged, timeline.activity, timeline.trace
    if place.file or window is None or activity is None:
        return False
    rows = trace.rows_named(lambda name: name == place.function, Kind.ANNOTATION)
    ranges = Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
    if timeline.is_cpu:
        compute = activity.compute.clip(window.start_ns, window.end_ns)
        return (compute & ranges).total_ns >= PASS_SHARE * compute.total_ns
    begun = trace.ts_ns[trace.is_kind(Kind.CPU_OP)]
    begun = begun[(begun >= window.start_ns) & (begun < window.end_ns)]
    return int(ranges.covered_ns(begun, begun + 1).sum()) >= PASS_SHARE * begun.size


def places_of_source_step(trace: Trace) -> tuple[CodePlace, ...]:
    """Return the same of a step that was recorded on the host with all Python frames.

    Time in torch's own functions is left out, but for what they call of the script's, such as a data set.
    """
    step = _longest_step(trace)
    if step is None:
        return ()
    loads = trace.rows_named(lambda name: vocabulary.data_loader(name) is not None, Kind.ANNOTATION)
    loading = Spans.of(trace.ts_ns[loads], trace.end_ns[loads])
    return _places(trace, np.array([trace.thread[step]]), _outside_operators(trace, step), loading)


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
    return _places(trace, threads[threads != trace.thread[step]], quiet, Spans.empty(), through_calls=False)


def _longest_step(trace: Trace) -> int | None:
    steps = trace.rows_named(lambda name: vocabulary.step_number(name) is not None, Kind.ANNOTATION)
    return int(steps[trace.dur_ns[steps].argmax()]) if steps.size else None


def _outside_operators(trace: Trace, step: int) -> Spans:
    operators = trace.rows(Kind.CPU_OP)
    busy = Spans.of(trace.ts_ns[operators], trace.end_ns[operators])
    return Spans.from_pairs([(int(trace.ts_ns[step]), int(trace.end_ns[step]))]) - busy


def place_around(trace: Trace, row: int) -> CodePlace | None:
    """Return the innermost function or named range of the script that holds a host row, if any does."""
    kinds = is_among(trace.kind, np.array([int(Kind.PYTHON), int(Kind.ANNOTATION)], dtype=trace.kind.dtype))
    holding = kinds & (trace.thread == trace.thread[row])
    holding &= (trace.ts_ns <= trace.ts_ns[row]) & (trace.end_ns >= trace.end_ns[row])
    rows = np.flatnonzero(holding)
    for one in rows[np.argsort(trace.dur_ns[rows], kind="stable")].tolist():
        if (place := place_of_row(trace, one)) is not None:
            return place
    return None


def place_of_row(trace: Trace, row: int) -> CodePlace | None:
    """The function of the script or named range that a row is, if it is one."""
    named = trace.kind[row] in (int(Kind.PYTHON), int(Kind.ANNOTATION))
    owner = _owner(trace.row_name(row)) if named else _OPAQUE
    return owner if isinstance(owner, CodePlace) else None


def _places(
    trace: Trace, threads: np.ndarray, wanted: Spans, loading: Spans, *, through_calls: bool = True
) -> tuple[CodePlace, ...]:
    """Return the innermost function or range of the script at each wanted time, most time first.

    Without ``through_calls`` time in C code is nobody's.
    """
    if len(wanted) == 0:
        return ()
    frames = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    owners = {index: _owner(trace.names[index]) for index in distinct(trace.name[frames]).tolist()}
    if not through_calls:
        owners |= {index: _OPAQUE for index in owners if trace.names[index].startswith("<")}
    counting = is_among(trace.name[frames], [index for index, owner in owners.items() if owner != _THROUGH])
    long = trace.dur_ns[frames] >= wanted.total_ns * LEAST_CALL
    whole = (trace.ts_ns[frames] <= wanted.starts.min()) & (trace.end_ns[frames] >= wanted.ends.max())
    split = frozenset(trace.name[frames[whole]].tolist())
    frames = frames[counting | long]
    thread_of = trace.thread[frames]
    pieces: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for thread in threads.tolist():
        for name, call, start, end in _innermost(trace, frames[thread_of == thread], owners, split):
            pieces[name, call].append((start, end))
    found = []
    for (name, call), pairs in pieces.items():
        place = owners[name]
        if not isinstance(place, CodePlace):
            continue
        spans = Spans.from_pairs(pairs) & wanted
        inside = (spans & loading).total_ns
        found.append(msgspec.structs.replace(place, loading=True, time_ns=inside, call=call))
        found.append(msgspec.structs.replace(place, time_ns=spans.total_ns - inside, call=call))
    found = [one for one in found if one.time_ns > 0]
    return tuple(sorted(found, key=lambda one: (-one.time_ns, one.file, one.line, one.call))[:KEPT_FUNCTIONS])


_THROUGH, _OPAQUE = "through", "opaque"

LEAST_CALL = 0.01
"""What takes a smaller share of the time is not named as a call."""

_WORKS = re.compile(
    r"(?:^|/)(?:torch/(?!serialization|storage|_tensor_str|package|multiprocessing|profiler|"
    r"distributed/checkpoint|utils/(?!checkpoint))"
    r"|deepspeed/(?!checkpoint|monitor|profiling|runtime/(?:checkpoint_engine|dataloader)))"
)
"""Code of torch and of DeepSpeed's engine that works for the model. Of what loads, saves, prints or records
the time is that of whoever calls it."""

_COMPREHENSION = re.compile(r"<(?:list|set|dict)comp>|<genexpr>")

_CALLED = re.compile(r"^(?:.+\.py\(\d+\): |<built-in (?:method|function) )(?P<name>[a-zA-Z]\w*)")

_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context"})


def _owner(name: str) -> CodePlace | str:
    """Return the place that a frame or range stands for.

    A library's frame lets its caller through, and a comprehension its function; a framework's, where the
    host works for the model or waits for other ranks, hides it, and so does the collector's.
    """
    frame = _FRAME.match(name)
    if frame is None:
        is_range = not name.startswith("<") and "::" not in name and not name.startswith("nn.Module: ")
        if not is_range or OF_A_FRAMEWORK.match(name):
            return _THROUGH
        return CodePlace("", 0, name[:120], loading=False, time_ns=0)
    file = frame["file"]
    if _WORKS.search(file) or "tracedoc/collector/" in file:
        return _OPAQUE
    library = re.split(r"[/.]", file, maxsplit=1)[0] in _LIBRARIES or _INSTALLED.search(file)
    if library or _COMPREHENSION.fullmatch(frame["function"]):
        return _THROUGH
    # The top level begins nowhere: there a trace has the line that ran when it began.
    line = 0 if frame["function"] == TOP_LEVEL else int(frame["line"])
    return CodePlace(file, line, frame["function"], loading=False, time_ns=0)


def place_of_stack(frames: Iterable[str], loop: Container[str]) -> CodePlace | None:
    """The function of the script that a sampled stack is in, ``None`` where it does what all steps do.

    Frames run from the innermost outwards, as ``train.py(12): main@15``. Functions of ``loop`` are around
    every step: such a one has its line and what it calls, and ``None`` stands for torch working for it. A
    data loader that runs no function of the script is waited for.
    """
    call, works = "", False
    for frame in frames:
        name, _, line = frame.rpartition("@")
        if name.startswith("torch/utils/data/dataloader.py"):
            return CodePlace("", 0, LOADER, loading=True, time_ns=0)
        owner = _owner(name)
        if isinstance(owner, CodePlace):
            if name not in loop:
                return owner
            return None if works else msgspec.structs.replace(owner, line=int(line or 0), call=call)
        works |= owner == _OPAQUE
        call = _called(name) or call
    return None


def place_of_frame(frame: str) -> CodePlace | None:
    """The function that a sampled frame runs, of a library too, ``None`` where it is none of Python."""
    match = _FRAME.match(frame.rpartition("@")[0])
    return CodePlace(match["file"], int(match["line"]), match["function"], False, 0) if match else None


def _called(name: str) -> str:
    """The function that a frame of a library calls, "" for what says nothing to a person."""
    match = _CALLED.match(name)
    return match["name"] if match and match["name"] not in _WRAPPERS else ""


def _innermost(
    trace: Trace, rows: np.ndarray, owners: Mapping[int, CodePlace | str], split: Container[int]
) -> list[tuple[int, str, int, int]]:
    """Return ``(name, call, start, end)`` of the times at which a frame that owns them is the innermost one.

    ``call`` is what such a frame calls in a library, where its name is one to ``split``.
    """
    rows = rows[np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows]))]
    found: list[tuple[int, str, int, int]] = []
    open_: list[tuple[int, str, int]] = []  # name, call and end
    since = 0

    def close(until: int) -> None:
        nonlocal since
        while open_ and open_[-1][2] <= until:
            name, call, end = open_.pop()
            if end > since:
                found.append((name, call, since, end))
                since = end

    columns = (column[rows].tolist() for column in (trace.name, trace.ts_ns, trace.end_ns))
    for name, start, end in zip(*columns, strict=True):
        close(start)
        if open_ and start > since:
            found.append((*open_[-1][:2], since, start))
        since = max(since, start) if open_ else start
        owner, call, last = open_[-1] if open_ else (name, "", end)
        if owners[name] != _THROUGH:
            owner, call = name, ""
        elif not call and owner in split:
            call = _called(trace.names[name])
        open_.append((owner, call, min(end, last)))
    close(sys.maxsize)
    return found


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
        match = _FRAME.match(frame)
        if match is None or _COMPREHENSION.fullmatch(match["function"]):
            continue
        if re.split(r"[/.]", match["file"], maxsplit=1)[0] not in _BELOW_THE_CALL:
            return match["file"], int(match["line"]), match["function"]
    return None


class SourceStep(msgspec.Struct, frozen=True):
    """What the step with stacks of one rank shows.

    ``asking`` are the functions of the script that read values of tensors or let ranks meet, most calls
    first; ``code`` is where the host spends time outside operators, most time first; ``background`` is what
    other threads run meanwhile.
    """

    asking: tuple[SourceLine, ...] = ()
    code: tuple[CodePlace, ...] = ()
    background: tuple[CodePlace, ...] = ()


def read_source_step(path: str) -> SourceStep:
    """The places in the file of a step with stacks; raises :class:`InputError` where it is no trace."""
    trace = read_trace(path, python_functions=True)
    return SourceStep(asking_lines(trace), places_of_source_step(trace), background_places(trace))
