"""Facts about the stalls of sharded units: how long compute waits for their gathers, and why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.sharded_units import NOT_SHARDED, NOT_TIMED
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import StallParts, stall_parts
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.shards.shard_units import FORWARD
from tracedoc.values import Unknown, Value


@run_fact("gather_stall_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def gather_stall_ms(run: RunView) -> dict[str, Value]:
    """Idle time of the compute stream in the median step that the end of a parameter gather ends.

    A gap counts from where the stream has nothing to run and the kernel after it is launched, and if that
    kernel starts within 20 us after the gather (or its copy-out) ends. Time in which the host was late with
    that kernel is not in it, nor is compute on other streams.
    """
    return _stall(run, lambda parts: parts.stall)


@run_fact("forward_gather_stall_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def forward_gather_stall_ms(run: RunView) -> dict[str, Value]:
    """The stalls of :func:`gather_stall_ms` in the forward pass."""
    return _stall(run, lambda parts: np.where(parts.phase == FORWARD, parts.stall, 0))


@run_fact("backward_gather_stall_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def backward_gather_stall_ms(run: RunView) -> dict[str, Value]:
    """The stalls of :func:`gather_stall_ms` in the backward pass, recomputation included."""
    return _stall(run, lambda parts: np.where(parts.phase != FORWARD, parts.stall, 0))


@run_fact(
    "hideable_gather_stall_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="compute waits for a gather that could have come earlier",
)
def hideable_gather_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What earlier gathers would hide of the stalls of :func:`gather_stall_ms`.

    The stalls minus what late peers cause, and minus the time by which the transfers since the gather before
    exceed the compute since its use. The first gather of a step has nothing to hide behind.
    """
    parts = _parts(run, digest, step)
    return parts if isinstance(parts, Unknown) else parts.hideable_spans()


@run_fact(
    "hideable_backward_stall_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    interval="compute of the backward pass waits for a gather that could have come earlier",
)
def hideable_backward_stall_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """The part of :func:`hideable_gather_stall_ms` in the backward pass."""
    parts = _parts(run, digest, step)
    return parts if isinstance(parts, Unknown) else parts.hideable_spans(parts.phase != FORWARD)


@run_fact("gather_stall_wait_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def gather_stall_wait_ms(run: RunView) -> dict[str, Value]:
    """The part of the stalls that would be gone had the last rank come in time.

    A gather that waits beside compute and then transfers without any belongs here too. 0 where the arrivals
    of the peers are unknown.
    """
    return _stall(run, lambda parts: parts.wait)


@run_fact("gather_stall_bandwidth_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def gather_stall_bandwidth_ms(run: RunView) -> dict[str, Value]:
    """The part of the stalls by which transfers take longer than the compute they could hide behind.

    All transfers since the gather before count, reduce-scatters too, because they share the link.
    """
    return _stall(run, lambda parts: parts.bandwidth)


@run_fact("gather_stall_late_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def gather_stall_late_ms(run: RunView) -> dict[str, Value]:
    """The part of the stalls caused by the host launching the gather too late to hide it."""
    return _stall(run, lambda parts: parts.late)


@run_fact("gather_stall_held_ms", unit="ms", scope="rank", needs=("kernels", "collectives", "launches"))
def gather_stall_held_ms(run: RunView) -> dict[str, Value]:
    """The part of the stalls whose gather was launched in time and yet started late: not fetched ahead."""
    return _stall(run, lambda parts: parts.held)


CAUSES = (
    "not prefetched",
    "launched too late",
    "peers late",
    "bandwidth",
    "bandwidth or peers late",
    "first",
)
"""Why gathers stall."""


@run_fact(
    "gather_stall_cause",
    unit="text",
    scope="rank",
    needs=("kernels", "collectives", "launches"),
    values=CAUSES,
)
def gather_stall_cause(run: RunView) -> dict[str, Value]:
    """The largest cause of the stalls.

    One of "not prefetched" (launched in time, but it starts when the compute before has ended),
    "launched too late", "peers late", "bandwidth", "bandwidth or peers late" (where not all arrivals of the
    peers are known) and "first" (of the step).
    """
    return run.by_rank(lambda digest, step: _cause(run, digest, step))


def _cause(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    parts = _parts(run, digest, step)
    if isinstance(parts, Unknown):
        return parts
    totals = {
        "not prefetched": int(parts.held.sum()),
        "launched too late": int(parts.late.sum()),
        "peers late": int(parts.wait.sum()),
        "bandwidth" if parts.known.all() else "bandwidth or peers late": int(parts.bandwidth.sum()),
        "first": int(parts.first.sum()),
    }
    largest = max(totals, key=lambda cause: totals[cause])
    return largest if totals[largest] > 0 else Unknown("no gather stalls the compute stream")


def _stall(run: RunView, part: Callable[[StallParts], npt.NDArray[np.int64]]) -> dict[str, Value]:
    def total(digest: RankDigest, step: StepDigest) -> Value:
        parts = _parts(run, digest, step)
        return parts if isinstance(parts, Unknown) else int(part(parts).sum()) / 1e6

    return run.by_rank(total)


def _parts(run: RunView, digest: RankDigest, step: StepDigest) -> StallParts | Unknown:
    if digest.units is None:
        return NOT_SHARDED
    return stall_parts(run, digest, step) or NOT_TIMED
