"""Random jobs for the simulator, and the fixes that can be applied to them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.replay.fluid import Job, Op

MIB = 1 << 20


def draw_job(seed: int) -> Job:
    """Return a job: DDP, sharded, or a loader-bound one, with a straggler or contention in some."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 2, 4))
    kind = ("ddp", "sharded", "loader")[seed % 3]
    layers = rng.randint(4, 8)
    host = rng.choice((0.02, 0.05, 0.3))
    work = rng.uniform(0.5, 3.0)
    size = int(rng.uniform(8, 120) * MIB)
    step = {rank: _step(kind, layers, host, work, size, rng) for rank in range(1)}
    every = {rank: list(step[0]) for rank in range(ranks)}
    if rng.random() < 0.4:
        late = rng.randrange(ranks)
        factor = rng.uniform(1.1, 1.5)
        every[late] = [replace(op, ms=op.ms * factor) if op.kind == "kernel" else op for op in every[late]]
    return Job(
        ranks, every,
        gbps=rng.choice((20.0, 60.0, 200.0)),
        latency_ms=rng.uniform(0.01, 0.05),
        contention=rng.choice((0.0, 0.0, 0.1)),
        jitter=rng.choice((0.0, 0.01)),
        seed=seed,
    )  # fmt: skip


def _step(kind: str, layers: int, host: float, work: float, size: int, rng: random.Random) -> list[Op]:
    ops: list[Op] = []
    if kind == "loader":
        ops.append(Op("load", rng.uniform(5, 40)))
    for layer in range(layers):
        needs: tuple[str, ...] = ()
        if kind == "sharded":
            before = (f"f{layer - 1}",) if layer else ()
            ops += [
                Op("work", host),
                _gather(layer, size, before),
            ]
            needs = (f"g{layer}",)
        ops += [Op("work", host), Op("kernel", work, name=f"fwd_{layer}", key=f"f{layer}", needs=needs)]
    reduced = []
    for layer in reversed(range(layers)):
        ops += [
            Op("work", host),
            Op("kernel", 2 * work, name=f"bwd_{layer}", key=f"b{layer}", part="backward"),
        ]
        op = "reducescatter" if kind == "sharded" else "allreduce"
        ops += [
            Op("work", host),
            _reduction(op, layer, size),
        ]
        reduced.append(f"r{layer}")
    ops += [Op("work", host), Op("kernel", 0.3 * work, name="adam", key="o", needs=tuple(reduced))]
    ops += [Op("sync"), Op("work", 0.1)]
    return ops


def _gather(layer: int, size: int, before: tuple[str, ...]) -> Op:
    return Op("comm", stream=20, name="allgather", key=f"g{layer}", nbytes=size, needs=before)


def _reduction(name: str, layer: int, size: int) -> Op:
    return Op("comm", stream=24, name=name, key=f"r{layer}", nbytes=size, needs=(f"b{layer}",))


def fixed(job: Job, change: str) -> Job:
    """Return the job with a fix applied, as someone who edits the training script would."""
    name, *words = change.split()
    by = float(words[0].split("=")[1]) if words else 1.0
    if name == "faster-link":
        return replace(job, gbps=job.gbps * by)
    if name == "faster-host":
        return replace(job, host=job.host * by)
    if name == "faster-kernels":
        return _each(job, lambda op: replace(op, ms=op.ms / by) if op.kind == "kernel" else op)
    if name == "feed-input":
        return _each(job, lambda op: replace(op, ms=0.05) if op.kind == "load" else op)
    if name == "no-sync":
        steps = {rank: [op for op in ops if op.kind != "sync"] for rank, ops in job.step.items()}
        return replace(job, step=steps)
    if name == "even-ranks":
        sums = {rank: sum(op.ms for op in ops if op.kind == "kernel") for rank, ops in job.step.items()}
        best = min(sums, key=lambda rank: sums[rank])
        return replace(job, step={rank: list(job.step[best]) for rank in job.step})
    raise ValueError(change)


def _each(job: Job, edit) -> Job:
    return replace(job, step={rank: [edit(op) for op in ops] for rank, ops in job.step.items()})


CHANGES = ("faster-link by=2", "faster-host by=0.5", "faster-kernels by=2", "feed-input", "even-ranks")
