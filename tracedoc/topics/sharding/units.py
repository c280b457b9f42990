"""Facts of the run about the size of sharded units: too small for the link, tiny, across nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import digest_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.shards.shard_units import FORWARD, NO_TIME, ShardCalls
from tracedoc.topics.communication.run import latency_bound_bytes
from tracedoc.topics.links.run import leaves_node
from tracedoc.topics.sharding.rank import NO_SIZES
from tracedoc.topics.sharding.run import table_of
from tracedoc.trace.vocabulary import dtype_bytes
from tracedoc.values import Unknown, Value, needed


@digest_fact(unit="fraction", needs=("collectives",))
def latency_bound_gathers_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Share of the median step's parameter gathers that are too small to use the link.

    Latency-bound is as in :func:`latency_bound_frac`; gathers without a size are left out.
    """
    calls = needed(table_of(digest)).units.gathers
    limit = needed(latency_bound_bytes(run, digest))
    mine = (calls.step == step.index) & (calls.nbytes > 0)
    small = calls.nbytes[mine] < limit[calls.row[mine]]
    return float(small.mean()) if small.size else Unknown("the gathers carry no sizes")


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="gather or reduce-scatter with no compute beside it",
)
def sharded_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers and reduce-scatters of units, less known waiting."""
    needed(table_of(digest))
    return run.exposed_transfer(digest, step, _rows(digest))


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="gather of the backward pass with no compute beside it",
)
def regather_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """Exposed time of the median step in gathers of the backward pass, less known waiting."""
    calls = needed(table_of(digest)).units.gathers
    return run.exposed_transfer(digest, step, calls.row[calls.phase != FORWARD])


def _rows(digest: RankDigest) -> npt.NDArray[np.bool_]:
    """A mask of the rank's collectives that move sharded parameters or their gradients."""
    mine = np.zeros(len(digest.collectives), dtype=np.bool_)
    if digest.units is not None:
        mine[digest.units.units.gathers.row] = True
        mine[digest.units.units.reductions.row] = True
    return mine


# -- tiny units


TINY_ELEMENTS = 100_000
"""DeepSpeed keeps parameters of fewer elements on every rank unless it is told otherwise."""


@digest_fact(unit="count", needs=("collectives",))
def tiny_gathers_per_step(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Parameter gathers of the median step that bring at most 100,000 elements: a norm, a bias, a router."""
    return _of_step(digest, step, lambda tiny: int(tiny.sum()))


@digest_fact(unit="fraction", needs=("collectives",))
def tiny_gathers_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """:func:`tiny_gathers_per_step` over all parameter gathers of the median step."""
    return _of_step(digest, step, lambda tiny: float(tiny.mean()))


@digest_fact(unit="bytes", needs=("collectives",))
def tiny_gathers_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What a GPU holds more if every unit that :func:`tiny_gathers_per_step` counts stays on every rank."""
    calls = needed(table_of(digest)).units.gathers
    tiny = needed(_tiny(digest, calls))
    mine = tiny & (calls.step == step.index)
    units, first = np.unique(calls.unit[mine], return_index=True)
    return int(calls.nbytes[mine][first].sum()) if units.size else 0


@digest_fact(
    unit="ms",
    needs=("kernels", "collectives"),
    interval="gather of a tiny unit with no compute beside it, or compute that waits for one",
)
def tiny_gather_cost_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the gathers of tiny units cost the median step: exposed, or until compute goes on behind them.

    Those of :func:`tiny_gathers_per_step`; waiting for late ranks is left out where it is known.
    """
    units, table = needed(table_of(digest)), digest.collectives
    calls, times = units.units.gathers, units.gather_times
    tiny = needed(_tiny(digest, calls))
    latest = run.arrivals[digest.rank].of_all_ns[calls.row]
    begins = np.where(latest == NO_TIME, calls.start_ns, np.maximum(latest, calls.start_ns))
    exposed = digest.exposed_comm & Spans.of(begins[tiny], table.end_ns[calls.row[tiny]])
    if times is not None:
        stalled = tiny & (times.stall_ns > 0)
        until = times.stall_end_ns
        exposed = exposed | Spans.of(np.maximum(until - times.stall_ns, begins)[stalled], until[stalled])
    return exposed.clip(step.start_ns, step.end_ns)


def _of_step(
    digest: RankDigest, step: StepDigest, measure: Callable[[npt.NDArray[np.bool_]], Value]
) -> Value:
    calls = needed(table_of(digest)).units.gathers
    tiny, mine = needed(_tiny(digest, calls)), calls.step == step.index
    return measure(tiny[mine]) if mine.any() else Unknown("the step gathers no parameters")


def _tiny(digest: RankDigest, calls: ShardCalls) -> npt.NDArray[np.bool_] | Unknown:
    """A mask of the gathers that bring a tiny unit; unknown where none carries its size."""
    table = digest.collectives
    width = np.array([dtype_bytes(kind.dtype) or 0 for kind in table.kinds] or [0])[table.kind[calls.row]]
    sized = (calls.nbytes > 0) & (width > 0)
    return sized & (calls.nbytes <= TINY_ELEMENTS * width) if sized.any() else NO_SIZES


# -- nodes


@digest_fact(unit="bool", needs=("collectives",))
def gathers_leave_node(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether parameters are gathered over several nodes, though GPUs inside a node have a faster link.

    By the group that gathers most bytes. A node is a host: NVLink and xGMI end there, but for racks whose
    NVLink spans hosts (GB200, GB300) and boards that differ in it (GH200), for which this is unknown. False
    where a host has one rank of the group only, and where GPUs are joined by PCIe.
    """
    return leaves_node(run, digest, needed(table_of(digest)).units.gathers.row)
