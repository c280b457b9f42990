"""Choose the rank whose memory is shown, and lay it out over time."""

from __future__ import annotations

from tracedoc.charts import MemoryCurve
from tracedoc.ranks.run_view import RunView


def memory_curve(run: RunView) -> MemoryCurve | None:
    """Return the memory of the rank that holds most of it at once; ``None`` where no rank recorded it."""
    found = [(digest, digest.memory) for digest in run.digests if digest.memory is not None]
    if not found:
        return None
    digest, memory = max(found, key=lambda pair: (int(pair[1].reserved.max()), -pair[0].rank))
    return MemoryCurve(
        rank=digest.rank,
        times_ms=tuple(round(ns / 1e6, 3) for ns in (memory.at_ns - digest.start_ns).tolist()),
        allocated=tuple(memory.allocated.tolist()),
        reserved=tuple(memory.reserved.tolist()),
        device_bytes=memory.device_bytes,
    )
