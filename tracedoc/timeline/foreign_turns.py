"""Find the turns of another process on a GPU: idle gaps of one length in front of work that was queued."""

from __future__ import annotations

import numpy as np

from tracedoc.spans import Spans
from tracedoc.trace import vocabulary
from tracedoc.trace.columns import Kind, Trace
from tracedoc.trace.vocabulary import RuntimeRole

FEWEST = 5
"""Fewer gaps of one length may be alike by accident."""

SHORTEST_NS, LONGEST_NS = 300_000, 50_000_000
"""A driver gives each process a few milliseconds; shorter gaps are those between two streams."""

ALIKE = 0.25
"""Gaps that differ by this share from the median are of one length."""

MOSTLY = 0.75
"""So many of the gaps must be of one length."""


def foreign_turns(trace: Trace, queued: Spans) -> Spans:
    """Return when another process had the GPU, of the idle time with work queued (``queued``).

    Processes that share a GPU without MPS or MIG run on it in turns of one length. In between, what this one
    has launched stands in its queue, and nothing of it waits for anything. A CUDA graph whose kernels were
    not recorded looks the same, so that nothing is found in a trace that launches graphs.
    """
    if trace.rows_named(_launches_graph, Kind.RUNTIME).size:
        return Spans.empty()
    length = queued.ends - queued.starts
    long = (length >= SHORTEST_NS) & (length <= LONGEST_NS)
    if long.sum() < FEWEST:
        return Spans.empty()
    usual = float(np.median(length[long]))
    alike = long & (np.abs(length - usual) <= ALIKE * usual)
    if alike.sum() < max(MOSTLY * long.sum(), FEWEST):
        return Spans.empty()
    return Spans(queued.starts[alike], queued.ends[alike])


def _launches_graph(name: str) -> bool:
    return vocabulary.runtime_role(name) is RuntimeRole.GRAPH_LAUNCH
