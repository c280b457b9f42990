"""Facts about the reduction of gradients: its buckets, when it begins, and what larger buckets would save."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tracedoc.facts.catalog import run_fact
from tracedoc.facts.per_rank.phase_times import NO_PHASES
from tracedoc.facts.per_run.exposed_communication import hidden_by_last_ns
from tracedoc.facts.per_run.links import half_rate_bytes, usual_call_ns
from tracedoc.ranks.run_view import RunView
from tracedoc.spans import Spans
from tracedoc.step.rank_digest import RankDigest, StepDigest
from tracedoc.timeline.collective_table import NONE
from tracedoc.values import Unknown, Value

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


@run_fact("gradient_buckets", unit="count", scope="rank", needs=("host_ops", "collectives"))
def gradient_buckets(run: RunView) -> dict[str, Value]:
    """Reductions of gradients in the median step: DDP's buckets, over all its micro-batches."""
    return run.by_rank(lambda digest, step: int(_rows(digest, step).size) or NO_GRADIENTS)


@run_fact("gradient_bytes", unit="bytes", scope="rank", needs=("host_ops", "collectives"))
def gradient_bytes(run: RunView) -> dict[str, Value]:
    """Bytes of gradients that the median step reduces."""
    return run.by_rank(lambda digest, step: _total(digest, _rows(digest, step)))


@run_fact("gradient_dtype", unit="text", scope="rank", needs=("host_ops", "collectives"))
def gradient_dtype(run: RunView) -> dict[str, Value]:
    """Whether most bytes of the median step's gradient reductions are "16-bit" or "wider"; else "unknown"."""

    def most(digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
        table, of_dtype = digest.collectives, dict[str, int]()
        for row in rows.tolist():
            dtype = table.kinds[int(table.kind[row])].dtype.lower()
            of_dtype[dtype] = of_dtype.get(dtype, 0) + max(int(table.nbytes[row]), 1)
        name = max(of_dtype, key=lambda dtype: of_dtype[dtype], default="")
        return "unknown" if not name else "16-bit" if name in _HALVES else "wider"

    return run.by_rank(lambda digest, step: most(digest, _rows(digest, step)))


@run_fact("median_bucket_bytes", unit="bytes", scope="rank", needs=("host_ops", "collectives"))
def median_bucket_bytes(run: RunView) -> dict[str, Value]:
    """Median size of the median step's gradient reductions."""

    def median(digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
        total = _total(digest, rows)
        return total if isinstance(total, Unknown) else float(np.median(digest.collectives.nbytes[rows]))

    return run.by_rank(lambda digest, step: median(digest, _rows(digest, step)))


@run_fact(
    "gradient_exposed_ms",
    unit="ms",
    scope="rank",
    needs=("host_ops", "collectives"),
    interval="exposed gradient reduction",
)
def gradient_exposed_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Exposed time of the median step's gradient reductions, less known waiting for other ranks."""
    return run.exposed_transfer(digest, step, _rows(digest, step))


@run_fact(
    "beside_gradients_ms",
    unit="ms",
    scope="rank",
    needs=("host_ops", "collectives"),
    interval="collective without gradients and with no compute beside it",
)
def beside_gradients_ms(run: RunView, digest: RankDigest, step: StepDigest) -> Spans:
    """Exposed time of the median step's collectives that reduce no gradients, less known waiting.

    In DDP these are buffers, metrics and barriers. What layers exchange as part of the model is not counted:
    all-to-alls, sends and receives, and reduce-scatters.
    """
    ops = {kind.op for kind in digest.collectives.kinds} - MODEL_OPS
    return _beside_gradients(run, digest, step, ops)[1]


@run_fact("beside_gradients_op", unit="text", scope="rank", needs=("host_ops", "collectives"))
def beside_gradients_op(run: RunView) -> dict[str, Value]:
    """The kind of collective that takes most of :func:`beside_gradients_ms`."""
    return _of_longest_beside(run, lambda op, rows, spans: op.replace("_", "-"))


@run_fact("beside_gradients_op_calls", unit="count", scope="rank", needs=("host_ops", "collectives"))
def beside_gradients_op_calls(run: RunView) -> dict[str, Value]:
    """Collectives of the median step that are of the kind of :func:`beside_gradients_op`."""
    return _of_longest_beside(run, lambda op, rows, spans: int(rows.size))


@run_fact("beside_gradients_op_ms", unit="ms", scope="rank", needs=("host_ops", "collectives"))
def beside_gradients_op_ms(run: RunView) -> dict[str, Value]:
    """What of :func:`beside_gradients_ms` is of the kind of :func:`beside_gradients_op`."""
    return _of_longest_beside(run, lambda op, rows, spans: spans.total_ns / 1e6)


@run_fact("suggested_bucket_bytes", unit="bytes", scope="rank", needs=("host_ops", "collectives"))
def suggested_bucket_bytes(run: RunView) -> dict[str, Value]:
    """Bucket size that uses the link and still leaves three buckets to overlap.

    Twelve times the size at which the link reaches half of its rate, a third of all gradients at most: of
    those of one micro-batch, where each reduces its own.
    """
    return run.by_rank(lambda digest, step: _suggested(run, digest, _rows(digest, step)))


@run_fact("bucket_overhead_frac", unit="fraction", scope="rank", needs=("host_ops", "collectives"))
def bucket_overhead_frac(run: RunView) -> dict[str, Value]:
    """Share of the gradient reductions' transfer that fewer, larger buckets would save.

    A transfer takes as long as ``size + half-rate size`` bytes at the link's full rate. Compared are the
    buckets as they are and those of :func:`suggested_bucket_bytes`; 0 where they are as large already.
    """
    return run.by_rank(lambda digest, step: _overhead(run, digest, _rows(digest, step)))


@run_fact("bucket_saving_ms", unit="ms", scope="rank", needs=("host_ops", "collectives"))
def bucket_saving_ms(run: RunView) -> dict[str, Value]:
    """Exposed gradient reduction that fewer, larger buckets would save: overhead times exposed time."""

    def saving(digest: RankDigest, step: StepDigest) -> Value:
        overhead = _overhead(run, digest, _rows(digest, step))
        exposed = gradient_exposed_ms(run, digest, step).total_ns / 1e6
        return overhead * exposed if isinstance(overhead, float) else overhead

    return run.by_rank(saving)


@run_fact("suggested_bucket_mb", unit="count", scope="rank", needs=("host_ops", "collectives"))
def suggested_bucket_mb(run: RunView) -> dict[str, Value]:
    """The same in MiB, rounded up, as DDP's ``bucket_cap_mb`` takes it."""

    def rounded(size: Value) -> Value:
        return math.ceil(size / 2**20) if isinstance(size, float) else size

    return {rank: rounded(size) for rank, size in suggested_bucket_bytes(run).items()}


@run_fact("late_reduction_ms", unit="ms", scope="rank", needs=("kernels", "host_ops", "collectives"))
def late_reduction_ms(run: RunView) -> dict[str, Value]:
    """Exposed gradient reduction after the backward pass, less known waiting for other ranks.

    What a rank that comes last still hides behind its backward pass is not in it either.
    """

    def late(digest: RankDigest, step: StepDigest) -> Value:
        after = digest.facts.get("comm_after_backward_ms", NO_PHASES)
        if not isinstance(after, (int, float)):
            return after
        exposed_ns = gradient_exposed_ms(run, digest, step).total_ns
        return min(
            float(after),
            max(exposed_ns - hidden_by_last_ns(run, digest, step, digest.gradients), 0) / 1e6,
        )

    return run.by_rank(late)


@run_fact("splittable_reduction_ms", unit="ms", scope="rank", needs=("kernels", "host_ops", "collectives"))
def splittable_reduction_ms(run: RunView) -> dict[str, Value]:
    """What eight buckets of one size would hide of :func:`late_reduction_ms`; 0 where there are as many.

    The eight become ready one after the other over the backward pass (of the last micro-batch) and travel in
    turn, each with the latency of a call more than today: what is then left after the backward pass is an
    eighth of their transfer, or all of it less seven eighths of the backward compute.
    """
    late = late_reduction_ms(run)
    return run.by_rank(lambda digest, step: _splittable(run, digest, step, late[str(digest.rank)]))


@run_fact("even_bucket_mb", unit="count", scope="rank", needs=("host_ops", "collectives"))
def even_bucket_mb(run: RunView) -> dict[str, Value]:
    """An eighth of the gradients of one micro-batch in MiB, rounded up, as ``bucket_cap_mb`` takes it."""

    def eighth(digest: RankDigest, step: StepDigest) -> Value:
        total = _total(digest, _rows(digest, step))
        if isinstance(total, Unknown):
            return total
        return math.ceil(float(total) / _reducing_passes(digest) / EVEN_BUCKETS / 2**20)

    return run.by_rank(eighth)


@run_fact("repeated_reduction_ms", unit="ms", scope="rank", needs=("host_ops", "collectives"))
def repeated_reduction_ms(run: RunView) -> dict[str, Value]:
    """Exposed gradient reduction of all micro-batches but one that reduce, less known waiting."""

    def repeated(digest: RankDigest, step: StepDigest) -> Value:
        passes = digest.facts.get("reducing_micro_batches", NO_PHASES)
        if not isinstance(passes, int):
            return passes if isinstance(passes, Unknown) else NO_PHASES
        exposed = gradient_exposed_ms(run, digest, step).total_ns / 1e6
        return exposed * (passes - 1) / passes if passes > 1 else 0.0

    return run.by_rank(repeated)


def _splittable(run: RunView, digest: RankDigest, step: StepDigest, late: Value) -> Value:
    rows, backward = _rows(digest, step), digest.facts.get("backward_compute_ms", NO_PHASES)
    if not isinstance(late, (int, float)) or not isinstance(backward, (int, float)):
        return late if isinstance(late, Unknown) else NO_PHASES
    buckets = rows.size / _reducing_passes(digest)
    if buckets == 0 or buckets >= EVEN_BUCKETS:
        return 0.0
    passes = digest.facts.get("micro_batches", 1)
    transfer = run.transfers(digest, rows).total_ns / 1e6 / _reducing_passes(digest)
    transfer += (EVEN_BUCKETS - buckets) * _call_latency_ms(run, digest, rows)
    last_pass = float(backward) / max(passes, 1) if isinstance(passes, int) else float(backward)
    left = max(transfer / EVEN_BUCKETS, transfer - last_pass * (1 - 1 / EVEN_BUCKETS))
    return max(float(late) - left, 0.0)


def _call_latency_ms(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> float:
    """Return what a call costs beyond its bytes on measured machines, 0 where that is not known."""
    halves, usual = half_rate_bytes(run, digest), usual_call_ns(run, digest)[rows]
    sizes = digest.collectives.nbytes[rows]
    known = ~np.isnan(usual) & (sizes != NONE)
    if isinstance(halves, Unknown) or not known.any():
        return 0.0
    return float(np.median((usual * halves[rows] / (sizes + halves[rows]))[known])) / 1e6


def _reducing_passes(digest: RankDigest) -> int:
    passes = digest.facts.get("reducing_micro_batches")
    return passes if isinstance(passes, int) and passes > 1 else 1


def _of_longest_beside(
    run: RunView, value: Callable[[str, npt.NDArray[np.intp], Spans], Value]
) -> dict[str, Value]:
    """Return what is said of the kind of collective that takes longest of those that reduce no gradients."""

    def longest(digest: RankDigest, step: StepDigest) -> Value:
        ops = sorted({kind.op for kind in digest.collectives.kinds} - MODEL_OPS)
        found = [(op, *_beside_gradients(run, digest, step, {op})) for op in ops]
        most = max(found, key=lambda one: one[2].total_ns, default=None)
        if most is None or not most[2].total_ns:
            return Unknown("no collective beside the gradients is exposed")
        return value(*most)

    return run.by_rank(longest)


def _beside_gradients(
    run: RunView, digest: RankDigest, step: StepDigest, ops: set[str]
) -> tuple[npt.NDArray[np.intp], Spans]:
    """Return the step's collectives of these kinds that reduce no gradients, and their exposed time."""
    table = digest.collectives
    rows = np.flatnonzero(table.is_op(*ops) & table.in_window(step.start_ns, step.end_ns) & ~digest.gradients)
    return rows, run.exposed_transfer(digest, step, rows)


def _rows(digest: RankDigest, step: StepDigest) -> npt.NDArray[np.intp]:
    inside = digest.collectives.in_window(step.start_ns, step.end_ns)
    return np.flatnonzero(digest.gradients & inside)


def _total(digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
    sizes = digest.collectives.nbytes[rows]
    if sizes.size == 0:
        return NO_GRADIENTS
    return int(sizes.sum()) if (sizes != NONE).all() else Unknown("not every reduction carries its size")


def _half_bytes(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> float | Unknown:
    if digest.is_cpu:
        return float(GLOO_HALF_BYTES)
    halves = half_rate_bytes(run, digest)
    return halves if isinstance(halves, Unknown) else float(np.median(halves[rows]))


def _suggested(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
    total = _total(digest, rows)
    if isinstance(total, Unknown):
        return total
    half = _half_bytes(run, digest, rows)
    if isinstance(half, Unknown):
        return half
    return min(GOOD_SIZE * half, float(total) / _reducing_passes(digest) / FEWEST_BUCKETS)


def _overhead(run: RunView, digest: RankDigest, rows: npt.NDArray[np.intp]) -> Value:
    total, suggested = _total(digest, rows), _suggested(run, digest, rows)
    if isinstance(total, Unknown):
        return total
    if isinstance(suggested, Unknown):
        return suggested
    half = _half_bytes(run, digest, rows)
    if isinstance(half, Unknown):
        return half
    fewer = min(-(-float(total) // float(suggested)), float(rows.size))
    return 1.0 - (float(total) + fewer * half) / (float(total) + rows.size * half)
