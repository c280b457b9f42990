"""Facts about the size of sharded units: gathers too small for the link, and what larger units would save."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.sharded_units import NOT_SHARDED
from tracedoc.facts.per_run.exposed_communication import latency_bound_bytes
from tracedoc.facts.per_run.links import half_rate_bytes
from tracedoc.ranks.bandwidth import RING_SHARE
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.device import unlisted
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.shards.shard_units import FORWARD
from tracedoc.trace.devices import device_peak
from tracedoc.values import Unknown, Value

SMALL_ON_CPU = 1 << 20
"""Below this many bytes a transfer between processes of a host is mostly calls and switches of threads."""


@run_fact("latency_bound_gathers_frac", unit="fraction", scope="rank", needs=("collectives",))
def latency_bound_gathers_frac(run: RunView) -> dict[str, Value]:
    """Share of the median step's parameter gathers that are too small to use the link.

    Latency-bound is as in :func:`latency_bound_frac`; gathers without a size are left out.
    """

    def share(digest: RankDigest, step: StepDigest) -> Value:
        limit = latency_bound_bytes(run, digest)
        if digest.units is None:
            return NOT_SHARDED
        if isinstance(limit, Unknown):
            return limit
        calls = digest.units.units.gathers
        mine = (calls.step == step.index) & (calls.nbytes > 0)
        small = calls.nbytes[mine] < limit[calls.row[mine]]
        return float(small.mean()) if small.size else Unknown("the gathers carry no sizes")

    return run.by_rank(share)


@run_fact(
    "sharded_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives"),
    interval="gather or reduce-scatter with no compute beside it",
)
def sharded_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers and reduce-scatters of units, less known waiting."""
    if digest.units is None:
        return NOT_SHARDED
    return run.exposed_transfer(digest, step, _rows(digest))


@run_fact(
    "regather_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives"),
    interval="gather of the backward pass with no compute beside it",
)
def regather_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers of the backward pass, less known waiting."""
    if digest.units is None:
        return NOT_SHARDED
    calls = digest.units.units.gathers
    return run.exposed_transfer(digest, step, calls.row[calls.phase != FORWARD])


@run_fact("mergeable_exposed_ms", unit="ms", scope="rank", needs=("kernels", "collectives"))
def mergeable_exposed_ms(run: RunView) -> dict[str, Value]:
    """Exposed time of the median step that gathers and reduce-scatters would not take if units were merged.

    Each call takes longer than its bytes at the full rate of the link need. Of a transfer of this run,
    latency is ``half / (size + half)`` (:func:`latency_bound_frac` has the half-rate size), of a
    latency-bound one all beyond its bytes; it may be hidden and still delay what is exposed. Merged, the
    share of calls disappears by which units outnumber blocks: so much of the latency, at most of the
    exposed time less known waiting. In a CPU run, whose link is not known, so much of the exposed time of
    calls below 1 MiB.
    """

    def saved(digest: RankDigest, step: StepDigest) -> Value:
        limit, gbps = latency_bound_bytes(run, digest), _ring_gbps(digest)
        halves = half_rate_bytes(run, digest)
        share = _merged_share(digest)
        if isinstance(share, Unknown):
            return share
        if digest.is_cpu:
            sizes = digest.collectives.nbytes
            small = _rows(digest) & (sizes >= 0) & (sizes < SMALL_ON_CPU)
            return run.exposed_transfer(digest, step, small).total_ns * share / 1e6
        if isinstance(limit, Unknown) or isinstance(halves, Unknown) or gbps is None:
            return limit if isinstance(limit, Unknown) else Unknown("the rate of the link is not known")
        table = digest.collectives
        rows = _rows(digest) & table.in_window(step.start_ns, step.end_ns) & (table.nbytes >= 0)
        sizes, ends = table.nbytes[rows], table.end_ns[rows]
        begins = run.arrivals[digest.rank].last_arrival_ns(table)[rows]
        inside = digest.exposed_comm.clip(step.start_ns, step.end_ns)
        exposed = inside.covered_ns(begins, ends)
        beyond = np.maximum(ends - begins - sizes * _ring_factor(run, digest) / gbps, 0)
        small = sizes < limit[rows]
        latency = np.where(
            small, beyond, np.minimum(beyond, (ends - begins) * halves[rows] / (sizes + halves[rows]))
        )
        return min(float(latency.sum()), float(exposed.sum())) * share / 1e6

    return run.by_rank(saved)


@run_fact("fine_wrapping_cost_ms", unit="ms", scope="rank", needs=("kernels", "collectives"))
def fine_wrapping_cost_ms(run: RunView) -> dict[str, Value]:
    """What units smaller than a block cost the median step: latency of calls, idle time under hooks.

    The sum of :func:`mergeable_exposed_ms` and the same share of :func:`sharding_hook_idle_ms`, which is left
    out where no hooks are in the trace.
    """
    merged = mergeable_exposed_ms(run)

    def cost(digest: RankDigest, step: StepDigest) -> Value:
        exposed, share = merged[str(digest.rank)], _merged_share(digest)
        if isinstance(exposed, Unknown) or isinstance(share, Unknown):
            return exposed if isinstance(exposed, Unknown) else share
        idle = digest.facts.get("sharding_hook_idle_ms")
        return float(exposed) + (share * float(idle) if isinstance(idle, float) else 0.0)

    return run.by_rank(cost)


@run_fact("block_gather_estimate_ms", unit="ms", scope="rank", needs=("collectives",))
def block_gather_estimate_ms(run: RunView) -> dict[str, Value]:
    """How long one gather of a whole block should take on this GPU's link, all ranks present.

    A curve with half of 80 % of the link's rate at the half-rate size of :func:`latency_bound_frac`; slower
    links between nodes are not in it.
    """

    def estimate(digest: RankDigest, step: StepDigest) -> Value:
        size, gbps, peak = digest.facts.get("block_bytes"), _ring_gbps(digest), device_peak(digest.device)
        if not isinstance(size, float):
            return size if isinstance(size, Unknown) else NOT_SHARDED
        if gbps is None or peak is None or peak.link_gbps is None:
            return unlisted(digest.device)
        halves = half_rate_bytes(run, digest)
        if isinstance(halves, Unknown):
            return halves
        half = float(np.median(halves[_rows(digest)]))
        return _ring_factor(run, digest) * (size + half) / gbps / 1e6

    return run.by_rank(estimate)


def fine_wrapping_spans(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Return where :func:`fine_wrapping_cost_ms` lies: exposed latency-bound calls, idle time under hooks.

    They are longer than it, for merged calls take time as well.
    """
    limit = latency_bound_bytes(run, digest)
    hooks = digest.spans("sharding_hook_idle_ms")
    if digest.units is None or isinstance(limit, Unknown):
        return hooks
    sizes = digest.collectives.nbytes
    small = _rows(digest) & (sizes >= 0) & (sizes < limit)
    return run.exposed_transfer(digest, step, small) | hooks.clip(step.start_ns, step.end_ns)


def _rows(digest: RankDigest) -> npt.NDArray[np.bool_]:
    """Return which of a rank's collectives move sharded parameters or their gradients."""
    mine = np.zeros(len(digest.collectives), dtype=np.bool_)
    if digest.units is not None:
        mine[digest.units.units.gathers.row] = True
        mine[digest.units.units.reductions.row] = True
    return mine


def _merged_share(digest: RankDigest) -> float | Unknown:
    """Return the share of calls that disappear if each block becomes one unit."""
    units, blocks = digest.facts.get("fsdp_units"), digest.facts.get("fsdp_blocks")
    if not isinstance(units, int) or not isinstance(blocks, int) or units == 0:
        return NOT_SHARDED
    return max(1.0 - blocks / units, 0.0)


def _ring_gbps(digest: RankDigest) -> float | None:
    peak = device_peak(digest.device)
    return None if peak is None or peak.link_gbps is None else RING_SHARE * peak.link_gbps


def _ring_factor(run: RunView, digest: RankDigest) -> float:
    """Return the share of a gathered buffer that crosses a rank's link: (n - 1) / n of the gathers' group."""
    sizes = {
        digest.collectives[row].group_size or run.world_size or len(run.digests)
        for row in (digest.units.units.gathers.row[:1].tolist() if digest.units is not None else [])
    }
    ranks = max(sizes, default=run.world_size or 2)
    return (ranks - 1) / ranks if ranks > 1 else 1.0
