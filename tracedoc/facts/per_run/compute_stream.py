"""A fact about gradients on the compute stream: how long they hold the backward pass, without waiting."""

from __future__ import annotations

from tracedoc.facts.catalog import run_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.values import Unknown


@run_fact(
    "compute_stream_transfer_ms",
    unit="ms",
    scope="rank",
    needs=("kernels", "launches", "collectives", "host_ops"),
    interval="gradients travel on the compute stream, where the rest of the backward pass waits behind them",
)
def compute_stream_transfer_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """:func:`compute_stream_reduction_ms` without waiting for late ranks, where that is known."""
    value = digest.facts.get("compute_stream_reduction_ms")
    if isinstance(value, Unknown):
        return value
    return digest.spans("compute_stream_reduction_ms") & run.transfers(digest)
