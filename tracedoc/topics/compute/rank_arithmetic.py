"""Facts of one rank about arithmetic: floating-point operations, MFU, samples and tokens per second."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from tracedoc.facts.catalog import rank_fact
from tracedoc.step.device import half_tflops
from tracedoc.timeline.build import RankTimeline
from tracedoc.timeline.kernel_work import KernelWork
from tracedoc.timeline.launches import NO_ROW
from tracedoc.timeline.operator_calls import extents_of
from tracedoc.timeline.phases import Phase
from tracedoc.trace.columns import Kind
from tracedoc.trace.kernels import MATRIX
from tracedoc.units import format_percent
from tracedoc.values import Unknown, Value, needed

EXPLAINED_SHARE = 0.80
"""Counted operators must have launched at least this share of the matrix kernels' time."""

BATCH_OPERATORS: tuple[tuple[tuple[str, ...], int, int], ...] = (
    (("aten::conv2d",), 0, 4),
    (("aten::embedding",), 1, 2),
    (("aten::linear",), 0, 3),
)
"""Operators whose first call in a step shows the batch: names, which argument, and its dimensions."""

HALF_TYPES = ("c10::BFloat16", "c10::Half", "BFloat16", "Half")


class MatrixWork(msgspec.Struct, frozen=True):
    """The matrix operations of one host step: FLOPs in all, on 16-bit inputs, and of what is recomputed."""

    flops: float
    half_flops: float
    again_flops: float


@rank_fact(unit="tflops", needs=("shapes", "kernels", "launches"))
def model_tflops(timeline: RankTimeline) -> Value:
    """Floating-point operations of the median step's matrix work per second, in 1e12.

    Counted from the shapes of matrix products (2 M N K), convolutions and fused attention (4 B H S T D
    forward, 2.5 times that backward), as they ran: recomputed activations count too, the causal mask does
    not. Unknown where the counted operators launched less than 80 % of the matrix kernels' time.
    """
    work, budget = needed(_matrix_work(timeline)), timeline.judged_budget
    if budget is None or budget.window_ns == 0:
        return Unknown("no step can be judged")
    return work.flops / budget.window_ns / 1e3


@rank_fact(unit="fraction", needs=("shapes", "kernels", "launches"))
def mfu_frac(timeline: RankTimeline) -> Value:
    """Model FLOP/s utilisation: :func:`hfu_frac` without what the backward pass computes again."""
    return _utilisation(timeline, lambda work: work.flops - work.again_flops)


@rank_fact(unit="fraction", needs=("shapes", "kernels", "launches"))
def hfu_frac(timeline: RankTimeline) -> Value:
    """Hardware FLOP/s utilisation: :func:`model_tflops` over the dense 16-bit peak of the device.

    Unknown for devices that are not in the table, and where half of the work or more is not 16-bit.
    """
    return _utilisation(timeline, lambda work: work.flops)


def _utilisation(timeline: RankTimeline, flops: Callable[[MatrixWork], float]) -> Value:
    work, budget = needed(_matrix_work(timeline)), timeline.judged_budget
    half_peak = needed(half_tflops(timeline))
    if work.half_flops <= 0.5 * work.flops:
        return Unknown("most matrix work is not in 16 bits; its peak depends on the TF32 setting")
    if budget is None or budget.window_ns == 0:
        return Unknown("no step can be judged")
    return flops(work) / budget.window_ns / 1e3 / half_peak


@rank_fact(unit="count", needs=("shapes", "host_ops"))
def micro_batch_samples(timeline: RankTimeline) -> Value:
    """Samples in one forward pass: the first extent of the step's first convolution or embedding input.

    Where the step has neither, of its first linear layer with a batch and a sequence.
    """
    return needed(_first_batch(timeline)).samples


@rank_fact(unit="per_s", needs=("shapes", "host_ops"))
def samples_per_s(timeline: RankTimeline) -> Value:
    """Samples that one rank trains on per second: samples of all forward passes over the median step."""
    return _rate(timeline, lambda batch: batch.samples)


@rank_fact(unit="per_s", needs=("shapes", "host_ops"))
def tokens_per_s(timeline: RankTimeline) -> Value:
    """Tokens that one rank trains on per second: samples times sequence length over the median step."""
    return _rate(timeline, lambda batch: batch.samples * batch.sequence if batch.sequence else None)


def _rate(timeline: RankTimeline, amount: Callable[[Batch], int | None]) -> Value:
    batch, budget = needed(_first_batch(timeline)), timeline.judged_budget
    count = amount(batch)
    if count is None:
        return Unknown("the input has no sequence dimension")
    if budget is None or budget.window_ns == 0:
        return Unknown("no step can be judged")
    return count * batch.passes / (budget.window_ns / 1e9)


class Batch(msgspec.Struct, frozen=True):
    """The input of one forward pass, and how many passes the step makes."""

    samples: int
    sequence: int | None
    passes: int


def _first_batch(timeline: RankTimeline) -> Batch | Unknown:
    step, trace = timeline.judged_host_step, timeline.trace
    if step is None:
        return Unknown("the host's steps are not known")
    shaped = trace.shapes.rows
    shaped = shaped[(trace.ts_ns[shaped] >= step.start_ns) & (trace.ts_ns[shaped] < step.end_ns)]
    for names, argument, length in BATCH_OPERATORS:
        of_kind = shaped[trace.named_among(shaped, names.__contains__)].tolist()
        sized = [row for row in of_kind if extents_of(trace.shapes[row].dims, argument, length)]
        if not sized:
            continue
        first = trace.shapes[sized[0]].dims
        extents = extents_of(first, argument, length) or ()
        alike = sum(trace.shapes[row].dims == first for row in of_kind)
        passes = _forward_passes(timeline, step.start_ns, step.end_ns) or alike
        return Batch(extents[0], None if "aten::conv2d" in names else extents[1], passes)
    return Unknown("no operator with a batch dimension carries its shape")


def _forward_passes(timeline: RankTimeline, start_ns: int, end_ns: int) -> int | None:
    """The forward passes of a host step, from the wrapper's own range."""
    trace = timeline.trace
    for wrapper in ("DistributedDataParallel.forward", "FSDP::root_pre_forward"):
        rows = trace.rows_named(wrapper.__eq__, Kind.ANNOTATION, Kind.CPU_OP)
        inside = (trace.ts_ns[rows] >= start_ns) & (trace.ts_ns[rows] < end_ns)
        if inside.any():
            return int(inside.sum())
    return None


def _matrix_work(timeline: RankTimeline) -> MatrixWork | Unknown:
    step, trace, work = timeline.judged_host_step, timeline.trace, timeline.work
    if step is None:
        return Unknown("the host's steps are not known")
    if work is None:
        return Unknown("the work of kernels could not be told")
    operators = work.operators
    called = trace.ts_ns[operators.rows]
    inside = np.flatnonzero(operators.is_matrix & (called >= step.start_ns) & (called < step.end_ns))
    if not inside.size:
        return Unknown("no matrix operation carries its shape")
    share = _explained_share(timeline, work)
    if share < EXPLAINED_SHARE:
        return Unknown(f"operators with shapes launched {format_percent(share)} of the matrix kernels' time")
    types = [trace.shapes[row].types[:1] for row in operators.rows[inside].tolist()]
    half = np.array([bool(one) and one[0] in HALF_TYPES for one in types])
    phases, flops = timeline.phases, operators.flops[inside]
    again = 0.0 if phases is None else flops[phases.at(called[inside]) == Phase.RECOMPUTE].sum()
    return MatrixWork(float(flops.sum()), float(flops[half].sum()), float(again))


def _explained_share(timeline: RankTimeline, work: KernelWork) -> float:
    """The share of the analysed step's matrix-kernel time that operators with known work launched."""
    trace, events = timeline.trace, timeline.events
    position = timeline.position_of(timeline.judged) if timeline.judged is not None else None
    matrix = np.zeros(len(trace.names), dtype=bool)
    for name_id, category in events.categories.items():
        matrix[name_id] = category in MATRIX
    wanted = matrix[trace.name[events.rows]] & events.kernels
    if position is not None:
        wanted &= timeline.step_position == position
    rows = events.rows[wanted]
    lengths = trace.dur_ns[rows]
    explained = work.of(rows)[0] != NO_ROW
    total = int(lengths.sum())
    return int(lengths[explained].sum()) / total if total else 0.0
