"""Facts about tiny sharded units: norms and biases that are gathered on their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.sharded_units import NO_SIZES, NOT_SHARDED
from tracedoc.ranks.run_view import RunView
from tracedoc.ranks.shard_stalls import latest_arrivals
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.shards.shard_units import NO_TIME, ShardCalls
from tracedoc.trace.vocabulary import dtype_bytes
from tracedoc.values import Unknown, Value

TINY_ELEMENTS = 100_000
"""DeepSpeed keeps parameters of fewer elements on every rank unless it is told otherwise."""


@run_fact("tiny_gathers_per_step", unit="count", scope="rank", needs=("collectives",))
def tiny_gathers_per_step(run: RunView) -> dict[str, Value]:
    """Parameter gathers of the median step that bring at most 100,000 elements: a norm, a bias, a router."""
    return run.by_rank(lambda digest, step: _of_step(digest, step, lambda tiny: int(tiny.sum())))


@run_fact("tiny_gathers_frac", unit="fraction", scope="rank", needs=("collectives",))
def tiny_gathers_frac(run: RunView) -> dict[str, Value]:
    """:func:`tiny_gathers_per_step` over all parameter gathers of the median step."""
    return run.by_rank(lambda digest, step: _of_step(digest, step, lambda tiny: float(tiny.mean())))


@run_fact("tiny_gathers_bytes", unit="bytes", scope="rank", needs=("collectives",))
def tiny_gathers_bytes(run: RunView) -> dict[str, Value]:
    """What a GPU holds more if every unit that :func:`tiny_gathers_per_step` counts stays on every rank."""

    def kept(digest: RankDigest, step: StepDigest) -> Value:
        if digest.units is None:
            return NOT_SHARDED
        calls = digest.units.units.gathers
        tiny = _tiny(digest, calls)
        if isinstance(tiny, Unknown):
            return tiny
        mine = tiny & (calls.step == step.index)
        units, first = np.unique(calls.unit[mine], return_index=True)
        return int(calls.nbytes[mine][first].sum()) if units.size else 0

    return run.by_rank(kept)


@run_fact(
    "tiny_gather_cost_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "collectives"),
    interval="gather of a tiny unit with no compute beside it, or compute that waits for one",
)
def tiny_gather_cost_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """What the gathers of tiny units cost the median step: exposed, or until compute goes on behind them.

    Those of :func:`tiny_gathers_per_step`; waiting for late ranks is left out where it is known.
    """
    if digest.units is None:
        return NOT_SHARDED
    calls, times, table = digest.units.units.gathers, digest.units.gather_times, digest.collectives
    tiny = _tiny(digest, calls)
    if isinstance(tiny, Unknown):
        return tiny
    latest = latest_arrivals(run, digest, calls.row)
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
    if digest.units is None:
        return NOT_SHARDED
    calls = digest.units.units.gathers
    tiny, mine = _tiny(digest, calls), calls.step == step.index
    if isinstance(tiny, Unknown):
        return tiny
    return measure(tiny[mine]) if mine.any() else Unknown("the step gathers no parameters")


def _tiny(digest: RankDigest, calls: ShardCalls) -> npt.NDArray[np.bool_] | Unknown:
    """Return which gathers bring a tiny unit; unknown where none carries its size."""
    table = digest.collectives
    width = np.array([dtype_bytes(kind.dtype) or 0 for kind in table.kinds] or [0])[table.kind[calls.row]]
    sized = (calls.nbytes > 0) & (width > 0)
    return sized & (calls.nbytes <= TINY_ELEMENTS * width) if sized.any() else NO_SIZES
