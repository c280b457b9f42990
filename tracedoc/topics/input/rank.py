"""Facts of one rank about its input: the data loader, and copies of batches from pageable memory."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.spans import Spans
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.launches import NO_ROW, Rows
from tracedoc.topics.step.rank import NO_STEP, idle_of_cause, in_step
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind
from tracedoc.trace.distinct import is_among
from tracedoc.values import Unknown, Value, needed

NO_LOADER = Unknown("no torch DataLoader is visible in this trace")

LOADERS = {"single_process": "training thread", "workers": "worker processes", "pipe": "data pipe"}


@rank_fact(unit="text", needs=("host_ops",), values=LOADERS.values())
def loader_kind(timeline: RankTimeline) -> Value:
    """Where the data loader makes its samples, by the name of its range.

    One of "training thread" (num_workers=0), "worker processes" and "data pipe".
    """
    trace = timeline.trace
    named = [vocabulary.data_loader(name) for name in trace.names]
    kinds = {kind for index, kind in enumerate(named) if kind and (trace.name == index).any()}
    for kind, words in LOADERS.items():
        if kind in kinds:
            return words
    return NO_LOADER


@rank_fact(
    unit="ms",
    needs=("host_ops", "kernels", loader_kind),
    interval="GPU idle while the data loader is waited for",
)
def input_idle_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step in which the device is idle while the host waits for the data loader."""
    if timeline.judged is not None and loader_kind(timeline) == NO_LOADER:
        return NO_LOADER
    return idle_of_cause(timeline, "input")


@rank_fact(unit="ms", needs=("host_ops", loader_kind), interval="the host fetches a batch")
def loading_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step that the host is in the data loader, with the device idle or not."""
    if timeline.judged is None:
        return NO_STEP
    needed(loader_kind(timeline))
    return timeline.host_delays.input.clip(timeline.judged.start_ns, timeline.judged.end_ns)


# -- copies from pageable memory

NOT_TOLD_APART = Unknown("ROCm traces do not distinguish pinned from pageable memory")


@rank_fact(unit="count", needs=("gpu",))
def pageable_copies_per_step(timeline: RankTimeline) -> Value:
    """Copies from pageable host memory to the device in the median step. ROCm does not record the memory."""
    return int(needed(_pageable(timeline)).size)


@rank_fact(unit="bytes", needs=("gpu",))
def pageable_bytes_per_step(timeline: RankTimeline) -> Value:
    """Bytes copied from pageable host memory to the device in the median step."""
    sizes = timeline.trace.nbytes[needed(_pageable(timeline))]
    return Unknown("the copies carry no size") if (sizes < 0).any() else int(sizes.sum())


@rank_fact(unit="ms", needs=("gpu",), interval="copy from pageable memory, or idle during its call")
def pageable_stall_ms(timeline: RankTimeline) -> Spans | Unknown:
    """Time of the median step that copies from pageable memory cost the GPU.

    Exposed time of the copies themselves, and idle time while the host is inside the call that made one
    (a copy from pageable memory blocks the host until it is staged).
    """
    step, rows, trace = needed(in_step(timeline)), needed(_pageable(timeline)), timeline.trace
    copies = Spans.of(trace.ts_ns[rows], trace.end_ns[rows])
    launches = timeline.launches.launch_rows[is_among(timeline.launches.gpu_rows, rows)]
    launches = launches[launches != NO_ROW]
    calls = Spans.of(trace.ts_ns[launches], trace.end_ns[launches])
    return (copies & step.exposed_copy) | (calls & step.busy.complement(step.start_ns, step.end_ns))


def _pageable(timeline: RankTimeline) -> Rows | Unknown:
    """The copies from pageable memory to the device that ran in the analysed step."""
    window, trace = timeline.judged, timeline.trace
    if trace.info.vendor == "amd":
        return NOT_TOLD_APART
    if window is None or timeline.device is None:
        return np.empty(0, dtype=np.intp)
    rows = trace.kind_rows_between(Kind.MEMCPY, window.start_ns, window.end_ns)
    rows = rows[trace.device[rows] == timeline.device]
    return np.asarray(rows[trace.named_among(rows, _is_pageable_copy)])


def _is_pageable_copy(name: str) -> bool:
    copy = vocabulary.copy_kind(name)
    return copy.direction == "HtoD" and copy.source_memory.lower() == "pageable"
