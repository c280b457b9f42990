"""The functions of a script: those in which the host is outside operators, and those of some steps only."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.distinct import distinct, is_among, median

KEPT_FUNCTIONS = 8
"""So many functions are kept, those with most time."""

TOP_LEVEL = "<module>"
"""The function that a script's own lines are in."""

FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")

_LIBRARY_NAMES = (
    "torch torchvision torchaudio torchtext numpy scipy pandas sklearn PIL transformers accelerate "
    "datasets tokenizers huggingface_hub deepspeed cv2 pytorch_lightning lightning_fabric "
    "lightning_utilities torchmetrics lightning wandb tensorboard tensorboardX mlflow matplotlib seaborn "
    "plotly polars torchdata timm kornia einops joblib dask ray boto3 botocore s3fs gcsfs requests "
    "urllib3 psutil rich yaml zarr msgpack orjson lmdb imageio skimage soundfile librosa nltk "
    "sentencepiece tqdm fsspec pyarrow h5py webdataset av decord albumentations tracedoc runpy"
)
_LIBRARIES = frozenset((*sys.stdlib_module_names, *_LIBRARY_NAMES.split()))
"""A function of the script that calls one of these is named, not the library's own function."""

_INSTALLED = re.compile(r"-packages/|/lib/python3\.|tracedoc/collector/|^<")

OF_A_FRAMEWORK = re.compile(
    r"ProfilerStep#|Optimizer\.|enumerate\(|DistributedDataParallel\.|FSDP|FullyShardedDataParallel|nccl:|gloo:|"
    r"##|\[pl\]|\[Strategy\]|\[Lightning|Torch-Compiled|CompiledFxGraph|TorchDynamo|dynamo|inductor|PyTorch "
)
"""Ranges that frameworks write."""


LOADER = "the data loader"
"""Where a thread is that waits for the workers of its loader."""


STOPPED = "a stopped process"
"""Where a thread is whose process the system has stopped."""


class CodePlace(msgspec.Struct, frozen=True):
    """A function of the script, or a named range, with the host's time in it that no operator covers.

    ``line`` is where the function begins; file and line are "" and 0 for a range that ``record_function``
    names. ``loading`` marks time in the data loader. ``call`` is what the function calls in that time,
    as ``sleep``: only of a function that runs the whole step, whose name alone would say nothing. ``trains``
    marks one that calls the model or an optimizer itself.
    """

    file: str
    line: int
    function: str
    loading: bool
    time_ns: int
    call: str = ""
    trains: bool = False

    def __str__(self) -> str:
        if not self.file and self.function in (LOADER, STOPPED):
            return self.function
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
    threads = trace.thread.distinct(trace.rows(Kind.CPU_OP))
    places = places_in(trace, threads, mine, timeline.host_delays.input)
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
    ranges = trace.spans(rows)
    if timeline.is_cpu:
        compute = activity.compute.clip(window.start_ns, window.end_ns)
        return (compute & ranges).total_ns >= PASS_SHARE * compute.total_ns
    begun = trace.ts_ns[trace.is_kind(Kind.CPU_OP)]
    begun = begun[(begun >= window.start_ns) & (begun < window.end_ns)]
    return int(ranges.covered_ns(begun, begun + 1).sum()) >= PASS_SHARE * begun.size


def place_around(trace: Trace, row: int) -> CodePlace | None:
    """Return the innermost function or named range of the script that holds a host row, if any does."""
    rows = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    rows = rows[trace.end_ns[rows] >= trace.end_ns[row]]
    rows = rows[(trace.ts_ns[rows] <= trace.ts_ns[row]) & (trace.thread[rows] == trace.thread[row])]
    for one in rows[np.argsort(trace.dur_ns[rows], kind="stable")].tolist():
        if (place := place_of_row(trace, one)) is not None:
            return place
    return None


def place_of_row(trace: Trace, row: int) -> CodePlace | None:
    """The function of the script or named range that a row is, if it is one."""
    named = trace.kind[row] in (int(Kind.PYTHON), int(Kind.ANNOTATION))
    owner = _owner(trace.row_name(row)) if named else OPAQUE
    return owner if isinstance(owner, CodePlace) else None


def places_in(
    trace: Trace, threads: np.ndarray, wanted: Spans, loading: Spans, *, through_calls: bool = True
) -> tuple[CodePlace, ...]:
    """Return the innermost function or range of the script at each wanted time, most time first.

    Without ``through_calls`` time in C code is nobody's.
    """
    if len(wanted) == 0:
        return ()
    frames = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    owners = owners_of(trace, frames)
    if not through_calls:
        owners |= {index: OPAQUE for index in owners if trace.names[index].startswith("<")}
    training = _functions_of_training(trace, frames, threads)
    loops = {name: place for name, place in training.items() if owners[name] == THROUGH}
    trains = {_function(place) for place in training.values()}
    found = []
    for place, spans in when_innermost(trace, frames, threads, wanted, owners, loops):
        place = msgspec.structs.replace(place, trains=not place.call and _function(place) in trains)
        spans = spans & wanted
        inside = (spans & loading).total_ns
        found.append(msgspec.structs.replace(place, loading=True, time_ns=inside))
        found.append(msgspec.structs.replace(place, time_ns=spans.total_ns - inside))
    found = [one for one in found if one.time_ns > 0]
    return tuple(sorted(found, key=lambda one: (-one.time_ns, one.file, one.line, one.call))[:KEPT_FUNCTIONS])


def owners_of(trace: Trace, frames: np.ndarray) -> dict[int, CodePlace | str]:
    """What each name of frames and ranges stands for: a place, :data:`THROUGH` or :data:`OPAQUE`."""
    return {index: _owner(trace.names[index]) for index in distinct(trace.name[frames]).tolist()}


def when_innermost(
    trace: Trace,
    frames: np.ndarray,
    threads: np.ndarray,
    wanted: Spans,
    owners: Mapping[int, CodePlace | str],
    loops: Mapping[int, CodePlace] = MappingProxyType({}),
) -> Iterator[tuple[CodePlace, Spans]]:
    """When each function or range of the script is the innermost one on some threads, around wanted times.

    A function of a library that is one of ``loops`` is a place, too, but where torch calls it.
    """
    counting = is_among(trace.name[frames], [index for index, owner in owners.items() if owner != THROUGH])
    long = trace.dur_ns[frames] >= wanted.total_ns * LEAST_CALL
    whole = (trace.ts_ns[frames] <= wanted.starts.min()) & (trace.end_ns[frames] >= wanted.ends.max())
    split = frozenset({*trace.name[frames[whole]].tolist(), *loops})
    frames = frames[counting | long]
    thread_of = trace.thread[frames]
    pieces: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for thread in threads.tolist():
        for name, call, start, end in _innermost(trace, frames[thread_of == thread], owners, split, loops):
            pieces[name, call].append((start, end))
    for (name, call), pairs in pieces.items():
        place = loops.get(name, owners[name])
        if isinstance(place, CodePlace):
            yield msgspec.structs.replace(place, call=call), Spans.from_pairs(pairs)


def _functions_of_training(trace: Trace, frames: np.ndarray, threads: np.ndarray) -> dict[int, CodePlace]:
    """The functions that call the model or an optimizer, a trainer's of a library too, by their names.

    Such a one is nothing to take out of the step.
    """
    marks = trace.rows_named(lambda name: name.startswith(CALLS_OF_TRAINING), Kind.PYTHON, Kind.ANNOTATION)
    begun = np.sort(trace.ts_ns[marks[is_among(trace.thread[marks], threads)]])
    rows = frames[is_among(trace.thread[frames], threads)]
    holds = np.searchsorted(begun, trace.end_ns[rows]) > np.searchsorted(begun, trace.ts_ns[rows], "right")
    of_name = {name: place_of_frame(trace.names[name]) for name in distinct(trace.name[rows]).tolist()}
    # A call that runs since before the recording has another line.
    running = {_function(of_name[name]) for name in distinct(trace.name[rows[holds]]).tolist()}
    return {name: place for name, place in of_name.items() if place and _function(place) in running}


def _function(place: CodePlace | None) -> tuple[str, str] | None:
    return (place.file, place.function) if place else None


CALLS_OF_TRAINING = ("nn.Module: ", "Optimizer.step#")
"""Frames and ranges of a model, and of an optimizer's step, begin with these."""

THROUGH, OPAQUE = "through", "opaque"

COLLECTOR = "tracedoc/collector/"
"""Frames of the collector have this in their file's name."""

LEAST_CALL = 0.01
"""What takes a smaller share of the time is not named as a call."""

COMPREHENSION = re.compile(r"<(?:list|set|dict)comp>|<genexpr>")

_CALLED = re.compile(r"^(?:.+\.py\(\d+\): |<built-in (?:method|function) )(?P<name>[a-zA-Z]\w*)")

_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context"})


def _owner(name: str) -> CodePlace | str:
    """Return the place that a frame or range stands for.

    A library's frame lets its caller through, and a comprehension its function; a framework's, where the
    host works for the model or waits for other ranks, hides it, and so does the collector's.
    """
    frame = FRAME.match(name)
    if frame is None:
        is_range = not name.startswith("<") and "::" not in name and not name.startswith("nn.Module: ")
        if not is_range or OF_A_FRAMEWORK.match(name):
            return THROUGH
        return CodePlace("", 0, name[:120], loading=False, time_ns=0)
    file = frame["file"]
    if vocabulary.works_for_the_model(file) or COLLECTOR in file:
        return OPAQUE
    library = re.split(r"[/.]", file, maxsplit=1)[0] in _LIBRARIES or _INSTALLED.search(file)
    if library or COMPREHENSION.fullmatch(frame["function"]):
        return THROUGH
    # The top level begins nowhere: there a trace has the line that ran when it began.
    line = 0 if frame["function"] == TOP_LEVEL else int(frame["line"])
    return CodePlace(file, line, frame["function"], loading=False, time_ns=0)


def place_of_stack(frames: Iterable[str], loop: Container[str]) -> CodePlace | None:
    """The function of the script that a sampled stack is in, ``None`` where it does what all steps do.

    Frames run from the innermost outwards, as ``train.py(12): main@15``. Functions of ``loop`` are around
    every step: such a one, of a trainer too, has its line and what it calls, and ``None`` stands for torch
    working for it. A data loader that runs no function of the script is waited for.
    """
    call, works = "", False
    for frame in frames:
        name, _, line = frame.rpartition("@")
        if name.startswith("torch/utils/data/dataloader.py"):
            return CodePlace("", 0, LOADER, loading=True, time_ns=0)
        owner = _owner(name)
        if owner == THROUGH and name in loop:
            owner = place_of_frame(name) or owner
        if isinstance(owner, CodePlace):
            if name not in loop:
                return owner
            return None if works else msgspec.structs.replace(owner, line=int(line or 0), call=call)
        works |= owner == OPAQUE
        call = _called(name) or call
    return None


def place_of_frame(name: str) -> CodePlace | None:
    """The function that a frame runs, of a library too, ``None`` where it is none of Python."""
    match = FRAME.match(name)
    return CodePlace(match["file"], int(match["line"]), match["function"], False, 0) if match else None


def _called(name: str) -> str:
    """The function that a frame of a library calls, "" for what says nothing to a person."""
    match = _CALLED.match(name)
    return match["name"] if match and match["name"] not in _WRAPPERS else ""


def _innermost(
    trace: Trace,
    rows: np.ndarray,
    owners: Mapping[int, CodePlace | str],
    split: Container[int],
    loops: Container[int],
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
        if owners[name] != THROUGH or (name in loops and owners[owner] != OPAQUE):
            owner, call = name, ""
        elif not call and owner in split:
            call = _called(trace.names[name])
        open_.append((owner, call, min(end, last)))
    close(sys.maxsize)
    return found


LEAST_OF_STEP = 0.02
"""A call that takes a smaller share of the usual step is not looked at."""

SELDOM = 0.5
"""What runs in more of the steps than this is a part of the usual one."""

INNER = 0.5
"""Of functions that call each other the innermost is named that has so much of the outermost one's time."""


class RareCode(msgspec.Struct, frozen=True):
    """A function of the script, or a named range, and how long it runs in each step that it runs in."""

    place: CodePlace
    ns_of: dict[int, int]


def rare_code(timeline: RankTimeline) -> tuple[RareCode, ...]:
    """What the threads that launch or compute run in half of the captured steps or fewer, most time first.

    A call belongs to the step in which it begins, as the host marks them.
    """
    steps, trace = timeline.host.steps, timeline.trace
    if len(steps) < 2:
        return ()
    rows = trace.rows(Kind.PYTHON, Kind.ANNOTATION)
    least = LEAST_OF_STEP * float(median([one.end_ns - one.start_ns for one in steps]))
    longest = max(one.end_ns - one.start_ns for one in steps)
    rows = rows[trace.thread.among(trace.thread.distinct(trace.rows(Kind.CPU_OP)), rows)]
    owners = owners_of(trace, rows)
    rows = rows[
        is_among(trace.name[rows], [name for name, one in owners.items() if isinstance(one, CodePlace)])
    ]
    step = np.searchsorted([one.start_ns for one in steps], trace.ts_ns[rows], "right") - 1
    runs_in: dict[int, set[int]] = defaultdict(set)
    for name, number in zip(trace.name[rows].tolist(), step.tolist(), strict=True):
        runs_in[name].add(number)
    rare = [name for name, where in runs_in.items() if len(where - {-1}) <= SELDOM * len(steps)]
    length = trace.dur_ns[rows]
    chosen = is_among(trace.name[rows], rare) & (step >= 0) & (length >= least) & (length <= longest)
    rows, step = rows[chosen], step[chosen]
    order = np.lexsort((-trace.dur_ns[rows], trace.ts_ns[rows], trace.thread[rows]))
    found: dict[CodePlace, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number, outer, inner in _outermost(trace, rows[order], step[order]):
        place = owners[int(trace.name[inner])]
        if isinstance(place, CodePlace):
            found[place][steps[number].index] += int(trace.dur_ns[outer])
    every = [RareCode(place, dict(ns_of)) for place, ns_of in found.items()]
    return tuple(sorted(every, key=lambda one: -sum(one.ns_of.values()))[:KEPT_FUNCTIONS])


def _outermost(trace: Trace, rows: np.ndarray, steps: np.ndarray) -> list[tuple[int, int, int]]:
    """The step and the row of each outermost call, and that of the call inside to name it by."""
    found: list[tuple[int, int, int]] = []
    for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
        number, outer, _ = found[-1] if found else (-1, -1, -1)
        if not found or trace.thread[outer] != trace.thread[row] or trace.ts_ns[row] >= trace.end_ns[outer]:
            found.append((step, row, row))
        elif trace.dur_ns[row] >= INNER * trace.dur_ns[outer]:
            found[-1] = number, outer, row
    return found
