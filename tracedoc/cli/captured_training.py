"""Take from a captured run how it trains: strategy, tokens, precision, optimizer, and what a step took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tracedoc.diagnosis import CollectiveRow, Diagnosis

Part = Mapping[str, object]


class Present(msgspec.Struct, frozen=True):
    """How a run trains now; ``None`` and "" where that is not known.

    ``strategy`` is an id of the planner. ``tokens_known`` says that micro-batch and sequence are the run's
    own.
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

    @property
    def tokens_known(self) -> bool:
        """Whether the run tells how many tokens a GPU sees at a time."""
        return bool(self.micro_batch and self.sequence)


def present(diagnosis: Diagnosis, manifest: Part) -> Present:
    """Return how the run trains: from its facts, and from the live objects that the manifest describes."""
    model, on_gpu = _part(manifest, "model"), diagnosis.run.backend != "gloo"
    samples, tokens = number(diagnosis, "samples_per_s"), number(diagnosis, "tokens_per_s")
    batch = number(diagnosis, "micro_batch_samples")
    shape = _batch_shape(manifest)
    sequence = round(tokens / samples) if tokens and samples else (shape[1] if shape else None)
    checkpointing = model.get("gradient_checkpointing")
    trained = model.get("trained_parameters")
    whole = model.get("parameters")
    rounds = number(diagnosis, "micro_batches")
    return Present(
        strategy=_STRATEGIES.get((_kind(diagnosis), diagnosis.run.strategy.sharding), ""),
        step_ms=number(diagnosis, "step_ms") if on_gpu else None,
        compute_ms=diagnosis.budget.compute_ms if diagnosis.budget and on_gpu else None,
        peak_bytes=number(diagnosis, "peak_reserved_bytes"),
        micro_batch=int(batch) if batch else (shape[0] if shape else None),
        sequence=sequence,
        accumulation=int(rounds) if rounds and rounds >= 1 else None,
        precision=_precision(diagnosis, manifest),
        optimizer=_optimizer(manifest),
        trained=trained if isinstance(trained, int) and isinstance(whole, int) and trained < whole else None,
        checkpointing=checkpointing if isinstance(checkpointing, bool) else None,
    )


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


def _precision(diagnosis: Diagnosis, manifest: Part) -> str | None:
    """Return what the run computes in: what its trainer says, else what it gathers or holds."""
    said = _part(manifest, "accelerate").get("mixed_precision")
    trainer = _part(manifest, "trainer")
    for short in ("bf16", "fp16"):
        if said == short or trainer.get(short) is True:
            return f"{short}-mixed"
    dtypes = _part(_part(manifest, "model"), "parameter_dtypes")
    held = str(next(iter(dtypes), "")).rpartition(".")[2]
    record = diagnosis.facts.get("parameter_dtype")
    gathered = str(record.value) if record and record.value else ""
    half = {"bfloat16": "bf16", "float16": "fp16"}
    if gathered in half:
        reduced = {r.dtype for r in diagnosis.detail.collectives if r.op == "reduce_scatter"}
        pure = held in half or (not held and "Float" not in reduced)
        return "bf16" if pure and gathered == "bfloat16" else f"{half[gathered]}-mixed"
    if held == "bfloat16":
        return "bf16"
    return None


def _optimizer(manifest: Part) -> str | None:
    optimizers = manifest.get("optimizers")
    first = optimizers[0] if isinstance(optimizers, list) and optimizers else {}
    name = str(first.get("inner") or first.get("name") or "") if isinstance(first, Mapping) else ""
    return _OPTIMIZERS.get(name.lower())


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


def _batch_shape(manifest: Part) -> tuple[int, int] | None:
    """Return micro-batch and sequence of the first batch of whole numbers: the ids of tokens."""
    for tensor in _tensors(manifest):
        shape, dtype = tensor.get("shape"), str(tensor.get("dtype"))
        if isinstance(shape, list) and len(shape) == 2 and dtype.endswith(("int64", "int32")):
            return int(shape[0]), int(shape[1])
    return None


def _tensors(manifest: Part) -> Iterator[Part]:
    batch = manifest.get("batch")
    yield from (one for one in batch if isinstance(one, Mapping)) if isinstance(batch, list) else ()


def _part(entry: Part, key: str) -> Part:
    found = entry.get(key)
    return found if isinstance(found, Mapping) else {}
