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
    ``host``                         an operator on the main thread, for show: it does not block launches
    ``backward``                     where the autograd node is (unless given: the middle third of the step)

Words
    ``64MiB`` ``192B``     size of a copy; of a collective the whole message (an all-gather's output)
    ``x10``                ten kernels, copies or collectives of equal length, one directly after another
    ``5us`` ``2ms``        with ``x10``: how long each one is; they start at equal distances
    ``HtoD`` ``DtoH`` ``DtoD`` ``PtoP`` ``pageable``   what a copy is; HtoD from pinned memory unless said
    ``lead=5``             launched 5 ms before its start
    ``unlinked``           the launch is not in the file
    ``name=flash_fwd``     name of the kernel or operator
    ``op=aten::_softmax``  operator that launches the kernel; ``aten::mm`` unless said
    ``dims=8x16,16x32``    shapes of the operator's inputs, which are bf16; not recorded unless said
    ``recomputed``         the backward pass computes a part of the forward pass again
    ``grid=264``           thread blocks of a kernel; 132 unless said
    ``dtype=Float``        element type of a collective or a shape; BFloat16 unless said
    ``ranks=0,1``          the members of a collective's group; other ranks do not take part
    ``peer=1``             the other end of a send or receive
    ``workers``            the loader has worker processes
    ``unit=layers.0``      the sharded unit of an allgather, reducescatter, compute or host interval; with
                           ``x4`` the ``*`` of ``layers.*`` counts up in forward and down in backward
    ``optimizer``          the host interval is an optimizer that launches nothing
    ``prefetch``           the allgather is launched ahead, from the hook of the unit before

Settings, one a line: ``step: 100`` (length; else the largest end), ``steps: 5``, ``lead: 1`` (how long
before its start a kernel is launched, in ms), ``strategy: fsdp2`` (``fsdp1``, ``fsdp2`` or ``zero3``: what
writes ranges around the launches of units; what begins inside ``backward`` belongs to the backward pass).
``rank 1:`` opens a section: a lane named in it replaces that rank's lane of that name, and ``-`` as the only
interval leaves it empty. ``#`` starts a comment.

What follows on the host: the host range of a step is the step shifted ``lead`` earlier, and a launch that
would fall into a loader wait, a sync, a malloc or a free comes when that returns. With a lead of 0.2 ms or
more the host is ahead: between launches it waits for the GPU while that is busy, so that its own work is
what leaves the GPU idle. With less it has no time to wait. In a CPU trace nothing is shifted. The closing
step holds everything that begins before the first compute kernel does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from tracedoc.spans import Spans
from tracedoc.testing.builder import GEMM_KERNEL, TraceBuilder
from tracedoc.testing.document import (
    INPUT_TYPE,
    OPERATIONS,
    ZERO3_OPERATOR,
    UnitUse,
    ranges_around,
    unit_of_part,
)
from tracedoc.testing.lane_words import (
    BLOCKING,
    COMPUTE,
    CPU_OPTIMIZER,
    DEFAULT_STEPS,
    LANE_LEAD_MS,
    Drawing,
    LanesError,
    Segment,
    read_lanes,
)

_GPU_ONLY: Final = ("copy", "memset", *BLOCKING)
_OPTIMIZER: Final = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>",
    "aten::_fused_adamw_",
)
_AHEAD_MS: Final = 0.2  # with this lead the host has time to wait for the GPU
_LAUNCHING_MS: Final = 0.02  # what launches at one moment may take together
_SHORTEST_WAIT_MS: Final = 0.05
_OPERATOR_MS: Final = 0.001  # how long a collective's operator takes on the calling thread of a CPU trace


def parse_lanes(
    text: str,
    *,
    ranks: int = 2,
    steps: int = DEFAULT_STEPS,
    lead: float = LANE_LEAD_MS,
    world_size: int | None = None,
    device: str | None = "NVIDIA H100 80GB HBM3",
    hosts: int = 1,
) -> list[TraceBuilder]:
    """Return a builder for each of the first ``ranks`` ranks, as the lanes in ``text`` say.

    ``device=None`` makes CPU traces; ``hosts`` share the ranks, in order. Settings within the text win over
    the arguments. Raises :class:`LanesError` with the line that is wrong.
    """
    drawing = read_lanes(text, Drawing(steps=steps, lead_ms=0.0 if device is None else lead))
    if device is None:
        drawing.lead_ms = 0.0
    size = ranks if world_size is None else world_size
    lanes_by_rank = [_lanes_of(drawing, rank) for rank in range(ranks)]
    at_times = [[one for lane in lanes.values() for one in lane] for lanes in drawing.by_step.values()]
    _check(drawing, [*lanes_by_rank, *at_times], device=device, world_size=size)
    longest = max((one.end_ms for lanes in lanes_by_rank for one in lanes), default=0.0)
    step_ms = drawing.step_ms if drawing.step_ms is not None else longest
    if step_ms <= 0:
        raise LanesError(1, "the step has no length: draw an interval or say `step: 100`")
    builders = [
        TraceBuilder(rank, size, device=device, host=f"node{rank * hosts // ranks}") for rank in range(ranks)
    ]
    for builder, lanes, closing in zip(builders, lanes_by_rank, _closing_steps(lanes_by_rank), strict=True):
        shape = _Shape(
            step_ms,
            _host_start(lanes, step_ms, drawing.lead_ms),
            drawing.lead_ms,
            _blocked(lanes),
            drawing.strategy,
            _backward(lanes, step_ms),
        )
        draw = _draw_cpu_step if device is None else _draw_gpu_step
        each = [_of_step(drawing, lanes, builder.rank, index) for index in range(drawing.steps)]
        for index, drawn in enumerate(each):
            draw(builder, drawn, index, shape=shape)
        draw(builder, closing, drawing.steps, shape=shape)
        if device is not None and drawing.lead_ms >= _AHEAD_MS:
            _draw_waits(builder, [*each, closing], shape)
    return builders


class _Shape(msgspec.Struct, frozen=True):
    """What all steps of one rank have in common. Blocked intervals are those of the host, in one step."""

    step_ms: float
    host_start_ms: float
    lead_ms: float
    blocked: list[tuple[float, float]]
    strategy: str
    backward: list[tuple[float, float]]

    def use(self, one: Segment, part: int, start_ms: float) -> UnitUse | None:
        """Return the unit that an interval starting at ``start_ms`` of the step belongs to."""
        if not self.strategy or not one.unit:
            return None
        inside = any(begin <= start_ms < end for begin, end in self.backward)
        backward = inside or one.lane == "reducescatter"
        unit = unit_of_part(one.unit, part, one.count, backward=backward)
        return UnitUse(one.lane, unit, backward, one.prefetch)

    def launch_ms(self, segment: Segment, start_ms: float, index: int) -> float:
        """The ms at which the host launches what starts at ``start_ms``, both since the first step began."""
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
        if _draw_host(builder, one, start, end, shape):
            continue
        parts = [(origin + first, origin + last) for first, last in one.parts()]
        launches = [shape.launch_ms(one, first, index) for first, _ in parts]
        if one.lane == "optimizer":
            builder.optimizer(launches[0], launches[-1] + 0.01)
        for number, ((first, last), launch) in enumerate(zip(parts, launches, strict=True)):
            _draw_gpu(builder, one, first, last, launch, shape, shape.use(one, number, first - origin))
    if shape.strategy == "zero3":
        builder.host(ZERO3_OPERATOR, host_start, host_start + 0.002)


def _draw_gpu(
    builder: TraceBuilder,
    one: Segment,
    start: float,
    end: float,
    launch: float,
    shape: _Shape,
    use: UnitUse | None,
) -> None:
    within = ranges_around(shape.strategy, use) if use else ()
    thread = use.thread if use else "autograd" if one.recomputed else "main"
    if one.lane in COMPUTE:
        kernel, op = (GEMM_KERNEL, one.op or "aten::mm") if one.lane == "compute" else _OPTIMIZER
        builder.kernel(
            one.name or kernel, start, end,
            launch_ms=launch, linked=one.linked, op=op, thread=thread, within=within, grid=(one.grid, 1, 1),
            dims=[list(dims) for dims in one.dims] or None, types=_types(one),
        )  # fmt: skip
    elif one.lane == "copy":
        size = one.nbytes if one.nbytes is not None else 1 << 20
        builder.copy(one.direction, start, end, size, pageable=one.pageable, launch_ms=launch)
    elif one.lane == "memset":
        builder.memset(start, end, one.nbytes if one.nbytes is not None else 1 << 20, launch_ms=launch)
    else:
        builder.collective(
            one.lane, start, end,
            nbytes=_message_bytes(one), dtype=one.dtype, group=_group(one), ranks=one.ranks or None,
            stream=one.stream or 20 + 2 * list(OPERATIONS).index(one.lane) + (1 if one.ranks else 0),
            launch_ms=launch, linked=one.linked, peer=one.peer, thread=thread, within=within,
        )  # fmt: skip


def _draw_waits(builder: TraceBuilder, steps: list[list[Segment]], shape: _Shape) -> None:
    """Let the host wait in cudaEventSynchronize where the GPU is busy and nothing is to be launched."""
    busy: list[tuple[float, float]] = []
    occupied: list[tuple[float, float]] = []
    for index, lanes in enumerate(steps):
        origin = index * shape.step_ms
        for one in lanes:
            if one.lane in (*BLOCKING, "loader", "host"):
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
        if _draw_host(builder, one, start, end, shape):
            continue
        for number, (first, last) in enumerate(one.parts()):
            if one.lane in OPERATIONS:
                use = shape.use(one, number, first)
                builder.collective(
                    one.lane, origin + first, origin + last,
                    nbytes=_message_bytes(one), dtype=one.dtype, group=_group(one), ranks=one.ranks or None,
                    peer=one.peer, within=ranges_around(shape.strategy, use) if use else (),
                )  # fmt: skip
            else:
                # The operator of a collective must stand beside this one, not in it: only leaves compute.
                for begin, stop in _around_calls(first, last, calls):
                    dims = [list(size) for size in one.dims] or None
                    operator = one.name or one.op or "aten::mm"
                    builder.host(operator, origin + begin, origin + stop, dims=dims, types=_types(one))


def _types(one: Segment) -> list[str]:
    return [INPUT_TYPE[one.dtype]] * len(one.dims)


def _draw_host(builder: TraceBuilder, one: Segment, start: float, end: float, shape: _Shape) -> bool:
    """Draw a lane of the host; return whether it was one."""
    use = shape.use(one, 0, one.start_ms)
    if one.lane == "host" and use is not None:
        for name in ranges_around(shape.strategy, use):
            builder.host(name, start, end, thread=use.thread, category="user_annotation")
    elif one.name == CPU_OPTIMIZER:
        builder.optimizer(start, end)
    elif one.lane == "host":
        builder.host(one.name or "aten::to", start, end)
    elif one.lane == "backward":
        builder.backward(start, end)
    elif one.lane == "loader":
        builder.loader(start, end, workers=int(one.workers))
    elif one.lane in BLOCKING:
        builder.runtime(BLOCKING[one.lane], start, end)
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
    firsts = [[one for one in lanes if one.lane in COMPUTE][:1] for lanes in lanes_by_rank]
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
    """The ms at which the host begins the step: ``lead`` early, but not inside a wait of the step before."""
    start = -lead_ms
    for begin, end in _blocked(lanes):
        if begin < step_ms + start < end:
            start = end - step_ms
    return start


def _backward(lanes: list[Segment], step_ms: float) -> list[tuple[float, float]]:
    drawn = [(one.start_ms, one.end_ms) for one in lanes if one.lane == "backward"]
    return drawn or [(step_ms / 3, step_ms * 2 / 3)]


def _blocked(lanes: list[Segment]) -> list[tuple[float, float]]:
    return sorted((one.start_ms, one.end_ms) for one in lanes if one.lane == "loader" or one.lane in BLOCKING)


def _message_bytes(one: Segment) -> int:
    return one.nbytes if one.nbytes is not None else 16 << 20


def _group(one: Segment) -> str:
    return "ranks_" + "_".join(map(str, one.ranks)) if one.ranks else "0"


def _lanes_of(drawing: Drawing, rank: int) -> list[Segment]:
    own: Mapping[str, list[Segment]] = {**drawing.common, **drawing.by_rank.get(rank, {})}
    segments = (one for lane in own.values() for one in lane if not one.ranks or rank in one.ranks)
    return sorted(segments, key=lambda one: (one.start_ms, one.line))


def _of_step(drawing: Drawing, lanes: list[Segment], rank: int, step: int) -> list[Segment]:
    """Return a rank's lanes in one step: those drawn for the step replace the lanes of their name."""
    own = {**drawing.by_step.get((None, step), {}), **drawing.by_step.get((rank, step), {})}
    if not own:
        return lanes
    others = [one for one in lanes if one.lane not in own]
    drawn = (one for lane in own.values() for one in lane)
    return sorted([*others, *drawn], key=lambda one: (one.start_ms, one.line))


def _check(
    drawing: Drawing, lanes_by_rank: list[list[Segment]], *, device: str | None, world_size: int
) -> None:
    for rank, lanes in drawing.by_rank.items():
        if rank >= len(lanes_by_rank):
            line = next((one.line for lane in lanes.values() for one in lane), 1)
            raise LanesError(line, f"there is no rank {rank}: the traces are of {len(lanes_by_rank)} ranks")
    for one in (one for lanes in lanes_by_rank for one in lanes):
        if device is None and one.lane in _GPU_ONLY:
            raise LanesError(one.line, f"a CPU trace has no lane {one.lane!r}")
        if one.unit and not drawing.strategy:
            raise LanesError(one.line, "a unit belongs to a strategy: say which, as `strategy: fsdp2`")
        if one.lane in OPERATIONS and world_size < 2:
            raise LanesError(one.line, f"{one.lane} with one rank: there is nobody to talk to")
        if one.lane in ("send", "recv") and one.peer is None and world_size != 2:
            raise LanesError(one.line, f"{one.lane} needs peer= when there are more than two ranks")
