"""One rank's capture as one graph: calls of the host, events of the GPU, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from tracedoc.spans import Int64Array, Spans
from tracedoc.step.calls import Calls, find_calls, ready_lags, with_hidden_waits
from tracedoc.step.cpu_program import CpuGraph, cpu_graph
from tracedoc.step.events import RANK_OF_COMPUTE, DeviceEvents, device_events
from tracedoc.step.notes import find_doings, measure_contention, ranges_by_thread
from tracedoc.step.program import Doing, Unplayable
from tracedoc.step.waits import Waits, find_waits
from tracedoc.step.waste import WasteTable, find_waste
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import Rows


class StepGraph(msgspec.Struct, frozen=True, eq=False):
    """Who does what and waits for whom: programs of steps and the path between ranks are made from it.

    The program of step ``p`` begins with the call at ``cuts_ns[p]``: the one that launched the step's first
    compute kernel. So it is as long as the step is on the GPU, and what the host does before that kernel
    belongs to the program before. ``home`` is the step whose program each event belongs to; ``early`` are
    collectives that the program before launches. ``doings`` are when the host does what beside launching,
    ``waste`` is what kernels would save.
    """

    timeline: RankTimeline
    calls: Calls
    device: DeviceEvents
    waits: Waits
    ready_lag: Int64Array
    ranges: Mapping[int, Rows]
    cuts_ns: Int64Array
    home: Int64Array
    early: npt.NDArray[np.bool_]
    contention: float
    doings: Mapping[Doing, Spans]
    waste: WasteTable


def find_graph(timeline: RankTimeline) -> StepGraph | CpuGraph | Unplayable:
    """The graph of a rank, on a GPU or on CPUs; or why there is none."""
    return cpu_graph(timeline) if timeline.is_cpu else _gpu_graph(timeline)


def _gpu_graph(timeline: RankTimeline) -> StepGraph | Unplayable:
    if timeline.device is None:
        return Unplayable("no GPU activity was captured")
    device = device_events(timeline)
    contention = measure_contention(timeline, device)
    calls = with_hidden_waits(timeline.trace, find_calls(timeline), device)
    if device.streams.size > 250:
        return Unplayable("more streams than a program holds")
    waits = find_waits(timeline, calls, device)
    cuts = _cuts(timeline, device)
    home = np.where(device.linked, np.searchsorted(cuts, device.launched_ns, side="right") - 1, device.step)
    if timeline.host.steps:  # what follows the last marked step is none of its work
        home[device.linked & (device.launched_ns >= timeline.host.steps[-1].end_ns)] = cuts.size
    # Ranks must agree on which step a collective belongs to, whatever each launches first.
    early = (device.row >= 0) & (device.step == home + 1) & (device.step < cuts.size)
    home = np.where(early, device.step, home)
    return StepGraph(
        timeline=timeline,
        calls=calls,
        device=device,
        waits=waits,
        ready_lag=ready_lags(timeline.trace, calls, waits.own_ns),
        ranges=ranges_by_thread(timeline.trace, calls.thread),
        cuts_ns=cuts,
        home=home,
        early=early,
        contention=contention,
        doings=find_doings(timeline),
        waste=find_waste(timeline),
    )


def _cuts(timeline: RankTimeline, device: DeviceEvents) -> Int64Array:
    """The launch of each step's first compute kernel, else the beginning of its host range, in ns."""
    steps = timeline.host.steps
    cuts = np.array([step.start_ns for step in steps], dtype=np.int64)
    kernels = device.lanes[device.compute_stream].events
    kernels = kernels[(device.rank[kernels] == RANK_OF_COMPUTE) & device.linked[kernels]]
    position = device.step[kernels]
    kernels = kernels[(position >= 0) & (position < len(steps))][::-1]
    cuts[device.step[kernels]] = device.launched_ns[kernels]  # backwards: the first kernel of a step counts
    return np.maximum.accumulate(cuts) if cuts.size else cuts
