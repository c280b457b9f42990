"""Facts about the number format in which gradients travel, and what a smaller one would save."""

from __future__ import annotations

import numpy as np

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_run.gradients import gradient_exposed_ms
from tracedoc.facts.per_run.links import half_rate_bytes
from tracedoc.ranks.run_view import RunView
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.strategy_signs import plain_dtype
from tracedoc.values import Unknown, Value

HALF_FORMATS = ("bfloat16", "float16")


@run_fact("gradient_transfer_ms", unit="ms", scope="rank", needs=("host_ops", "collectives"))
def gradient_transfer_ms(run: RunView) -> dict[str, Value]:
    """Time of the median step in which gradients are reduced, hidden or not, less known waiting."""

    def transfer(digest: RankDigest, step: StepDigest) -> Value:
        table = digest.collectives
        rows = np.flatnonzero(digest.gradients & table.in_window(step.start_ns, step.end_ns))
        return run.transfers(digest, rows).clip(step.start_ns, step.end_ns).total_ns / 1e6

    return run.by_rank(transfer)


@run_fact("fp32_gradients_frac", unit="fraction", scope="rank", needs=("host_ops", "collectives"))
def fp32_gradients_frac(run: RunView) -> dict[str, Value]:
    """Share of the median step's gradient bytes that are reduced in fp32."""

    def share(digest: RankDigest, step: StepDigest) -> Value:
        table = digest.collectives
        sized = digest.gradients & table.in_window(step.start_ns, step.end_ns) & (table.nbytes != NONE)
        total = int(table.nbytes[sized].sum())
        if total == 0:
            return Unknown("no gradient reduction carries its size")
        return int(table.nbytes[sized & _fp32(digest)].sum()) / total

    return run.by_rank(share)


@run_fact("fp32_reduction_saving_ms", unit="ms", scope="rank", needs=("host_ops", "collectives"))
def fp32_reduction_saving_ms(run: RunView) -> dict[str, Value]:
    """What half the bytes would save of the exposed time of fp32 gradient reductions, less known waiting.

    Half of what goes by bytes: of a message ``size / (size + half)`` (:func:`latency_bound_frac` has the
    half-rate size), all of it where the link is not known.
    """

    def saving(digest: RankDigest, step: StepDigest) -> Value:
        table = digest.collectives
        rows = np.flatnonzero(
            digest.gradients & table.in_window(step.start_ns, step.end_ns) & (table.nbytes != NONE)
        )
        total = float(table.nbytes[rows].sum())
        if total == 0:
            return Unknown("no gradient reduction carries its size")
        halves = half_rate_bytes(run, digest)
        half = np.zeros(rows.size) if isinstance(halves, Unknown) else halves[rows]
        by_bytes = table.nbytes[rows] / (table.nbytes[rows] + half)
        share = float((table.nbytes[rows] * by_bytes * _fp32(digest)[rows]).sum()) / total
        return share / 2 * gradient_exposed_ms(run, digest, step).total_ns / 1e6

    return run.by_rank(saving)


@run_fact("trains_in_16_bit", unit="bool", scope="rank", needs=("kernels",))
def trains_in_16_bit(run: RunView) -> dict[str, Value]:
    """Whether most of the matrix work runs in bf16 or fp16.

    By the types of matrix products where shapes were recorded, else by the names of the kernels.
    """

    def half(digest: RankDigest, step: StepDigest) -> Value:
        if digest.signs.matrix_dtype:
            return digest.signs.matrix_dtype in HALF_FORMATS
        formats = digest.facts.get("matrix_dtypes")
        if not isinstance(formats, str) or not formats or formats.startswith("unknown"):
            return Unknown("in which format matrix products run is not known")
        return formats.startswith(("bf16", "fp16"))

    return run.by_rank(half)


def _fp32(digest: RankDigest) -> np.ndarray:
    kinds = [plain_dtype(kind.dtype) == "float32" for kind in digest.collectives.kinds]
    return np.array(kinds or [False], dtype=bool)[digest.collectives.kind]
