"""The functions of a script in which the host spends time outside operators, or reads values of tensors."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
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

_FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")

_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "sklearn", "PIL"),
        *("transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "deepspeed", "cv2"),
        *(
            "pytorch_lightning",
            "lightning_fabric",
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


class CodePlace(msgspec.Struct, frozen=True):
    """A function of the script, or a named range, with the host's time in it that no operator covers.

    ``line`` is where the function begins; file and line are "" and 0 for a range that ``record_function``
    names. ``loading`` marks time in the data loader.
    """

    file: str
    line: int
    function: str
    loading: bool
    time_ns: int

    def __str__(self) -> str:
        if not self.file:
            return f"the range `{self.function}`"
        return f"`{self.function}` (`{self.file}:{self.line}`)"


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
    return _places(trace, threads, mine, timeline.host_delays.input)


def places_of_source_step(trace: Trace) -> tuple[CodePlace, ...]:
    """Return the same of a step that was recorded on the host with all Python frames.

    Time in torch's own functions is left out, but for what they call of the script's, such as a data set.
    """
    steps = trace.rows_named(lambda name: vocabulary.step_number(name) is not None, Kind.ANNOTATION)
    if steps.size == 0:
        return ()
    step = int(steps[trace.dur_ns[steps].argmax()])
    operators = trace.rows(Kind.CPU_OP)
    busy = Spans.of(trace.ts_ns[operators], trace.end_ns[operators])
    whole = Spans.from_pairs([(int(trace.ts_ns[step]), int(trace.end_ns[step]))])
    loads = trace.rows_named(lambda name: vocabulary.data_loader(name) is not None, Kind.ANNOTATION)
    loading = Spans.of(trace.ts_ns[loads], trace.end_ns[loads])
    return _places(trace, np.array([trace.thread[step]]), whole - busy, loading)


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


def _places(trace: Trace, threads: np.ndarray, wanted: Spans, loading: Spans) -> tuple[CodePlace, ...]:
    """Return the innermost function or range of the script at each wanted time, most time first."""
    frames = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    owners = {index: _owner(trace.names[index]) for index in distinct(trace.name[frames]).tolist()}
    counting = [index for index, owner in owners.items() if owner != _THROUGH]
    frames = frames[is_among(trace.name[frames], counting)]
    thread_of = trace.thread[frames]
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for thread in threads.tolist():
        for name, start, end in _innermost(trace, frames[thread_of == thread]):
            pieces[name].append((start, end))
    found = []
    for name, pairs in pieces.items():
        place = owners[name]
        if not isinstance(place, CodePlace):
            continue
        spans = Spans.from_pairs(pairs) & wanted
        inside = (spans & loading).total_ns
        found.append(msgspec.structs.replace(place, loading=True, time_ns=inside))
        found.append(msgspec.structs.replace(place, time_ns=spans.total_ns - inside))
    found = [one for one in found if one.time_ns > 0]
    return tuple(sorted(found, key=lambda one: (-one.time_ns, one.file, one.line))[:KEPT_FUNCTIONS])


_THROUGH, _OPAQUE = "through", "opaque"


def _owner(name: str) -> CodePlace | str:
    """Return the place that a frame or range stands for.

    A library's frame lets its caller through; torch's own, outside its data loader, hides it, for there
    the host works for the model or waits for other ranks.
    """
    frame = _FRAME.match(name)
    if frame is None:
        is_range = not name.startswith("<") and "::" not in name and not name.startswith("nn.Module: ")
        if not is_range or OF_A_FRAMEWORK.match(name):
            return _THROUGH
        return CodePlace("", 0, name[:120], loading=False, time_ns=0)
    file = frame["file"]
    if "torch/" in file and "torch/utils/data" not in file and "torch/profiler" not in file:
        return _OPAQUE
    library = re.split(r"[/.]", file, maxsplit=1)[0] in _LIBRARIES or _INSTALLED.search(file)
    if library or frame["function"] == "<module>":
        return _THROUGH
    return CodePlace(file, int(frame["line"]), frame["function"], loading=False, time_ns=0)


def _innermost(trace: Trace, rows: np.ndarray) -> list[tuple[int, int, int]]:
    """Return ``(name, start, end)`` of the times at which a frame is the innermost of these."""
    rows = rows[np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows]))]
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # name and end
    since = 0

    def close(until: int) -> None:
        nonlocal since
        while open_ and open_[-1][1] <= until:
            name, end = open_.pop()
            if end > since:
                found.append((name, since, end))
                since = end

    columns = (column[rows].tolist() for column in (trace.name, trace.ts_ns, trace.end_ns))
    for name, start, end in zip(*columns, strict=True):
        close(start)
        if open_ and start > since:
            found.append((open_[-1][0], since, start))
        since = max(since, start) if open_ else start
        open_.append((name, min(end, open_[-1][1]) if open_ else end))
    close(sys.maxsize)
    return found


_CALL = re.compile(
    r"^<built-in (?:method|function) "
    r"(item|tolist|cpu|numpy|nonzero|is_nonzero|_cuda_synchronize|synchronize|_local_scalar_dense)\b"
)

_BELOW_THE_CALL = frozenset({"torch", "importlib", *sys.stdlib_module_names})
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
        match = _FRAME.match(frame)
        if match and re.split(r"[/.]", match["file"], maxsplit=1)[0] not in _BELOW_THE_CALL:
            return match["file"], int(match["line"]), match["function"]
    return None


class SourceStep(msgspec.Struct, frozen=True):
    """What the step with stacks of one rank shows.

    ``asking`` are the functions of the script that read values of tensors, most calls first; ``code`` is
    where the host spends time outside operators, most time first.
    """

    asking: tuple[SourceLine, ...] = ()
    code: tuple[CodePlace, ...] = ()


def read_source_step(path: str) -> SourceStep:
    """The places in the file of a step with stacks; raises :class:`InputError` where it is no trace."""
    trace = read_trace(path, python_functions=True)
    return SourceStep(asking_lines(trace), places_of_source_step(trace))
