"""Draw the step of a training job as lanes of text, and get the traces of its ranks.

::

    compute    0-60
    allreduce  60-100  64MiB

Each line is a lane: its name, then intervals ``START-END`` in milliseconds since the step began, each
followed by words about it. A set of lanes is one step; it is repeated, and closed by the first kernel of
a further step, so that every step is complete. All ranks step together.

Lanes
    ``compute``                      kernels on the compute stream (CPU traces: operators)
    ``optimizer``                    the same, launched inside an ``Optimizer.step`` range
    ``copy``, ``memset``             GPU copies and memsets
    ``allreduce`` ``allgather`` ``reducescatter`` ``broadcast`` ``reduce`` ``alltoall`` ``send`` ``recv``
    ``barrier``                      collectives, on the communication stream
    ``loader``                       the host waits for the next batch
    ``sync``, ``malloc``, ``free``   the host is inside cudaStreamSynchronize, cudaMalloc, cudaFree
    ``host``                         an operator on the main thread, for show: it does not hold up launches
    ``backward``                     where the autograd node is (unless given: the middle third of the step)

Words
    ``64MiB`` ``192B``     size of a copy; of a collective the whole message (an all-gather's output)
    ``x10``                ten kernels, copies or collectives of equal length, one directly after another
    ``5us`` ``2ms``        with ``x10``: how long each one is; they start at equal distances
    ``HtoD`` ``DtoH`` ``DtoD`` ``PtoP`` ``pageable``   what a copy is; HtoD from pinned memory unless said
    ``lead=5``             launched 5 ms before its start
    ``unlinked``           the launch is not in the file
    ``name=flash_fwd``     name of the kernel or operator
    ``dtype=Float``        element type of a collective; BFloat16 unless said
    ``ranks=0,1``          the members of a collective's group; other ranks do not take part
    ``peer=1``             the other end of a send or receive
    ``workers``            the loader has worker processes

Settings, one a line: ``step: 100`` (length; else the largest end), ``steps: 5``, ``lead: 1`` (how long
before its start a kernel is launched, in ms). ``rank 1:`` opens a section: a lane named in it replaces
that rank's lane of that name, and ``-`` as the only interval leaves it empty. ``#`` starts a comment.

What follows on the host: the host range of a step is the step shifted ``lead`` earlier, and a launch that
would fall into a loader wait, a sync, a malloc or a free comes when that returns. With a lead of 0.2 ms or
more the host is ahead: between launches it waits for the GPU while that is busy, so that its own work is
what leaves the GPU idle. With less it has no time to wait. In a CPU trace nothing is shifted. The closing
step holds everything that begins before the first compute kernel does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tracedoc.spans import Spans
from tracedoc.testing.builder import GEMM_KERNEL, TraceBuilder
from tracedoc.testing.names import OPERATIONS

Direction = Literal["HtoD", "DtoH", "DtoD", "PtoP"]

DEFAULT_STEPS: Final = 5
DEFAULT_LEAD_MS: Final = 1.0

_DIRECTIONS: Final[dict[str, Direction]] = {"HtoD": "HtoD", "DtoH": "DtoH", "DtoD": "DtoD", "PtoP": "PtoP"}
_BLOCKING: Final = {"sync": "cudaStreamSynchronize", "malloc": "cudaMalloc", "free": "cudaFree"}
_COMPUTE: Final = ("compute", "optimizer")
_GPU_ONLY: Final = ("copy", "memset", *_BLOCKING)
LANES: Final = (*_COMPUTE, "copy", "memset", *OPERATIONS, "loader", *_BLOCKING, "host", "backward")
"""Every lane's name."""

_OPTIMIZER: Final = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>",
    "aten::_fused_adamw_",
)
_NUMBER: Final = r"\d+(?:\.\d+)?"
_INTERVAL: Final = re.compile(rf"({_NUMBER})-({_NUMBER})")
_SIZE: Final = re.compile(rf"({_NUMBER})(B|KiB|MiB|GiB)")
_TIMES: Final = re.compile(r"x(\d+)")
_LENGTH: Final = re.compile(rf"({_NUMBER})(us|ms)")
_SETTING: Final = re.compile(rf"(step|steps|lead)\s*:\s*({_NUMBER})")
_SECTION: Final = re.compile(r"rank\s+(\d+)\s*:")
_SIZES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AHEAD_MS: Final = 0.2  # with this lead the host has time to wait for the GPU
_LAUNCHING_MS: Final = 0.02  # what launches at one moment may take together
_SHORTEST_WAIT_MS: Final = 0.05
_OPERATOR_MS: Final = 0.001  # how long a collective's operator takes on the calling thread of a CPU trace


class LanesError(ValueError):
    """Lanes that cannot be read; ``line`` counts from 1 within the text."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True)
class Segment:
    """One interval of a lane, in milliseconds since the step began, and the words about it."""

    lane: str
    start_ms: float
    end_ms: float
    line: int
    nbytes: int | None = None
    count: int = 1
    each_ms: float | None = None
    direction: Direction = "HtoD"
    pageable: bool = False
    lead_ms: float | None = None
    linked: bool = True
    name: str = ""
    dtype: str = "BFloat16"
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    workers: bool = False

    def parts(self) -> list[tuple[float, float]]:
        """Return the intervals of the ``count`` kernels, copies or collectives that it stands for."""
        stride = (self.end_ms - self.start_ms) / self.count
        length = stride if self.each_ms is None else self.each_ms
        starts = [self.start_ms + i * stride for i in range(self.count)]
        if self.each_ms is None:  # neighbours share their ends exactly, whatever the division gave
            return list(zip(starts, [*starts[1:], self.end_ms], strict=True))
        return [(start, start + length) for start in starts]


@dataclass(slots=True)
class _Drawing:
    step_ms: float | None = None
    steps: int = DEFAULT_STEPS
    lead_ms: float = DEFAULT_LEAD_MS
    common: dict[str, list[Segment]] = field(default_factory=dict)
    by_rank: dict[int, dict[str, list[Segment]]] = field(default_factory=dict)


def parse_lanes(
    text: str,
    *,
    ranks: int = 2,
    steps: int = DEFAULT_STEPS,
    lead: float = DEFAULT_LEAD_MS,
    world_size: int | None = None,
    device: str | None = "NVIDIA H100 80GB HBM3",
) -> list[TraceBuilder]:
    """Return a builder for each of the first ``ranks`` ranks, as the lanes in ``text`` say.

    ``device=None`` makes CPU traces. Settings within the text win over the arguments. Raises
    :class:`LanesError` with the line that is wrong.
    """
    drawing = _read(text, _Drawing(steps=steps, lead_ms=0.0 if device is None else lead))
    if device is None:
        drawing.lead_ms = 0.0
    size = ranks if world_size is None else world_size
    lanes_by_rank = [_lanes_of(drawing, rank) for rank in range(ranks)]
    _check(drawing, lanes_by_rank, device=device, world_size=size)
    longest = max((one.end_ms for lanes in lanes_by_rank for one in lanes), default=0.0)
    step_ms = drawing.step_ms if drawing.step_ms is not None else longest
    if step_ms <= 0:
        raise LanesError(1, "the step has no length: draw an interval or say `step: 100`")
    builders = [TraceBuilder(rank, size, device=device) for rank in range(ranks)]
    for builder, lanes, closing in zip(builders, lanes_by_rank, _closing_steps(lanes_by_rank), strict=True):
        shape = _Shape(
            step_ms, _host_start(lanes, step_ms, drawing.lead_ms), drawing.lead_ms, _blocked(lanes)
        )
        draw = _draw_cpu_step if device is None else _draw_gpu_step
        for index in range(drawing.steps):
            draw(builder, lanes, index, shape=shape)
        draw(builder, closing, drawing.steps, shape=shape)
        if device is not None and drawing.lead_ms >= _AHEAD_MS:
            _draw_waits(builder, [*([lanes] * drawing.steps), closing], shape)
    return builders


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all steps of one rank have in common. Blocked intervals are those of the host, in one step."""

    step_ms: float
    host_start_ms: float
    lead_ms: float
    blocked: list[tuple[float, float]]

    def launch_ms(self, segment: Segment, start_ms: float, index: int) -> float:
        """Return when the host launches what starts at ``start_ms``, both since the first step began."""
        lead = self.lead_ms if segment.lead_ms is None else segment.lead_ms
        host_start = index * self.step_ms + self.host_start_ms
        # Within the host range of its own step, or it would be counted in another one.
        at = min(max(start_ms - lead, host_start), host_start + self.step_ms - 0.05)
        for number in (index - 1, index):
            for begin, end in self.blocked:
                if number * self.step_ms + begin <= at < number * self.step_ms + end:
                    at = number * self.step_ms + end
        return min(at, start_ms)


def _draw_gpu_step(builder: TraceBuilder, lanes: list[Segment], index: int, *, shape: _Shape) -> None:
    origin = index * shape.step_ms
    host_start = origin + shape.host_start_ms
    builder.step(index, host_start, host_start + shape.step_ms)
    if not any(one.lane == "backward" for one in lanes):
        builder.backward(host_start + shape.step_ms / 3, host_start + shape.step_ms * 2 / 3)
    for one in lanes:
        start, end = origin + one.start_ms, origin + one.end_ms
        if _draw_host(builder, one, start, end):
            continue
        parts = [(origin + first, origin + last) for first, last in one.parts()]
        launches = [shape.launch_ms(one, first, index) for first, _ in parts]
        if one.lane == "optimizer":
            builder.optimizer(launches[0], launches[-1] + 0.01)
        for (first, last), launch in zip(parts, launches, strict=True):
            _draw_gpu(builder, one, first, last, launch)


def _draw_gpu(builder: TraceBuilder, one: Segment, start: float, end: float, launch: float) -> None:
    if one.lane in _COMPUTE:
        kernel, op = (GEMM_KERNEL, "aten::mm") if one.lane == "compute" else _OPTIMIZER
        builder.kernel(one.name or kernel, start, end, launch_ms=launch, linked=one.linked, op=op)
    elif one.lane == "copy":
        size = one.nbytes if one.nbytes is not None else 1 << 20
        builder.copy(one.direction, start, end, size, pageable=one.pageable, launch_ms=launch)
    elif one.lane == "memset":
        builder.memset(start, end, one.nbytes if one.nbytes is not None else 1 << 20, launch_ms=launch)
    else:
        builder.collective(
            one.lane, start, end,
            nbytes=_message_bytes(one), dtype=one.dtype, group=_group(one), ranks=one.ranks or None,
            stream=20 + 2 * list(OPERATIONS).index(one.lane) + (1 if one.ranks else 0),
            launch_ms=launch, linked=one.linked, peer=one.peer,
        )  # fmt: skip


def _draw_waits(builder: TraceBuilder, steps: list[list[Segment]], shape: _Shape) -> None:
    """Let the host wait in cudaEventSynchronize where the GPU is busy and nothing is to be launched."""
    busy: list[tuple[float, float]] = []
    occupied: list[tuple[float, float]] = []
    for index, lanes in enumerate(steps):
        origin = index * shape.step_ms
        boundary = origin + shape.host_start_ms
        occupied.append((boundary - 0.001, boundary + 0.001))
        for one in lanes:
            if one.lane in (*_BLOCKING, "loader", "host"):
                occupied.append((origin + one.start_ms, origin + one.end_ms))
            elif one.lane != "backward":
                for start, end in one.parts():
                    launch = shape.launch_ms(one, origin + start, index)
                    busy.append((origin + start, origin + end))
                    returns = origin + end if one.pageable else launch + _LAUNCHING_MS
                    occupied.append((launch, returns))
    waits = _spans(busy) - _spans(occupied)
    for start_ns, end_ns in waits.pairs():
        if end_ns - start_ns >= _SHORTEST_WAIT_MS * 1e6:
            builder.runtime("cudaEventSynchronize", start_ns / 1e6, end_ns / 1e6)


def _spans(intervals: list[tuple[float, float]]) -> Spans:
    return Spans.from_pairs((round(start * 1e6), round(end * 1e6)) for start, end in intervals)


def _draw_cpu_step(builder: TraceBuilder, lanes: list[Segment], index: int, *, shape: _Shape) -> None:
    origin = index * shape.step_ms
    builder.step(index, origin, origin + shape.step_ms)
    calls = [start for one in lanes if one.lane in OPERATIONS for start, _ in one.parts()]
    last_compute = max((one.start_ms for one in lanes if one.lane == "compute"), default=None)
    drawn = any(one.lane == "backward" for one in lanes)
    if last_compute is None and not drawn:
        builder.backward(origin, origin + _OPERATOR_MS)
    for one in lanes:
        start, end = origin + one.start_ms, origin + one.end_ms
        if one.lane == "optimizer":
            builder.optimizer(start, end)
        if one.lane == "compute" and one.start_ms == last_compute and not drawn:
            builder.backward(start, end)
        if _draw_host(builder, one, start, end):
            continue
        for first, last in one.parts():
            if one.lane in OPERATIONS:
                builder.collective(
                    one.lane, origin + first, origin + last,
                    nbytes=_message_bytes(one), dtype=one.dtype, group=_group(one), ranks=one.ranks or None,
                    peer=one.peer,
                )  # fmt: skip
            else:
                # The operator of a collective must stand beside this one, not in it: only leaves compute.
                for begin, stop in _around_calls(first, last, calls):
                    builder.host(one.name or "aten::mm", origin + begin, origin + stop)


def _draw_host(builder: TraceBuilder, one: Segment, start: float, end: float) -> bool:
    """Draw a lane of the host; return whether it was one."""
    if one.lane == "host":
        builder.host(one.name or "aten::to", start, end)
    elif one.lane == "backward":
        builder.backward(start, end)
    elif one.lane == "loader":
        builder.loader(start, end, workers=int(one.workers))
    elif one.lane in _BLOCKING:
        builder.runtime(_BLOCKING[one.lane], start, end)
    else:
        return False
    return True


def _around_calls(start: float, end: float, calls: list[float]) -> list[tuple[float, float]]:
    pieces: list[tuple[float, float]] = []
    for call in sorted(calls):
        if start <= call < end:
            if call > start:
                pieces.append((start, call))
            start = call + _OPERATOR_MS
    if end > start:
        pieces.append((start, end))
    return pieces


def _closing_steps(lanes_by_rank: list[list[Segment]]) -> list[list[Segment]]:
    """Return for each rank what begins before its first compute kernel, and the head of that kernel.

    Every rank closes with the same number of collectives, else they could not be matched.
    """
    firsts = [[one for one in lanes if one.lane in _COMPUTE][:1] for lanes in lanes_by_rank]
    horizons = [first[0].start_ms if first else 0.0 for first in firsts]
    calls = max(
        sum(one.lane in OPERATIONS and one.start_ms < max(horizons) for one in lanes)
        for lanes in lanes_by_rank
    )
    closing: list[list[Segment]] = []
    for lanes, first, horizon in zip(lanes_by_rank, firsts, horizons, strict=True):
        before = [one for one in lanes if one.lane not in OPERATIONS and one.start_ms < horizon]
        collectives = [one for one in lanes if one.lane in OPERATIONS][:calls]
        head = [replace(one, end_ms=one.start_ms + 0.001, count=1, each_ms=None) for one in first]
        closing.append([*before, *collectives, *head])
    return closing


def _host_start(lanes: list[Segment], step_ms: float, lead_ms: float) -> float:
    """Return where the host begins the step: ``lead`` early, but not inside a wait of the step before."""
    start = -lead_ms
    for begin, end in _blocked(lanes):
        if begin < step_ms + start < end:
            start = end - step_ms
    return start


def _blocked(lanes: list[Segment]) -> list[tuple[float, float]]:
    return sorted(
        (one.start_ms, one.end_ms) for one in lanes if one.lane == "loader" or one.lane in _BLOCKING
    )


def _message_bytes(one: Segment) -> int:
    return one.nbytes if one.nbytes is not None else 16 << 20


def _group(one: Segment) -> str:
    return "ranks_" + "_".join(map(str, one.ranks)) if one.ranks else "0"


def _lanes_of(drawing: _Drawing, rank: int) -> list[Segment]:
    own: Mapping[str, list[Segment]] = {**drawing.common, **drawing.by_rank.get(rank, {})}
    segments = (one for lane in own.values() for one in lane if not one.ranks or rank in one.ranks)
    return sorted(segments, key=lambda one: (one.start_ms, one.line))


def _check(
    drawing: _Drawing, lanes_by_rank: list[list[Segment]], *, device: str | None, world_size: int
) -> None:
    for rank, lanes in drawing.by_rank.items():
        if rank >= len(lanes_by_rank):
            line = next((one.line for lane in lanes.values() for one in lane), 1)
            raise LanesError(line, f"there is no rank {rank}: the traces are of {len(lanes_by_rank)} ranks")
    for one in (one for lanes in lanes_by_rank for one in lanes):
        if device is None and one.lane in _GPU_ONLY:
            raise LanesError(one.line, f"a CPU trace has no lane {one.lane!r}")
        if one.lane in OPERATIONS and world_size < 2:
            raise LanesError(one.line, f"{one.lane} with one rank: there is nobody to talk to")
        if one.lane in ("send", "recv") and one.peer is None and world_size != 2:
            raise LanesError(one.line, f"{one.lane} needs peer= when there are more than two ranks")


# Reading ------------------------------------------------------------------------------------------


def _read(text: str, drawing: _Drawing) -> _Drawing:
    lanes = drawing.common
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if section := _SECTION.fullmatch(line):
            lanes = drawing.by_rank.setdefault(int(section[1]), {})
        elif setting := _SETTING.fullmatch(line):
            _set(drawing, setting[1], setting[2], number)
        else:
            name, *words = line.split()
            if name not in LANES:
                raise LanesError(number, f"unknown lane {name!r}; lanes are {', '.join(LANES)}")
            lanes.setdefault(name, []).extend(_segments(name, words, number))
    return drawing


def _set(drawing: _Drawing, name: str, value: str, line: int) -> None:
    if name == "steps":
        if not value.isdigit() or int(value) < 1:
            raise LanesError(line, f"steps: {value} is not a whole number from 1 on")
        drawing.steps = int(value)
    elif name == "step":
        drawing.step_ms = float(value)
    else:
        drawing.lead_ms = float(value)


def _segments(lane: str, words: list[str], line: int) -> list[Segment]:
    if words == ["-"]:
        return []
    segments: list[Segment] = []
    for word in words:
        if interval := _INTERVAL.fullmatch(word):
            start, end = float(interval[1]), float(interval[2])
            if end <= start:
                raise LanesError(line, f"{word} ends before it starts")
            segments.append(Segment(lane, start, end, line))
        elif not segments:
            raise LanesError(line, f"expected an interval such as 0-60 after {lane}, not {word!r}")
        else:
            segments[-1] = _described(segments[-1], word)
    if not segments:
        raise LanesError(line, f"expected an interval such as 0-60 after {lane}")
    for one in segments:
        if one.each_ms is not None and one.each_ms * one.count > (one.end_ms - one.start_ms) * 1.000001:
            raise LanesError(line, f"{one.count} of {one.each_ms:g} ms do not fit into the interval")
    return segments


def _described(one: Segment, word: str) -> Segment:
    """Return the segment with what ``word`` says about it."""
    if (size := _SIZE.fullmatch(word)) and (one.lane in OPERATIONS or one.lane in ("copy", "memset")):
        return replace(one, nbytes=int(float(size[1]) * _SIZES[size[2]]))
    if one.lane in OPERATIONS or one.lane in (*_COMPUTE, "copy", "memset"):
        if (times := _TIMES.fullmatch(word)) and int(times[1]) > 0:
            return replace(one, count=int(times[1]))
        if length := _LENGTH.fullmatch(word):
            return replace(one, each_ms=float(length[1]) / (1000 if length[2] == "us" else 1))
        if re.fullmatch(rf"lead={_NUMBER}", word):
            return replace(one, lead_ms=float(word[5:]))
    if one.lane in OPERATIONS or one.lane in _COMPUTE:
        if word == "unlinked":
            return replace(one, linked=False)
        if one.lane in OPERATIONS and word.startswith("dtype="):
            return replace(one, dtype=word[6:])
    if one.lane in OPERATIONS and re.fullmatch(r"ranks=\d+(,\d+)+", word):
        return replace(one, ranks=tuple(sorted(int(rank) for rank in word[6:].split(","))))
    if one.lane in ("send", "recv") and re.fullmatch(r"peer=\d+", word):
        return replace(one, peer=int(word[5:]))
    if one.lane == "copy" and word in _DIRECTIONS:
        return replace(one, direction=_DIRECTIONS[word])
    if one.lane == "copy" and word == "pageable":
        return replace(one, pageable=True)
    if one.lane in ("compute", "optimizer", "host") and word.startswith("name="):
        return replace(one, name=word[5:])
    if one.lane == "loader" and word == "workers":
        return replace(one, workers=True)
    raise LanesError(one.line, f"{word!r} says nothing about {one.lane}")
