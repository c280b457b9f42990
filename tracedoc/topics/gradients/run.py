"""Facts of the run about the reduction of gradients: buckets, when it begins, and number formats."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import digest_fact, manifest_fact
from tracedoc.ranks.run_view import RunView
from tracedoc.run.job import RankJob
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_roles import is_extra
from tracedoc.timeline.collective_table import NONE
from tracedoc.timeline.strategy_signs import plain_dtype
from tracedoc.topics.capture.run import recorded
from tracedoc.topics.communication.run import rows_of_kind
from tracedoc.topics.compute.rank import matrix_dtypes
from tracedoc.topics.gradients.rank import (
    compute_stream_reduction_ms,
    reducing_micro_batches,
)
from tracedoc.topics.links.run import half_rate_bytes
from tracedoc.trace.distinct import median
from tracedoc.values import Unknown, Value, needed

GLOO_HALF_BYTES = 256 * 2**10
"""Message size at which gloo between processes of one host reaches half of its rate (2 KiB took 0.25 ms,
1 MiB 0.85 ms, 8 MiB 9.7 ms in the runs of ``sample_traces``)."""

GOOD_SIZE = 12.0
"""A message of so many half-rate sizes reaches 92 % of the link's rate: larger ones gain little."""

FEWEST_BUCKETS = 3
"""With fewer buckets, too few are reduced beside the rest of the backward pass."""

EVEN_BUCKETS = 8
"""With so many buckets of one size only an eighth of the transfer has no backward compute left beside it."""

MODEL_OPS = frozenset({"all_to_all", "reduce_scatter", "send", "recv", "send_recv", ""})
"""Operations by which layers that are split over ranks exchange data, and those without a name."""

_HALVES = ("bfloat16", "half", "float16", "c10::bfloat16", "c10::half", "bf16", "fp16")

NO_GRADIENTS = Unknown("no gradient reduction was seen in the step")


@digest_fact(unit="count", needs=("host_ops", "collectives"))
def gradient_buckets(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Reductions of gradients in the median step: DDP's buckets, over all its micro-batches."""
    return int(_rows(digest, step).size) or NO_GRADIENTS


@digest_fact(unit="bytes", needs=("host_ops", "collectives"))
def gradient_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Bytes of gradients that the median step reduces."""
    return _total(digest, _rows(digest, step))


@digest_fact(unit="text", needs=("host_ops", "collectives"))
def gradient_dtype(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether most bytes of the median step's gradient reductions are "16-bit" or "wider"; else "unknown"."""
    table, of_dtype = digest.collectives, dict[str, int]()
    for row in _rows(digest, step).tolist():
        dtype = table.kinds[int(table.kind[row])].dtype.lower()
        of_dtype[dtype] = of_dtype.get(dtype, 0) + max(int(table.nbytes[row]), 1)
    name = max(of_dtype, key=lambda dtype: of_dtype[dtype], default="")
    return "unknown" if not name else "16-bit" if name in _HALVES else "wider"


@digest_fact(unit="bytes", needs=("host_ops", "collectives"))
def median_bucket_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Median size of the median step's gradient reductions."""
    rows = _rows(digest, step)
    needed(_total(digest, rows))
    return float(median(digest.collectives.nbytes[rows]))


@digest_fact(unit="ms", needs=("host_ops", "collectives"), interval="exposed gradient reduction")
def gradient_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Exposed time of the median step's gradient reductions, less known waiting for other ranks."""
    return run.exposed_transfer(digest, step, _rows(digest, step))


@digest_fact(
    unit="ms",
    needs=("host_ops", "collectives"),
    interval="collective without gradients and with no compute beside it",
)
def beside_gradients_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Exposed time of the median step's collectives that reduce no gradients, less known waiting.

    In DDP these are buffers, and what the script or a layer exchanges by itself. Not counted is what layers
    exchange as part of the model (all-to-alls, sends and receives, reduce-scatters), nor barriers and small
    messages (:func:`extra_collectives_ms`).
    """
    ops = {kind.op for kind in digest.collectives.kinds} - MODEL_OPS
    return run.exposed_transfer(digest, step, _rows_beside(digest, step, ops))


@digest_fact(unit="text", needs=("host_ops", "collectives"))
def beside_gradients_op(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The kind of collective that takes most of :func:`beside_gradients_ms`."""
    return needed(_longest_beside(run, digest, step))[0].replace("_", "-")


@digest_fact(unit="count", needs=("host_ops", "collectives"))
def beside_gradients_op_calls(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Collectives of the median step that are of the kind of :func:`beside_gradients_op`."""
    return needed(_longest_beside(run, digest, step))[1]


@digest_fact(unit="ms", needs=("host_ops", "collectives"))
def beside_gradients_op_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What of :func:`beside_gradients_ms` is of the kind of :func:`beside_gradients_op`."""
    return needed(_longest_beside(run, digest, step))[2] / 1e6


@digest_fact(unit="bytes", needs=("host_ops", "collectives", reducing_micro_batches))
def suggested_bucket_bytes(run: RunView, digest: RankDigest, step: StepDigest) -> float | Unknown:
    """Bucket size that uses the link and still leaves three buckets to overlap.

    Twelve times the size at which the link reaches half of its rate, a third of all gradients at most: of
    those of one micro-batch, where each reduces its own.
    """
    rows = _rows(digest, step)
    total, half = needed(_total(digest, rows)), needed(_half_bytes(run, digest, rows))
    return min(GOOD_SIZE * half, total / _reducing_passes(digest) / FEWEST_BUCKETS)


@digest_fact(unit="fraction", needs=("host_ops", "collectives", suggested_bucket_bytes))
def bucket_overhead_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Share of the gradient reductions' transfer that fewer, larger buckets would save.

    A transfer takes as long as ``size + half-rate size`` bytes at the link's full rate. Compared are the
    buckets as they are and those of :func:`suggested_bucket_bytes`; 0 where they are as large already.
    """
    suggested, rows = needed(suggested_bucket_bytes(run, digest, step)), _rows(digest, step)
    total, half = needed(_total(digest, rows)), needed(_half_bytes(run, digest, rows))
    fewer = min(-(-total // suggested), float(rows.size))
    return 1.0 - (total + fewer * half) / (total + rows.size * half)


@digest_fact(unit="count", needs=("host_ops", "collectives", suggested_bucket_bytes))
def suggested_bucket_mb(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """The same in MiB, rounded up, as DDP's ``bucket_cap_mb`` takes it."""
    return math.ceil(needed(suggested_bucket_bytes(run, digest, step)) / 2**20)


@digest_fact(unit="count", needs=("host_ops", "collectives", reducing_micro_batches))
def even_bucket_mb(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """An eighth of the gradients of one micro-batch in MiB, rounded up, as ``bucket_cap_mb`` takes it."""
    total = needed(_total(digest, _rows(digest, step)))
    return math.ceil(total / _reducing_passes(digest) / EVEN_BUCKETS / 2**20)


def _reducing_passes(digest: RankDigest) -> int:
    passes = reducing_micro_batches.of(digest)
    return passes if isinstance(passes, int) and passes > 1 else 1


def _longest_beside(run: RunView, digest: RankDigest, step: StepDigest) -> tuple[str, int, int] | Unknown:
    """The kind of collective that takes longest of those that reduce no gradients: its name, calls and ns."""
    found: list[tuple[str, int, int]] = []
    for op in sorted({kind.op for kind in digest.collectives.kinds} - MODEL_OPS):
        rows = _rows_beside(digest, step, {op})
        found.append((op, int(rows.size), run.exposed_transfer(digest, step, rows).total_ns))
    most = max(found, key=lambda one: one[2], default=None)
    return most if most and most[2] else Unknown("no collective beside the gradients is exposed")


def _rows_beside(digest: RankDigest, step: StepDigest, ops: set[str]) -> npt.NDArray[np.intp]:
    """The step's collectives of these kinds that reduce no gradients, and are no bookkeeping."""
    rows = rows_of_kind(digest, step, *ops)
    return np.asarray(rows[~digest.gradients[rows] & ~is_extra(digest.roles[rows])])


def _rows(digest: RankDigest, step: StepDigest) -> npt.NDArray[np.intp]:
    inside = digest.collectives.in_window(step.start_ns, step.end_ns)
    return np.flatnonzero(digest.gradients & inside)


def _total(digest: RankDigest, rows: npt.NDArray[np.intp]) -> int | Unknown:
    sizes = digest.collectives.nbytes[rows]
    if sizes.size == 0:
        return NO_GRADIENTS
    return int(sizes.sum()) if (sizes != NONE).all() else Unknown("not every reduction carries its size")


def _half_bytes(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> float | Unknown:
    if digest.is_cpu:
        return float(GLOO_HALF_BYTES)
    halves = half_rate_bytes(run, digest)
    return halves if isinstance(halves, Unknown) else float(median(halves[rows]))


# -- number formats


HALF_FORMATS = ("bfloat16", "float16")


@digest_fact(unit="ms", needs=("host_ops", "collectives"))
def gradient_transfer_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Time of the median step in which gradients are reduced, hidden or not, less known waiting."""
    transfers = run.transfers(digest, _rows(digest, step))
    return transfers.clip(step.start_ns, step.end_ns).total_ns / 1e6


@digest_fact(unit="fraction", needs=("host_ops", "collectives"))
def fp32_gradients_frac(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Share of the median step's gradient bytes that are reduced in fp32."""
    table = digest.collectives
    sized = digest.gradients & table.in_window(step.start_ns, step.end_ns) & (table.nbytes != NONE)
    total = int(table.nbytes[sized].sum())
    if total == 0:
        return Unknown("no gradient reduction carries its size")
    return int(table.nbytes[sized & _fp32(digest)].sum()) / total


@digest_fact(unit="ms", needs=("host_ops", "collectives", gradient_exposed_ms))
def fp32_reduction_saving_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """What half the bytes would save of the exposed time of fp32 gradient reductions, less known waiting.

    Half of what goes by bytes: of a message ``size / (size + half)`` (:func:`latency_bound_frac` has the
    half-rate size), all of it where the link is not known.
    """
    table = digest.collectives
    rows = _rows(digest, step)
    rows = rows[table.nbytes[rows] != NONE]
    total = float(table.nbytes[rows].sum())
    if total == 0:
        return Unknown("no gradient reduction carries its size")
    halves = half_rate_bytes(run, digest)
    half = np.zeros(rows.size) if isinstance(halves, Unknown) else halves[rows]
    by_bytes = table.nbytes[rows] / (table.nbytes[rows] + half)
    share = float((table.nbytes[rows] * by_bytes * _fp32(digest)[rows]).sum()) / total
    return share / 2 * gradient_exposed_ms(run, digest, step).total_ns / 1e6


@digest_fact(unit="bool", needs=("kernels", matrix_dtypes))
def trains_in_16_bit(run: RunView, digest: RankDigest, step: StepDigest) -> Value:
    """Whether most of the matrix work runs in bf16 or fp16.

    By the types of matrix products where shapes were recorded, else by the names of the kernels.
    """
    if digest.signs.matrix_dtype:
        return digest.signs.matrix_dtype in HALF_FORMATS
    formats = matrix_dtypes.of(digest)
    if not isinstance(formats, str) or not formats or formats.startswith("unknown"):
        return Unknown("in which format matrix products run is not known")
    return formats.startswith(("bf16", "fp16"))


def _fp32(digest: RankDigest) -> np.ndarray:
    kinds = [plain_dtype(kind.dtype) == "float32" for kind in digest.collectives.kinds]
    return np.array(kinds or [False], dtype=bool)[digest.collectives.kind]


# -- on the compute stream


@digest_fact(
    unit="ms",
    needs=("kernels", "launches", "collectives", "host_ops", compute_stream_reduction_ms),
    interval="gradients travel on the compute stream, where the rest of the backward pass waits behind them",
)
def compute_stream_transfer_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans | Unknown:
    """:func:`compute_stream_reduction_ms` without waiting for late ranks, where that is known."""
    needed(compute_stream_reduction_ms.of(digest))
    return compute_stream_reduction_ms.spans_of(digest) & run.transfers(digest)


# -- settings of DDP


@manifest_fact(unit="bytes")
def ddp_bucket_bytes(rank: RankJob) -> Value:
    """``bucket_cap_mb`` of DistributedDataParallel, in bytes."""
    return recorded(rank.buckets.cap_bytes, "the manifest has no DistributedDataParallel")
