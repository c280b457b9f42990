"""Draw jobs at random: of every kind, healthy ones and ones with faults, captured well and badly."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulated.spec import Fault, Job
from tests.simulated.traces import Capture

FAULTS = {
    "straggler-host": ("ddp", "fsdp", "zero", "tensor"),
    "straggler-compute": ("ddp", "fsdp", "zero", "tensor"),
    "straggler-input": ("ddp", "fsdp", "zero"),
    "pauses": ("ddp", "fsdp", "zero"),
    "rotating": ("ddp", "fsdp", "zero"),
    "uneven": ("ddp", "fsdp", "zero", "pipeline"),
    "heavy-stage": ("pipeline",),
    "slow-worker": ("pipeline",),
    "slow-link": ("ddp", "fsdp", "zero", "tensor"),
    "exposed-comm": ("ddp", "fsdp", "zero", "tensor"),
    "small-buckets": ("ddp",),
    "giant-bucket": ("ddp",),
    "every-micro-batch": ("ddp",),
    "fine-wrap": ("fsdp",),
    "coarse-wrap": ("fsdp",),
    "no-prefetch": ("fsdp",),
    "launch-bound": ("ddp", "fsdp", "zero", "tensor", "pipeline"),
    "tiny-batch": ("ddp", "fsdp", "zero"),
    "syncs": ("ddp", "fsdp", "zero", "tensor"),
    "loader": ("ddp", "fsdp", "zero", "tensor"),
    "pageable": ("ddp", "fsdp", "zero"),
    "allocator": ("ddp", "fsdp", "zero"),
}
"""Which kinds of job a fault is drawn for."""


def draw_job(seed: int, fault: str | None) -> Job:
    """Return a job with ``fault`` (and now and then a second one), a healthy one for ``None``."""
    draw = random.Random(f"job {seed} {fault}")
    kind = draw.choice(FAULTS[fault] if fault else ("ddp", "fsdp", "zero", "tensor", "pipeline"))
    job = _healthy(draw, seed, kind)
    if fault is None:
        return job
    job = _with(draw, job, fault)
    if draw.random() < 0.25:
        others = [name for name, kinds in FAULTS.items() if kind in kinds and _goes_with(name, fault)]
        job = _with(draw, job, draw.choice(others)) if others else job
    return job


def draw_capture(seed: int, job: Job) -> Capture:
    """Return how a job is captured; one in three has clocks of their own, one in ten misses a rank."""
    draw = random.Random(f"capture {seed}")
    hosts = draw.choice((2, 4, 8))
    ahead: dict[int, float] = {}
    drift: dict[int, float] = {}
    if draw.random() < 0.35 and hosts < job.ranks:
        for host in range((job.ranks + hosts - 1) // hosts):
            shift, rate = draw.uniform(-2000, 2000), draw.uniform(-2e-5, 2e-5)
            for rank in range(host * hosts, min((host + 1) * hosts, job.ranks)):
                ahead[rank], drift[rank] = shift, rate
    # NCCL and the devices of one host stamp the end of an operation some microseconds apart.
    for rank in range(job.ranks):
        ahead[rank] = ahead.get(rank, 0.0) + draw.uniform(0.0, 0.008)
    missing: tuple[int, ...] = ()
    if draw.random() < 0.1 and job.ranks > 2:
        at_fault = {fault.rank for fault in job.faults}
        missing = (draw.choice([rank for rank in range(job.ranks) if rank not in at_fault]),)
    operators = draw.random() >= 0.12 or any(
        fault.name not in ("heavy-stage", "slow-worker", "straggler-compute") for fault in job.faults
    )
    return Capture(ahead, drift, hosts, missing, operators)


def _healthy(draw: random.Random, seed: int, kind: str) -> Job:
    if kind == "pipeline":
        stages = draw.choice((2, 4))
        job = Job(
            seed, kind, ranks=stages * draw.choice((1, 2)), stages=stages,
            layers=stages * draw.choice((1, 2)), micro_batches=stages * draw.choice((2, 4)),
            kernels=4, logs=False,
        )  # fmt: skip
    elif kind == "tensor":
        job = Job(seed, kind, ranks=draw.choice((2, 4, 8)), tensor=2, layers=draw.choice((4, 8)))
        job = replace(job, tensor=draw.choice([t for t in (2, 4) if t <= job.ranks]))
    else:
        job = Job(seed, kind, ranks=draw.choice((2, 4, 8)), layers=draw.choice((6, 8, 12)))
    layer_ms = draw.uniform(2.0, 6.0)
    size = draw.uniform(0.1, 0.35) * layer_ms * job.link_gbps / 1.05 / (2.0 if kind != "fsdp" else 1.5)
    return replace(
        job,
        layer_ms=layer_ms,
        layer_mib=min(size, 400.0),
        activation_mib=draw.uniform(0.02, 0.05) * layer_ms * job.link_gbps / 2 / job.tensor,
        kernels=draw.choice((4, 6, 8)),
        bucket_mib=max(min(size, 400.0), 1.0),
        jitter=draw.choice((0.005, 0.01, 0.02)),
        logs=job.logs and draw.random() < 0.5,
        micro_batches=job.micro_batches if kind == "pipeline" or draw.random() < 0.7 else 2,
        steps=draw.choice((1, 2, 3, 4, 5, 5, 6, 8)) if kind != "pipeline" else draw.choice((1, 2, 3, 4)),
    )


def _with(draw: random.Random, job: Job, name: str) -> Job:
    """Return the job with one more fault, that costs some 5 to 60 % of its step."""
    step = 3 * job.layer_ms * job.layers * job.micro_batches / job.stages / job.tensor
    if job.kind == "fsdp":
        step = 3 * job.layer_ms * job.layers
    rank = draw.randrange(job.ranks)
    share = draw.uniform(0.08, 0.5)
    amounts = {
        "straggler-host": share * step,
        "straggler-compute": 1 + share,
        "straggler-input": share * step,
        "pauses": 2 * share * step,
        "rotating": share * step,
        "uneven": draw.uniform(0.15, 0.5),
        "heavy-stage": 1 + 2 * share,
        "slow-worker": 1 + 2 * share,
        "slow-link": draw.uniform(6, 20),
        "exposed-comm": 0.0,
        "small-buckets": draw.uniform(0.5, 2.0),
        "giant-bucket": 0.0,
        "every-micro-batch": 0.0,
        "fine-wrap": draw.choice((4, 6)),
        "coarse-wrap": 0.0,
        "no-prefetch": 0.0,
        "launch-bound": 1.0,
        "tiny-batch": draw.uniform(0.01, 0.05),
        "syncs": draw.choice((4, 8)),
        "loader": share * step,
        "pageable": share * step * 6.0,
        "allocator": share * step,
    }
    if name == "heavy-stage":
        rank = draw.randrange(job.stages)
    changes: dict[str, dict[str, float]] = {
        "exposed-comm": {"layer_mib": job.layer_mib * draw.uniform(6, 14), "bucket_mib": job.bucket_mib * 4},
        "small-buckets": {"layer_mib": min(job.layer_mib, 60.0), "latency_ms": 0.06},
        "giant-bucket": {"layer_mib": job.layer_mib * 3},
        "every-micro-batch": {"micro_batches": 4, "layer_mib": job.layer_mib * 3},
        "fine-wrap": {"latency_ms": 0.25},
        "coarse-wrap": {"layer_mib": job.layer_mib * 3},
        "no-prefetch": {"layer_mib": job.layer_mib * 2},
    }
    if name == "launch-bound":
        calls = 3 * job.kernels * step / (3 * job.layer_ms / job.tensor)
        amounts[name] = step * draw.uniform(1.15, 2.0) / calls / job.launch_ms
    if name == "exposed-comm" and job.kind == "tensor":
        changes[name] = {"activation_mib": job.activation_mib * draw.uniform(6, 14)}
    if name == "syncs":
        changes[name] = {"launch_ms": 0.3 * job.layer_ms / job.kernels}
    fault = Fault(name, rank, amounts[name])
    if name in ("loader", "straggler-input", "pageable", "allocator", "straggler-host", "pauses", "rotating"):
        # A host that is far ahead hides what it does; these faults cost where it is not.
        changes[name] = {"logs": True}
    return replace(job, faults=(*job.faults, fault), **changes.get(name, {}))  # type: ignore[arg-type]


def _goes_with(name: str, fault: str) -> bool:
    if name.startswith(("exposed", "small", "giant", "fine", "coarse", "no-", "launch", "tiny", "every")):
        return False
    if fault in ("launch-bound", "tiny-batch", "syncs"):
        return False
    rank = ("straggler-host", "straggler-compute", "straggler-input", "pauses", "rotating", "uneven",
            "slow-worker", "heavy-stage")  # fmt: skip
    return name != fault and not (name in rank and fault in rank)
