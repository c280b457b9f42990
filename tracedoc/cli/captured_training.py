"""Take from a captured run how it trains: strategy, tokens, precision, optimizer, and what a step took."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tracedoc.diagnosis import CollectiveRow, Diagnosis
from tracedoc.predicted import Predicted
from tracedoc.run.declared_training import (
    CHECKPOINTING,
    HELD_DTYPE,
    MICRO_BATCH,
    MIXED_PRECISION,
    OPTIMIZER,
    PARAMETERS,
    SEQUENCE,
    TRAINED,
)


class Present(msgspec.Struct, frozen=True):
    """How a run trains now; ``None`` and "" where that is not known.

    ``strategy`` is an id of the planner. ``tokens_known`` says that micro-batch and sequence are the run's
    own. ``replayed`` are steps after changes, as ``tracedoc whatif`` names them: low, likely and high.
    """

    strategy: str = ""
    step_ms: float | None = None
    compute_ms: float | None = None
    peak_bytes: float | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    trained: int | None = None
    checkpointing: bool | None = None
    replayed: tuple[tuple[str, tuple[float, float, float]], ...] = ()

    @property
    def tokens_known(self) -> bool:
        """Whether the run tells how many tokens a GPU sees at a time."""
        return bool(self.micro_batch and self.sequence)


def present(diagnosis: Diagnosis) -> Present:
    """Return how the run trains: from its facts, and from the settings that its ranks recorded."""
    settings, on_gpu = diagnosis.run.settings, diagnosis.run.backend != "gloo"
    samples, tokens = number(diagnosis, "samples_per_s"), number(diagnosis, "tokens_per_s")
    batch, rounds = number(diagnosis, "micro_batch_samples"), number(diagnosis, "micro_batches")
    trained, every = whole(settings, TRAINED), whole(settings, PARAMETERS)
    return Present(
        strategy=_STRATEGIES.get((_kind(diagnosis), diagnosis.run.strategy.sharding), ""),
        step_ms=number(diagnosis, "step_ms") if on_gpu else None,
        compute_ms=diagnosis.budget.compute_ms if diagnosis.budget and on_gpu else None,
        peak_bytes=number(diagnosis, "peak_reserved_bytes"),
        micro_batch=int(batch) if batch else whole(settings, MICRO_BATCH),
        sequence=round(tokens / samples) if tokens and samples else whole(settings, SEQUENCE),
        accumulation=int(rounds) if rounds and rounds >= 1 else None,
        precision=_precision(diagnosis),
        optimizer=_OPTIMIZERS.get(settings.get(OPTIMIZER, "").lower()),
        trained=trained if trained and every and trained < every else None,
        checkpointing={"yes": True, "no": False}.get(settings.get(CHECKPOINTING, "")),
        replayed=_replayed(diagnosis) if on_gpu else (),
    )


def _replayed(diagnosis: Diagnosis) -> tuple[tuple[str, tuple[float, float, float]], ...]:
    """Return the replayed steps that a plan asks about: on more ranks, or with parameters kept gathered."""
    found = [fix.predicted for finding in diagnosis.findings for fix in finding.fixes if fix.predicted]
    more = diagnosis.replay.more_ranks if diagnosis.replay else ()
    steps = [*(one for one in more if isinstance(one, Predicted)), *found]
    asked = ("more-ranks", "keep-gathered")
    sure = [one for one in steps if one.change.startswith(asked) and one.confidence != "low"]
    return tuple(dict.fromkeys((one.change, one.step_ms) for one in sure))


def whole(settings: Mapping[str, str], name: str) -> int | None:
    """Return a setting that is a positive whole number, ``None`` where it is none."""
    value = settings.get(name, "")
    return int(value) or None if value.isascii() and value.isdigit() and len(value) < 20 else None


def number(diagnosis: Diagnosis, name: str) -> float | None:
    """Return a fact that is a number, ``None`` where it is not known."""
    record = diagnosis.facts.get(name)
    value = record.value if record else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def link_curve(diagnosis: Diagnosis) -> tuple[float, float, CollectiveRow] | None:
    """Return what the run's collectives reached: GB/s, microseconds a call, the operation with most bytes.

    With several sizes, a call's time is a latency and its bytes over a bandwidth, fitted to them; with one,
    its bandwidth has the latency in it, and none is added. ``None`` where arrivals were not known.
    """
    moving = ("all_reduce", "all_gather", "reduce_scatter")
    rows = [
        row
        for row in diagnosis.detail.collectives
        if row.busbw_gbps and row.bytes_median and row.bytes_per_step and row.op in moving
    ]
    if not rows or diagnosis.run.backend == "gloo":
        return None
    largest = max(rows, key=lambda row: row.bytes_per_step or 0)
    # Messages of a few bytes say nothing of a bandwidth.
    sizes = ((row.bytes_median or 0, row.busbw_gbps or 0.0) for row in rows)
    points = sorted((size / 1e9, rate) for size, rate in sizes if size >= 1 << 16)
    gbps, latency_us = largest.busbw_gbps or 0.0, 0.0
    if len(points) > 1 and points[-1][0] > 4 * points[0][0]:
        (small, slow), (large, fast) = points[0], points[-1]
        seconds = large / fast - small / slow
        if seconds > 0 and (large - small) / seconds >= fast:
            gbps = (large - small) / seconds
            latency_us = max(0.0, (small / slow - small / gbps) * 1e6)
    return gbps, latency_us, largest


_STRATEGIES = {
    ("single", "none"): "single",
    ("ddp", "none"): "ddp",
    ("zero", "optimizer"): "zero-1",
    ("zero", "gradients"): "zero-2",
    ("zero", "full"): "zero-3",
    ("fsdp", "gradients"): "shard-grad-op",
    ("fsdp", "full"): "full-shard",
    ("fsdp", "hybrid-full"): "hsdp",
    ("fsdp", "none"): "ddp",
}
"""The planner's strategy for a family and what it shards."""


def _kind(diagnosis: Diagnosis) -> str:
    family = diagnosis.run.strategy.family
    return next((kind for kind in ("fsdp", "zero") if family.startswith(kind)), family)


def _precision(diagnosis: Diagnosis) -> str | None:
    """Return what the run computes in: what its trainer says, else what it gathers, multiplies or holds."""
    half = {"bfloat16": "bf16", "float16": "fp16"}
    said = diagnosis.run.settings.get(MIXED_PRECISION, "")
    if said in half.values():
        return f"{said}-mixed"
    held = diagnosis.run.settings.get(HELD_DTYPE, "").rpartition(".")[2]
    gathered, multiplied = _text(diagnosis, "parameter_dtype"), _text(diagnosis, "matrix_dtype")
    if gathered in half:
        reduced = {r.dtype for r in diagnosis.detail.collectives if r.op == "reduce_scatter"}
        pure = held in half or (not held and "Float" not in reduced)
        return "bf16" if pure and gathered == "bfloat16" else f"{half[gathered]}-mixed"
    if held == "float32" and multiplied in half:
        return f"{half[multiplied]}-mixed"
    return "bf16" if held == "bfloat16" else None


def _text(diagnosis: Diagnosis, name: str) -> str:
    record = diagnosis.facts.get(name)
    return str(record.value) if record and record.value else ""


_OPTIMIZERS = {
    "adamw": "adamw",
    "fusedadam": "adamw",
    "adam": "adam",
    "sgd": "sgd-momentum",
    "adafactor": "adafactor",
    "muon": "muon",
    "adamw8bit": "adamw-8bit",
    "pagedadamw8bit": "paged-adamw-8bit",
    "pagedadamw32bit": "paged-adamw",
}
