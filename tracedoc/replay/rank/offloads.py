"""Tell which parts of a program are there for offloading: large copies, and an optimizer on the CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tracedoc.replay.rank.gpu_events import DeviceEvents
from tracedoc.replay.rank.program import Group, RankProgram
from tracedoc.spans import Int64Array, Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.stalls import LARGE_COPY_BYTES, cpu_optimizer_spans, offloads
from tracedoc.trace.distinct import is_among


def optimizer_on_cpu(timeline: RankTimeline) -> Spans | None:
    """Return when the optimizer runs on the CPU, ``None`` where the rank does not offload."""
    spans = cpu_optimizer_spans(timeline)
    return spans if offloads(timeline, spans) else None


def with_offloading(
    program: RankProgram,
    timeline: RankTimeline,
    device: DeviceEvents,
    events: npt.NDArray[np.intp],
    *,
    optimizer: Spans | None,
    position: int,
    starts_ns: Int64Array,
) -> RankProgram:
    """Return the program with what offloading does in it; ``starts_ns`` is when its points start.

    Large copies between host and device that the step itself launches count, after its first compute: those
    before it bring the batch. ``events`` are those of the program, ``position`` is that of its step.
    """
    if optimizer is None:
        return program
    copies = is_among(program.group, np.array([Group.COPY_IN, Group.COPY_OUT], dtype=np.uint8))
    large = timeline.trace.nbytes[device.rows[events]] >= LARGE_COPY_BYTES
    compute = device.compute.events
    first = compute[device.step[compute] == position]
    own = device.step[events] == position
    if first.size:
        own &= device.launched_ns[events] > device.launched_ns[first].min()
    inside = optimizer.covered_ns(starts_ns - program.lag, starts_ns)
    points = np.flatnonzero(inside > 0)
    return replace(
        program,
        offload_event=np.flatnonzero(copies & large & own).astype(np.int32),
        offload_point=points.astype(np.int32),
        offload_ns=inside[points],
    )
